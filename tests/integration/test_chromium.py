"""The report in a real browser, headless Chromium: fits a desktop and a phone, asks for nothing.

The browser runs a copy of the page with a probe at its end that measures and writes what it found into the page, which
`--dump-dom` prints; the policy that forbids scripts is taken out of the copy, and stays in a second run that looks at
what the browser logs. A phone's width is that of a frame, because a window of Chromium cannot be as narrow.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from resihp.wrapper.commands.report import page
from tests.db.conftest import any_layout_story, story
from tests.wrapper.commands.test_report import facts_of, long_story, nasty_story

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = [1280, 390]
LOGGING = ("--enable-logging=stderr", "--v=0")
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PROBE = """
<script>
const wide = [];
const edge = document.documentElement.clientWidth;
for (const element of document.querySelectorAll("body *")) {
  const box = element.getBoundingClientRect();
  if (box.right > edge + 1 && !element.closest(".scroll, svg, pre")) wide.push(element.tagName + " " + box.right);
}
document.title = JSON.stringify({
  width: window.innerWidth,
  scrolls: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  drawings: [...document.querySelectorAll("svg.drawing")].map((each) => each.getBoundingClientRect().width),
  wide: wide.slice(0, 5),
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here; try: apt-get install -y --no-install-recommends chromium")
    return found


def chromium(browser: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no test of ours reaches beyond this machine
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    home = {**os.environ, "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=home)


def measured(browser: str, folder: Path, text: str, width: int) -> dict[str, Any]:
    """What the probe finds in a window of `width`: the page stands in a frame that is as wide."""
    copy, count = POLICY.subn("", text)
    assert count == 1
    (folder / "page.html").write_text(copy.replace("</body>", PROBE + "</body>"))
    outer = f"""<!DOCTYPE html><body style="margin:0"><iframe src="page.html" width="{width}" height="900"
      style="border:0" onload="document.title = this.contentDocument.title"></iframe>"""
    (folder / "outer.html").write_text(outer)
    shown = chromium(
        browser,
        folder,
        "--allow-file-access-from-files",
        "--virtual-time-budget=5000",
        "--window-size=1400,1000",
        "--dump-dom",
        f"file://{folder / 'outer.html'}",
    )
    title = re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL)
    assert title is not None, shown.stdout[:500]
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found


PAGES = {
    "a short job": lambda folder: facts_of(folder, story()),
    "unequal layouts": lambda folder: facts_of(folder, any_layout_story()),
    "a long job": lambda folder: facts_of(folder, long_story(2000, 120)),
    "nasty names": lambda folder: facts_of(folder, nasty_story()),
    "just begun": lambda folder: facts_of(folder, (told for n, told in enumerate(story()) if n < 1)),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_and_asks_for_nothing(browser: str, tmp_path: Path, name: str, width: int) -> None:
    text = page.html(PAGES[name](tmp_path))
    found = measured(browser, tmp_path, text, width)
    assert found["width"] == width
    assert found["scrolls"] <= width, found["wide"]
    assert found["wide"] == []
    assert all(drawing <= width for drawing in found["drawings"])
    assert len(found["drawings"]) >= 1


def test_the_probe_sees_what_does_not_fit(browser: str, tmp_path: Path) -> None:
    bad = '<div style="width: 2000px">x</div>'
    text = page.html(facts_of(tmp_path, story())).replace("<main>", f"<main>{bad}")
    found = measured(browser, tmp_path, text, 390)
    assert found["scrolls"] >= 2000
    assert found["wide"]


def requests(browser: str, folder: Path, text: str) -> list[str]:
    """What the page asked the network for; the browser's own requests have no origin."""
    (folder / "x.html").write_text(text)
    log = folder / "net.json"
    chromium(browser, folder, f"--log-net-log={log}", "--dump-dom", f"file://{folder / 'x.html'}")
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    asked = [event for event in events if "url" in event and event.get("initiator", "not an origin") != "not an origin"]
    return [event["url"] for event in asked if not event["url"].startswith(("data:", "file:"))]


def test_the_page_asks_the_network_for_nothing(browser: str, tmp_path: Path) -> None:
    text = page.html(facts_of(tmp_path, any_layout_story()))
    assert requests(browser, tmp_path, text) == []
    text = POLICY.sub("", text)
    assert requests(browser, tmp_path, text) == [], "nor is it only its policy that keeps it from asking"
    bad = text.replace("<main>", '<main><img src="http://page.invalid/x.png">')
    assert requests(browser, tmp_path, bad) == ["http://page.invalid/x.png"], "it would be seen"


def test_the_browser_has_nothing_to_complain_about(browser: str, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_text(page.html(facts_of(tmp_path, story())))
    told = chromium(browser, tmp_path, *LOGGING, "--dump-dom", f"file://{path}")
    assert "CONSOLE" not in told.stderr
    assert "<summary" in told.stdout
    path.write_text(path.read_text().replace("</body>", "<script>1</script></body>"))
    told = chromium(browser, tmp_path, *LOGGING, "--dump-dom", f"file://{path}")
    assert "CONSOLE" in told.stderr, "the page's own policy forbids scripts, and its breach would be seen"


def test_names_that_look_like_scripts_do_not_run(browser: str, tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_text(POLICY.sub("", page.html(facts_of(tmp_path, nasty_story()))))
    told = chromium(browser, tmp_path, *LOGGING, "--dump-dom", f"file://{path}")
    assert "CONSOLE" not in told.stderr
    assert "<script" not in told.stdout
    assert "<img" not in told.stdout


def test_print_opens_everything(browser: str, tmp_path: Path) -> None:
    facts = facts_of(tmp_path, long_story(600, 30))
    (tmp_path / "x.html").write_text(page.html(facts))
    chromium(browser, tmp_path, f"--print-to-pdf={tmp_path / 'x.pdf'}", f"file://{tmp_path / 'x.html'}")
    pages = len(re.findall(rb"/Type\s*/Page\b", (tmp_path / "x.pdf").read_bytes()))
    assert pages > 6, "evidence of 30 failures and as many layouts are more than closed lines"
