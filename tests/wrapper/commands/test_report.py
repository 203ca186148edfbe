"""`resihp report`: a page that is complete without network or script, into which no name can inject anything."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.db.writing.catch_up import catch_up
from resihp.errors import JobNotFoundError, UsageError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan, spread
from resihp.record import journal
from resihp.wrapper.cli import app
from resihp.wrapper.commands.report import page
from resihp.wrapper.commands.report.command import file_name, write
from resihp.wrapper.commands.report.facts import Facts, read
from resihp.wrapper.commands.report.layouts import Picture, changes
from resihp.wrapper.commands.report.markdown import markdown, text
from resihp.wrapper.commands.report.story import CAUSE_WORDS, node_lines, safe, sentences, settings
from resihp.wrapper.commands.report.svg import ticks, time_ticks
from resihp.wrapper.commands.report.timeline import MAX_BOXES, TIME_BINS, timeline
from resihp.wrapper.job_folder import create_local_job
from resihp.wrapper.output.render import hours
from tests.db.conftest import BEGAN, absent_story, any_layout_story, node_story, outcome, started, story, write_journal
from tests.db.test_suspicions import suspicious_story

Told = Iterator[tuple[journal.AnyEntry, float]]
NASTY = (
    "n</title></style></script><script>alert(1)</script><img src=x onerror=alert(2)>"
    "\"'`${7*7}{{7*7}}{%raw%}&lt;\N{LATIN SMALL LETTER E WITH ACUTE}\N{CJK UNIFIED IDEOGRAPH-6F22}\x1b[2J"
)
VOID = {"meta", "link", "br", "hr", "img", "input"}


def facts_of(folder: Path, told: Told, now_s: float = 100.0) -> Facts:
    """What the ledger tells of a job with this journal, `now_s` seconds after it began."""
    write_journal(folder / "journal", told)
    url = f"sqlite:///{folder / 'ledger.db'}"
    catch_up(url, folder, folder / "journal")
    with Reader.open(url) as reader:
        return read(reader, reader.job(), datetime.fromtimestamp(BEGAN + now_s, UTC))


def seconds_in(value: msgspec.Struct) -> Iterator[float]:
    """All figures of an account."""
    for each in msgspec.structs.asdict(value).values():
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, float):
            yield each


def test_a_job_that_went_on_from_a_checkpoint_did_not_train_what_was_before_it(tmp_path: Path) -> None:
    def resumed() -> Told:
        for entry, at in story():
            if isinstance(entry, journal.IterationCommitted):
                entry = msgspec.structs.replace(entry, outcome=outcome(entry.outcome.iteration + 56))
            yield entry, at

    first, *_ = sentences(facts_of(tmp_path, resumed()))
    assert first.startswith("Job local-1 trained iterations 57 to 76 on 3 nodes")


def test_what_was_noticed_late_of_a_slow_down_is_no_part_of_the_time_to_recover_from_a_loss(tmp_path: Path) -> None:
    """It said "training was back 1.07 s after it (4.08 s of that for detection)"."""
    facts = facts_of(tmp_path, story())
    [loss] = facts.failures
    slow = {**loss, "kind": "fail-slow", "seconds_to_recover": None, "noticed_after_seconds": 4.08}
    told = " ".join(sentences(msgspec.structs.replace(facts, failures=[slow, loss])))
    assert "training was back 1.02 s after the one that stopped it (0.02 s of that for detection)" in told


@pytest.mark.parametrize("step_s", [-2 * 3600.0, 6 * 3600.0])
@pytest.mark.parametrize("tell", [story, any_layout_story, node_story])
def test_a_clock_that_was_set_makes_no_time_negative(tell: Callable[[], Told], step_s: float, tmp_path: Path) -> None:
    """A supervisor's, in the middle of it, or that of the node that took over."""
    told = list(tell())
    for number in range(1, len(told), 6):
        (folder := tmp_path / str(number)).mkdir()
        stepped = [(entry, at + step_s * (place >= number)) for place, (entry, at) in enumerate(told)]
        facts = facts_of(folder, iter(stepped), 100.0 + step_s)
        assert min(seconds_in(facts.account)) >= 0.0
        assert 0.0 <= (facts.account.goodput or 0.0) <= 1.0
        assert not re.search(r"(?<![\w.-])-\d[\d.]* ?(s|min|h|d|%)\b", markdown(facts) + Page(page.html(facts)).words)


