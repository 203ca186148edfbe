"""The pictures of the README: a small job is run and hurt, watched in terminals of 80 and 160 columns, and reported.

    python docs/screens/make.py

Needs Chromium and tmux. The job is the example on 8 emulated devices of 4 virtual nodes (`resihp.executor.emulation`),
so that predictions can be compared with what was measured on a machine of few cores; it takes some minutes. What
is in the pictures is what the commands showed: terminals are captured by tmux and drawn by Rich, the report is opened
in Chromium. Writes PNG files beside this script.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESIHP = [sys.executable, "-m", "resihp"]
LAYER_MS = "40"
JOB = ["--local", "--nodes", "4", "--gpus-per-node", "2", "--tp", "2", "--pp", "2"]
FAULTS = ["crash:rank=5@iteration=12,phase=backward", "slow:rank=2,speed=0.4@iteration=32,until=50"]
FAULTS += ["kill:rank=1@iteration=70,phase=forward"]
SCRIPT = ["examples/pretrain_gpt.py", "--layers", "8", "--iterations", "90"]
WATCHED_AT = 44
"""The iteration at which terminals are captured: the slow device stands by."""
TERMINALS = ((80, 24), (160, 30))
PATIENCE_S = 900.0
MOST_BYTES = 300_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NORMAL = "282c34 e86a5c 6cbe76 e0b254 5c9ee6 ba8ad8 56b6c2 bec4cc"
BRIGHT = "6e7681 ff7b6e 7ed388 f0c468 74b2f5 ceA0eb 6aced8 f0f3f6"


def colours(words: str) -> list[tuple[int, int, int]]:
    return [(int(word[:2], 16), int(word[2:4], 16), int(word[4:], 16)) for word in words.split()]


THEME = TerminalTheme((21, 24, 28), (222, 226, 231), colours(NORMAL), colours(BRIGHT))


def main() -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None or shutil.which("tmux") is None:
        sys.exit(
            "docs/screens: Chromium and tmux are needed; type: apt-get install --no-install-recommends chromium tmux"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ |= {"RESIHP_HOME": str(folder / "home"), "RESIHP_LOCAL": str(folder / "local"), "HOME": temporary}
        os.environ["RESIHP_STATE"] = str(folder / "state")
        log = (folder / "log").open("w")
        faults = [word for fault in FAULTS for word in ("--fault", fault)]
        command = [*RESIHP, "run", *JOB, *faults, "--", sys.executable, *SCRIPT]
        environment = {**os.environ, "RESIHP_EMULATED_LAYER_MS": LAYER_MS}
        job = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            wait_for(WATCHED_AT, job)
            for columns, lines in TERMINALS:
                draw_terminal(watched(columns, lines), columns, HERE / f"watch-{columns}.png", browser, folder)
            if job.wait(PATIENCE_S) != 0:
                sys.exit(f"docs/screens: the job failed: {(folder / 'log').read_text()[-2000:]}")
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
        page = folder / "report.html"
        subprocess.run([*RESIHP, "report", "-o", str(page)], cwd=ROOT, check=True)
        for name, width, height, scale in (("report-desktop", 1280, 1640, 1), ("report-phone", 390, 1000, 2)):
            photograph(browser, f"file://{page}", HERE / f"{name}.png", width, height, scale)
        photograph_part(browser, page, HERE / "report-layouts.png", "layouts")
    for path in sorted(HERE.glob("*.png")):
        shrink(path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


def wait_for(iteration: int, job: subprocess.Popen[bytes]) -> None:
    """Until the job has come so far."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and job.poll() is None:
        told = subprocess.run([*RESIHP, "status", "--json"], cwd=ROOT, capture_output=True, text=True)
        if told.returncode == 0 and json.loads(told.stdout)["iteration"] >= iteration:
            return
        time.sleep(1.0)
    sys.exit(f"docs/screens: the job did not reach iteration {iteration}")


def watched(columns: int, lines: int) -> str:
    """What `resihp status --watch` shows in a terminal of that size, with its escapes for colours."""
    name = f"resihp-screens-{os.getpid()}-{columns}"
    tmux = ["tmux", "-L", name]
    size = ["-x", str(columns), "-y", str(lines)]
    command = f"cd {ROOT} && exec {' '.join(RESIHP)} status --watch"
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", *size, command], check=True)
    try:
        for _ in range(60):
            time.sleep(1.0)
            shown = subprocess.run(
                [*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True
            ).stdout
            if "goodput" in shown:
                return shown.rstrip("\n")
        sys.exit("docs/screens: status --watch showed nothing")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def draw_terminal(shown: str, columns: int, path: Path, browser: str, folder: Path) -> None:
    """A captured screen as a picture."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(shown), soft_wrap=True)
    drawn = console.export_svg(title="resihp status --watch", theme=THEME)
    # Rich's picture asks the network for its font; any font of fixed width does.
    drawn = re.sub(r"@font-face\s*{.*?}", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("Fira Code", "DejaVu Sans Mono")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert box is not None
    width, height = (round(float(number)) for number in box.groups())
    page = folder / f"{path.stem}.html"
    page.write_text(f'<!DOCTYPE html><body style="margin:0"><div style="width:{width}px">{drawn}</div>')
    photograph(browser, f"file://{page}", path, width, height, 1)


def photograph(browser: str, url: str, path: Path, width: int, height: int, scale: int) -> None:
    subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--force-device-scale-factor={scale}",
            f"--window-size={width},{height}",
            f"--screenshot={path}",
            url,
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def photograph_part(browser: str, page: Path, path: Path, part: str) -> None:
    """One section of the report: the others are left out."""
    hide = f"<style>main > :not(#{part}) {{ display: none }} main {{ padding-top: 0 !important }}</style></head>"
    copy = page.with_name(f"{part}.html")
    copy.write_text(page.read_text().replace("</head>", hide))
    photograph(browser, f"file://{copy}", path, 1280, 900, 1)


def shrink(path: Path) -> None:
    """Fewer colours where the file is large; fails if it is large still."""
    picture = Image.open(path).convert("RGB")
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path}: {path.stat().st_size} bytes, more than {MOST_BYTES}")


if __name__ == "__main__":
    main()