def test_of_many_recoveries_each_stretch_of_time_shows_its_share(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, story())
    facts = msgspec.structs.replace(facts, ended=facts.began + timedelta(seconds=TIME_BINS))
    halves = [(n + 0.75, 0.5) for n in range(MAX_BOXES)]  # each within a stretch of its own
    rows = [
        {"finished_at": facts.began + timedelta(seconds=end_s), "seconds": seconds}
        for end_s, seconds in (*halves, (100.25, 0.5), (TIME_BINS - 0.5, 4.0))
    ]
    drawn = timeline(msgspec.structs.replace(facts, reconfigurations=rows))
    shares = re.findall(r"changes of plan took ([\d.]+) % of this time", drawn)
    assert shares == ["50.0"] * MAX_BOXES + ["25.0"] * 2 + ["50.0", "100.0", "100.0", "100.0", "50.0"]


class Page(HTMLParser):
    """The page as a browser sees it; complains where elements do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attributes:
            self.handlers += [name] if name.startswith("on") else []
            self.links += [value or ""] if name in ("src", "href", "action", "xlink:href") else []

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words += text


def seen(facts: Facts) -> str:
    """The words of the page, blanks as one."""
    return " ".join(Page(page.html(facts)).words.split())


# --- what it tells ----------------------------------------------------------------------------------------------------


def test_the_page_tells_what_happened(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, story())
    words = seen(facts)
    assert "Job local-1 completed" in words
    assert "Job local-1 trained 20 iterations on 3 nodes with 4 devices each" in words
    assert (
        "One failure was noticed (1 fail-stop); training was back 1.02 s after it (0.02 s of that for detection)."
        in words
    )
    assert f"Goodput was {100 * facts.account.goodput:.1f} %" in words  # type: ignore[operator]
    assert "pid 1005 on node n2: killed by signal 9 (SIGKILL)" in words, "the evidence"
    assert "n2 device 1, iteration 12" in words
    assert "DP2 x PP2 x TP2 + 3 standby" in words
    assert "python train.py --title 'a \"b\" [red]c'" in words
    assert "layout.tp 2" in words
    assert "resihp 0.1.0" in words


def test_the_page_needs_no_network_and_no_script(tmp_path: Path) -> None:
    text = page.html(facts_of(tmp_path, story()))
    shown = Page(text)
    assert "script" not in shown.tags
    assert shown.links == ["data:,"]
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_sentences_of_a_job_that_has_barely_begun(tmp_path: Path) -> None:
    nothing = facts_of(tmp_path, iter([(started(), BEGAN)]))
    assert sentences(nothing) == (
        "Job local-1 on 3 nodes with 4 devices each has committed no iteration in 1 min 40 s; it is running.",
        "No failure was noticed.",
        "There is no goodput yet: 20 GPU-min went to starting.",
    )
    words = seen(nothing)
    assert "No iteration time is known yet." in words
    assert "No plan has been decided yet." in words
    assert "No node has joined yet." in words


@pytest.mark.parametrize("length", range(1, 40, 3))
def test_a_page_can_be_made_at_any_moment(tmp_path: Path, length: int) -> None:
    facts = facts_of(tmp_path, (told for n, told in enumerate(story()) if n < length))
    Page(page.html(facts))
    assert markdown(facts).startswith("## Job local-1: running\n")


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("failed", "and failed: out of nodes."),
        ("cancelled", "and was cancelled: out of nodes."),
        ("abnormal", "until its supervisor died."),
    ],
)
def test_the_sentence_tells_how_it_ended(tmp_path: Path, state: str, ended: str) -> None:
    end = journal.JobEnded(exit_code=1, state=state, reason="out of nodes")  # type: ignore[arg-type]
    facts = facts_of(tmp_path, iter([*story(ended=False), (end, BEGAN + 30.0)]))
    assert sentences(facts)[0].endswith(ended)


def test_layouts_before_and_after(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, any_layout_story())
    third, second, first = changes(facts.plans, facts.workers)
    assert (first.epoch, second.epoch, third.epoch) == (1, 4, 5), "plans that took effect"
    assert first.before is None
    assert second.before is not None
    assert fates(second.before) == {4: "moved", 5: "lost", 6: "moved", 7: "moved"}
    assert fates(second.after) == {4: "moved", 6: "moved", 7: "moved"}, "4 and 6 have other layers, 7 another stage"
    assert second.after.stages == ("0-3", "4-7")
    assert [cell.layers for cell in second.after.lines[1].cells] == ["0-4", "5-7"]
    assert [cell.nodes for cell in second.after.lines[1].cells] == ["n2", "n2"]
    assert fates(third.after)[12] == "new"


def fates(picture: Picture) -> dict[int, str]:
    return {
        chip.rank: chip.effect
        for line in picture.lines
        for cell in line.cells
        for chip in cell.chips
        if chip.effect != "kept"
    }


def test_of_many_replicas_those_that_changed_are_drawn() -> None:
    before = Layout.uniform(tp=8, pp=4, dp=32, layers=32)
    cut = before.replicas[20]
    odd = Replica((Stage(cut.stages[0].ranks[1:], cut.stages[0].chunks), *cut.stages[1:]))
    after = Layout(replicas=(*before.replicas[:20], odd, *before.replicas[21:]))
    plans = [plan_row(1, before), plan_row(2, after)]
    change, *_ = changes(plans, [])
    assert change.before is not None
    labels = [line.label for line in change.after.lines]
    assert labels == ["replica 0", "replicas 1 to 19", "replica 20", "replicas 21 to 31"]
    assert change.after.lines[1].words == "19 equal, ranks 32-639; nothing changed"
    assert fates(change.before)[cut.ranks[0]] == "lost"
    assert change.chips < 200


def plan_row(epoch: int, layout: Layout) -> dict[str, object]:
    from resihp.db.layouts import to_plain

    return {
        "epoch": epoch,
        "description": layout.describe(),
        "reason": "",
        "in_effect_at": datetime.fromtimestamp(BEGAN + epoch, UTC),
        "layout": to_plain(layout),
    }


def test_nodes_tell_what_became_of_them(tmp_path: Path) -> None:
    lines = {line.name: line for line in node_lines(facts_of(tmp_path, node_story()))}
    assert lines["n1"].changes == ""
    assert lines["n2"].changes == "drain refused"
    assert lines["n3"].changes == (
        "lost after 5.00 s: connection closed for 1 s; drained, used again since; replaced by n9"
    )
    assert lines["n9"].changes == "joined 20.0 s after the start"
    assert lines["n1"].device_hours == pytest.approx(4 * 100 / 3600)
    assert lines["n3"].device_hours == pytest.approx(4 * 5 / 3600)


def test_a_node_that_is_only_left_out_of_the_next_jobs_is_not_said_to_be_drained(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, node_story())
    for row in facts.drains:
        row.update(step="exclusion", outcome="done", undrained_at=None)
    what = {line.name: line.changes for line in node_lines(facts)}
    assert what["n2"] == "excluded from your jobs"
    assert "; excluded from your jobs; " in what["n3"]


def test_a_node_that_never_came_is_told_of(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, absent_story(), now_s=700.0)
    lines = {line.name: line for line in node_lines(facts)}
    assert lines["n3"].changes == "never joined: has not joined within 600 s; replaced by n9"
    assert lines["n3"].device_hours == 0.0
    assert lines["n4"].changes == ""
    assert "node n3 never joined: has not joined within 600 s" in page.html(facts)


def test_configuration_without_its_secrets() -> None:
    told = dict(
        settings(
            {
                "ledger": {"url": "postgresql+psycopg://me:open@db.here/resihp"},
                "hooks": {"webhook": "https://hooks.here.example/services/T0/secret", "token": "abc", "off": ""},
                "job": {"command": ["python", "--url=https://me:open@a.example"], "nodes": 2, "exclusive": True},
            }
        )
    )
    assert told == {
        "ledger.url": "postgresql+psycopg://me:***@db.here/resihp",
        "hooks.webhook": "https://hooks.here.example/***",
        "hooks.token": "***",
        "job.command": "python --url=https://a.example",
        "job.nodes": "2",
        "job.exclusive": "true",
    }
    assert safe("no secret: a/b") == "no secret: a/b"


# --- bad input --------------------------------------------------------------------------------------------------------


def nasty_story() -> Told:
    """The stories of a failure, a change of layout and a node, every name and reason of them an attack."""
    for entry, at in [*any_layout_story(), *list(node_story())[4:], *list(story())[-1:]]:
        plain = msgspec.to_builtins(entry)
        for name in ("reason", "evidence", "cause", "text", "user", "host", "version", "schedule"):
            if isinstance(plain.get(name), str) and not (name == "host" and "job" not in plain):
                plain[name] = NASTY
        for name in ("node", "host"):
            if isinstance(plain.get(name), str):
                plain[name] = NASTY + str(plain[name])
        if "job" in plain:
            plain["job"] = NASTY
            plain["command"] = [NASTY]
            plain["configuration"] = {NASTY: {NASTY: [NASTY]}}
        yield msgspec.convert(plain, type(entry)), at


def test_nothing_is_injected_into_the_page(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, nasty_story())
    text = page.html(facts)
    shown = Page(text)
    assert "script" not in shown.tags
    assert "img" not in shown.tags
    assert shown.handlers == []
    assert text.count("</style>") == 1
    assert text.count("</title>") == 1 + shown.tags.count("title") - 1
    assert "\x1b" not in text
    whole = NASTY.replace("\x1b", "\\x1b")
    words = shown.words
    assert words.count(whole) > 20, "it is shown as it is, wherever it stands"


def test_a_name_with_line_breaks_is_one_line_in_headings(tmp_path: Path) -> None:
    def named() -> Told:
        for entry, at in story():
            named = isinstance(entry, journal.JobStarted)
            yield (msgspec.structs.replace(entry, job="a\n## b") if named else entry), at

    facts = facts_of(tmp_path, named())
    assert "<title>Job a ## b</title>" in page.html(facts)
    assert "<h1>Job a ## b <span" in page.html(facts)
    assert markdown(facts).startswith("## Job a \\#\\# b: completed\n")


def test_nothing_is_injected_into_a_ticket(tmp_path: Path) -> None:
    words = markdown(facts_of(tmp_path, nasty_story()))
    told, command = words.rsplit("\n", 2)[0], words.rsplit("\n", 2)[1]
    assert "<script" not in told
    assert "<img" not in told
    assert "\x1b" not in words
    assert command.replace("\\`", "").count("`") == 2, "a command cannot end its own quotation"
    heads = [n for n, line in enumerate(told.splitlines()) if line.startswith("|--")]
    for n in heads:
        columns = {line.count("|") for line in told.splitlines()[n - 1 : n + 2]}
        assert len(columns) == 1, "no name adds a column"


def test_a_ledger_whose_json_is_damaged_still_gives_a_page(tmp_path: Path) -> None:
    facts_of(tmp_path, story())
    connection = sqlite3.connect(tmp_path / "ledger.db")
    with connection:
        connection.execute("UPDATE jobs SET configuration = '{', model = '[1', command = 'python <b>'")
    connection.close()
    with Reader.open(f"sqlite:///{tmp_path / 'ledger.db'}") as reader:
        facts = read(reader, reader.job(), datetime.fromtimestamp(BEGAN + 100, UTC))
    assert "python <b>" in seen(facts)


def test_a_clock_that_went_back(tmp_path: Path) -> None:
    told = [(entry, at - (40.0 if n > 30 else 0.0)) for n, (entry, at) in enumerate(story())]
    facts = facts_of(tmp_path, iter(told))
    Page(page.html(facts))
    assert "nan" not in page.html(facts)


# --- size -------------------------------------------------------------------------------------------------------------


def long_story(iterations: int, failures: int) -> Told:
    """Every so many iterations a rank is killed and comes back."""
    layout = Layout.uniform(tp=8, pp=4, dp=4, layers=32)
    less = Layout(replicas=layout.replicas[:3], standby=layout.replicas[3].ranks[1:])
    yield started(), BEGAN
    for node in range(16):
        yield journal.NodeJoined(node=f"n{node}", host="here", devices=8), BEGAN
        for device in range(8):
            rank = 8 * node + device
            yield journal.WorkerStarted(rank=rank, node=f"n{node}", device=device, pid=1, epoch=0), BEGAN
    at, epoch, failure = BEGAN + 1, 1, 0
    plan = Plan(epoch=1, layout=layout, assignment=spread(12, 4))
    yield journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"), at
    yield journal.PlanInEffect(epoch=1), at
    for i in range(1, iterations + 1):
        if i % max(iterations // failures, 2) == 0:
            failure, epoch = failure + 1, epoch + 1
            found = journal.FailureFound(
                failure=failure,
                kind="fail-stop",
                component="process",
                cause="rank 96 killed by signal 9 (SIGKILL)",
                ranks=(96,),
                node="n12",
                device=0,
                iteration=i,
                epoch=epoch,
                evidence="evidence " * 40,
                detect_s=None,
            )
            yield found, at
            plan = Plan(epoch=epoch, layout=less if epoch % 2 == 0 else layout, assignment=spread(12, 3 + epoch % 2))
            yield journal.PlanDecided(plan=plan, next_iteration=i, action="redo", finish=None, reason="lost"), at
            yield journal.PlanInEffect(epoch=epoch), at
        at += 0.5
        done = outcome(i, loss=2.0)
        yield journal.IterationCommitted(epoch=epoch, outcome=done, seconds=0.5, predicted_seconds=0.48), at


def test_a_long_job_gives_a_small_page(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, long_story(3000, 600))
    text = page.html(facts)
    assert len(text.encode()) < 3_000_000
    words = " ".join(Page(text).words.split())
    assert "200 failures are left out here; `resihp history failures local-1` lists them." in words
    assert "minimum to maximum of 4 iterations" in words
    assert "plans that took effect" in words
    assert len(markdown(facts)) < 20_000
    assert "and 580 more: `resihp history failures local-1`" in markdown(facts)


# --- pictures explain themselves --------------------------------------------------------------------------------------

KEYS = {
    **{each: each for each in ("training", "recovery", "slow", "plan", "idle", "observed", "predicted", "spread")},
    **{each: each for each in ("band", "spell", "rank-0", "rank-1", "rank-2", "rank-3", "rank-4")},
    **{"without-work": "idle", "checkpoint": "saved"},
}
"""What is drawn, and its key in the caption."""


def slow_facts(folder: Path) -> Facts:
    """Rank 1 is slow, rank 3 dies; 40 iterations."""
    from resihp.wrapper.job_folder import Job
    from tests.wrapper.commands.history.test_history import hurt

    job = Job("local-1", folder)
    (folder / "job.json").write_text(
        '{"name": "local-1", "host": "here", "created_at": %r, "journal": "/nowhere/journal"}' % (BEGAN + 3600.0)
    )
    return facts_of(folder, hurt(job), 200.0)


@pytest.mark.parametrize(
    "tell",
    [
        lambda folder: facts_of(folder, story()),
        lambda folder: facts_of(folder, node_story()),
        lambda folder: facts_of(folder, long_story(400, 100), 400.0),
        slow_facts,
    ],
    ids=["short", "nodes", "long", "slow"],
)
def test_every_mark_has_its_key_in_the_caption(tell: Callable[[Path], Facts], tmp_path: Path) -> None:
    figures = re.findall(r"<figure>(.*?)<figcaption(.*?)</figcaption>", page.html(tell(tmp_path)), re.DOTALL)
    assert figures
    for drawn, caption in figures:
        marks, keys = (set(re.findall(r'class="(mark-[a-z]+ [a-z-]+)"', part)) for part in (drawn, caption))
        classes = set(" ".join(re.findall(r'<(?:rect|path|line) [^>]*class="([^"]+)"', drawn)).split())
        assert marks <= keys
        assert {key.split()[1] for key in keys - marks} <= classes, "many failures are bars of their kind's colour"
        shown = {name for found in re.findall(r'class="key ([^"]+)"', caption) for name in found.split()}
        assert {KEYS[name] for name in classes if name in KEYS} <= shown, caption
        assert "with its number" in caption or 'class="number"' not in drawn


def test_every_cause_of_loss_has_a_colour_of_its_own() -> None:
    style = Path(page.__file__).with_name("page.css").read_text()
    found = {cause: re.search(rf"\.{cause} {{ background: (var\(--[a-z]+\))", style) for cause in CAUSE_WORDS}
    assert [cause for cause, colour in found.items() if colour is None] == []
    assert len({colour[1] for colour in found.values() if colour}) == len(CAUSE_WORDS)


def slowed(times: float, folder: Path) -> str:
    """The page of a job whose iterations take so many times what was predicted."""

    def told() -> Told:
        for entry, at in long_story(200, 2):
            if isinstance(entry, journal.IterationCommitted):
                entry = msgspec.structs.replace(entry, predicted_seconds=0.5 / times)
            yield entry, at

    return page.html(facts_of(folder, told()))


@pytest.mark.parametrize(("times", "named"), [(3.4, "3.4"), (0.5, "0.5")])
def test_a_prediction_far_from_what_is_usual_is_drawn_there_and_said_to_be(
    times: float, named: str, tmp_path: Path
) -> None:
    text = slowed(times, tmp_path)
    words = " ".join(Page(text).words.split())
    assert f"predicted, times {named}" in words
    assert f"Iterations usually took {named} times as long as the planner's cost model predicts" in words
    assert "range of 9 in 10 iterations when nothing is slow, 1.00 to 1.00 of the prediction" in words
    paths = {kind: path for path, kind in re.findall(r'<path d="(M[^"]+)" class="(observed|predicted)"', text)}
    assert paths["observed"] == paths["predicted"], "one upon the other"


def test_a_prediction_that_is_about_right_is_drawn_as_it_is(tmp_path: Path) -> None:
    words = " ".join(Page(slowed(1.2, tmp_path)).words.split())
    assert "predicted, times" not in words
    assert "Iterations usually took" not in words
    assert "1.20 to 1.20 of the prediction" in words


def test_epochs_without_a_plan_or_a_picture_are_told_of(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, any_layout_story())
    words = seen(facts)
    assert "Plans that never took effect are not drawn: epoch 2 (refused), epoch 3 (superseded)." in words
    assert "no plan:" not in words
    facts = msgspec.structs.replace(facts, plans=[row for row in facts.plans if row["epoch"] not in (1, 3, 4)])
    why = "another failure or change came before one was made"
    assert f"Epoch 1 has no plan: {why}, and epoch 2 began in its place." in seen(facts)
    told = f"Epochs 3 to 4 have no plan: {why}, and epoch 5 began in their place."
    assert told in seen(facts)
    assert told in markdown(facts)


def test_round_numbers_on_axes() -> None:
    assert ticks(0.0, 1.1, 4) == pytest.approx([0.0, 0.5, 1.0])
    assert ticks(1, 120, 6) == [20, 40, 60, 80, 100, 120]
    assert ticks(5, 5, 4) == [5]
    assert time_ticks(206, 6) == [0, 30, 60, 90, 120, 150, 180]
    assert time_ticks(3700, 6) == [0, 600, 1200, 1800, 2400, 3000, 3600]
    assert len(time_ticks(86400 * 40, 6)) <= 8
    assert time_ticks(0.0, 6) == [0.0]
    assert time_ticks(10.0, 5) == [0, 2, 4, 6, 8, 10], "seconds, where all of it is less than two minutes"


def test_gpu_hours_in_a_unit_that_fits() -> None:
    assert [hours(h) for h in (12345.6, 8.214, 0.5, 0.001, 0.0)] == [
        *("12,346 GPU-h", "8.21 GPU-h", "30 GPU-min", "3.6 GPU-s", "0 GPU-s")
    ]


def test_markdown_is_escaped() -> None:
    assert text("a | b <i> *x* `y` [z](u) #1 @me a_b _c_\nd &amp;") == (
        "a &#124; b &lt;i&gt; \\*x\\* \\`y\\` \\[z\\](u) \\#1 &#64;me a_b \\_c\\_ d &amp;amp;"
    )


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A completed job in a home of its own, the working folder beside it."""
    monkeypatch.setenv("RESIHP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RESIHP_LOCAL", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    made = create_local_job()
    write_journal(made.journal_file, story())
    made.exit_code_file.write_text("0\n")
    return made.name


def resihp(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_report_writes_a_file_named_after_the_job(job: str, tmp_path: Path) -> None:
    (tmp_path / f"report-{job}.html").write_text("an older one")
    result = resihp("report")
    assert result.stdout == ""
    assert re.fullmatch(rf"resihp: job {job}: report written to report-{job}\.html \(\d+ kB\)\n", result.stderr)
    assert Page((tmp_path / f"report-{job}.html").read_text()).words
    assert [path.name for path in tmp_path.glob(".report*")] == [], "nothing half written is left behind"


def test_report_to_another_file_and_as_markdown(job: str, tmp_path: Path) -> None:
    resihp("report", job, "-o", "x.html")
    assert (tmp_path / "x.html").read_text().startswith("<!DOCTYPE html>")
    result = resihp("report", job, "--markdown")
    assert result.stdout.startswith(f"## Job {job}: completed\n")
    assert result.stderr == ""
    resihp("report", job, "--markdown", "-o", "x.md")
    assert (tmp_path / "x.md").read_text().splitlines()[0] == f"## Job {job}: completed"


def test_report_of_another_ledger(job: str, tmp_path: Path) -> None:
    resihp("status")
    url = f"sqlite:///{tmp_path}/home/jobs/{job}/ledger.db"
    resihp("report", job, "--ledger", url, "-o", "y.html")
    assert (tmp_path / "y.html").exists()
    with pytest.raises(JobNotFoundError, match="job nix: "):
        resihp("report", "nix", "--ledger", url)


def test_what_cannot_be_written_is_said(job: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/x.html: the report cannot be written: No such file.*with -o"):
        resihp("report", "-o", "nowhere/x.html")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path, "a folder is there")


def test_a_job_s_name_leads_to_no_other_folder() -> None:
    assert file_name("../../etc/x") == "_.._etc_x"
    assert file_name("..") == "job"
    assert file_name("1234-r1") == "1234-r1"


# --- ranks over time ------------------------------------------------------------------------------------------------


def scored(folder: Path, ranks: int = 16, iterations: int = 600) -> Facts:
    """A job whose rank 5 takes 40 % longer from iteration 200 to 300, whose rank 2 was suspected for nothing."""
    write_journal(folder / "journal", suspicious_story())
    with Ledger.open("sqlite", folder) as ledger:
        ledger.catch_up(folder / "journal")
        for i in range(10, iterations + 1, 10):
            chosen = range(ranks) if i % 50 == 0 else (2, 5, 6)
            level = {5: 1.4 if 200 <= i <= 300 else 1.0, 2: 1.05}
            ledger.scores(i, [(rank, level.get(rank, 1 + 0.001 * (rank + i % 7)), 0.02 * rank) for rank in chosen])
        assert ledger.flush(30)
    with Reader.open(f"sqlite:///{folder / 'ledger.db'}") as reader:
        return read(reader, reader.job(), datetime.fromtimestamp(BEGAN + 100.0, UTC))


def test_levels_of_suspects_are_drawn_and_what_became_of_suspicions_is_told(tmp_path: Path) -> None:
    facts = scored(tmp_path)
    assert sorted(facts.scores.lines) == [2, 5, 6, 14, 15], "named ones, then those with the most evidence"
    assert [at for at, _, _ in facts.scores.spread] == list(range(50, 601, 50))
    assert facts.scores.spread[3] == (200, 1 + 0.001 * 4, 1 + 0.001 * 17), "of the others"
    words = seen(facts).replace(" ", "")
    assert "Ranksandsuspicions" in words
    assert "rank2rank5rank6rank14rank15rangeoftheothers" in words
    assert "rank21214+12.0%0.30fineitsprobeisfine" in words
    assert "link3-41214+60.0%0.97slow,failure2averdict" in words
    assert "everybody1214+60.0%0.97stillopen" in words
    assert page.html(facts).count('class="rank rank-') == 5


def test_however_many_scores_the_picture_stays_small(tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    assert len(page.html(scored(tmp_path / "long", iterations=30_000))) < 3 * len(page.html(scored(tmp_path)))


def test_without_scores_or_suspicions_nothing_is_drawn_of_them(tmp_path: Path) -> None:
    assert "what was suspected" not in seen(facts_of(tmp_path, story()))
