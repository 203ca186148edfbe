"""`why-not`: why a rank is, or is not, taken to be slow, while the job runs and afterwards; former suspicions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resihp.controller.fail_slow.standings import RankAnswer
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.errors import ResihpError, UsageError
from resihp.protocol.messages import AskStanding, OperatorReply
from resihp.record import journal
from resihp.wrapper.commands.operate import request
from resihp.wrapper.commands.why_not import answer
from resihp.wrapper.job_folder import Job, create_local_job, take_lock, write_private
from tests.db.conftest import BEGAN, started, write_journal
from tests.db.test_projection import SLOW
from tests.db.test_suspicions import Told, beginning, ended, suspected, suspicious_story
from tests.wrapper.commands.status.test_status import home, resihp

__all__ = ["home"]  # a fixture that every test of this module uses

LIVE = RankAnswer(
    rank=6,
    node="n2",
    device=2,
    alive=True,
    working=True,
    iteration=402,
    detector="workload",
    unwatched=False,
    reported=402,
    level=1.031,
    noise=0.009,
    evidence=0.41,
    peers=3,
)


def written(url: str, folder: Path, told: Iterator[tuple[journal.AnyEntry, float]], name: str = "journal") -> None:
    with Ledger.open(url, folder) as ledger:
        for record in write_journal(folder / name, told):
            ledger.submit(record)
        assert ledger.flush(30)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/ledger.db"
    written(url, tmp_path, suspicious_story())
    with Ledger.open(url, tmp_path) as ledger:
        ledger.catch_up(tmp_path / "journal")
        ledger.scores(10, [(rank, 1.02, 0.2) for rank in range(8)])
        ledger.scores(20, [(2, 1.119, 0.06), (5, 1.61, 0.0)])
        assert ledger.flush(30)
    return url


def told(url: str, rank: int, live: RankAnswer | None = None) -> list[str]:
    with Reader.open(url) as reader:
        found = answer(reader, reader.job(), rank, None if live is None else msgspec.to_builtins(live))
    json.dumps(found["verdict"])
    return list(found["verdict"])


def changed(**changes: Any) -> RankAnswer:
    return msgspec.structs.replace(LIVE, **changes)


def test_a_running_job_s_rank_is_told_level_evidence_and_reference(url: str) -> None:
    assert told(url, 6, LIVE) == [
        "rank 6 (n2 device 2) is not considered slow: at 1.031 of its healthy time",
        "41.0 % of the evidence needed for a finding; its times vary by 0.9 % from one iteration to the next",
        "compared with 3 others of the same work, and with its own past",
        "last measured in iteration 402, of 402 committed",
        "suspicion 4: +60.0% since iteration 12, confidence 0.97: dropped, rank 5 explains it",
    ]
    alone = told(url, 6, changed(peers=0, pardon=0.02, pardoned_until=812))
    assert alone[2] == "no other rank has the same work: compared only with its own past"
    assert alone[3] == (
        "a probe found it healthy: up to 1.020 of its healthy time is not reported again before iteration 812"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"detector": "off"}, "not monitored, as detect is false in [adapt]"),
        ({"working": False, "level": None}, "has no work under the current plan"),
        ({"unwatched": True, "reported": 12}, "is not watched: silent since iteration 12"),
        ({"unwatched": True, "reported": None}, "is not watched: it never reported"),
        ({"detector": "plain times", "level": None}, "only iteration times of the whole job are known"),
        ({"detector": "iterations", "level": None}, "judges whole iterations, not single ranks"),
        ({"detector": "warming up", "level": None}, "the detector is warming up"),
        ({"slow": True, "level": 1.5}, "is considered slow, flagged by the detector, no verdict yet: at 1.500"),
    ],
)
def test_a_blind_watcher_does_not_look_healthy(url: str, changes: dict[str, Any], words: str) -> None:
    first = told(url, 6, changed(**changes))[0]
    assert words in first
    assert "not considered slow" not in first


def test_the_supervisor_of_a_running_job_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot answer, the ledger does."""
    job = create_local_job()
    lock = take_lock(job)
    assert lock is not None
    written(f"sqlite:///{job.folder}/ledger.db", job.folder, suspicious_story())
    write_private(job.supervisor_file, b'{"host": "127.0.0.1", "port": 9, "pid": 1}')
    asked: list[int] = []
    reply: OperatorReply | ResihpError = OperatorReply(ok=True, text=msgspec.json.encode(LIVE).decode())

    async def ask(of: Job, what: AskStanding) -> OperatorReply:
        asked.append(what.rank)
        if isinstance(reply, ResihpError):
            raise reply
        return reply

    monkeypatch.setattr(request, "ask", ask)
    try:
        found = json.loads(resihp("why-not", "6", "--json").stdout)
        assert (found["live"], found["level"], asked) == (True, 1.031, [6])
        for reply in (
            OperatorReply(ok=False, text="no such question"),
            OperatorReply(ok=True, text="no JSON"),
            ResihpError("job local-1: no answer"),
        ):
            result = resihp("why-not", "6", "--json")
            assert (result.exit_code, json.loads(result.stdout)["live"]) == (0, False)
            is_told = not isinstance(reply, OperatorReply) or reply.ok
            assert ("falling back to the ledger" in result.stderr) == is_told
        assert asked == [6] * 4
        monkeypatch.setattr("resihp.wrapper.job_folder.ours", lambda found: None)
        assert json.loads(resihp("why-not", "6", "--json").stdout)["live"] is False
        assert asked == [6] * 4, "another user's supervisor is not connected to"
    finally:
        os.close(lock)
    resihp("why-not", "6")
    assert len(asked) == 4, "nobody supervises it any more"


def test_of_a_job_that_is_over_the_last_score_is_told(url: str) -> None:
    text = " ".join(resihp("why-not", "2", "--ledger", url).stdout.split())
    assert "is not considered slow: at 1.119 of its healthy time when it was last noted, in iteration 20" in text
    assert "6.0 % of the evidence" in text
    assert "suspicion 2: +12.0% since iteration 12, confidence 0.30: fine (probe 3), its probe is fine" in text
    slow = " ".join(resihp("why-not", "5", "--ledger", url).stdout.split())
    assert "is considered slow, failure 1: at 1.610 of its healthy time" in slow
    assert "failure 1: at 62.0 % of its speed from iteration 12 on" in slow
    assert "never suspected in this job" in resihp("why-not", "0", "--ledger", url).stdout


def test_what_a_group_waits_for_does_not_make_its_ranks_slow(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    cause = "the tensor-parallel collectives of ranks 4-7 take longer than they should, +20%, 0.1 s per iteration"
    part = msgspec.structs.replace(SLOW, component="collective", ranks=(4, 5, 6, 7), device=None, cause=cause)

    def story() -> Told:
        yield from beginning()
        yield part, BEGAN + 9

    written(url, tmp_path, story())
    with Ledger.open(url, tmp_path) as ledger:
        ledger.catch_up(tmp_path / "journal")
        ledger.scores(10, [(rank, 1.02, 0.2) for rank in range(8)])
        assert ledger.flush(30)
    sentences = told(url, 5)
    assert sentences[0].startswith("rank 5 (n2 device 1) is not considered slow: at 1.020 of its healthy time")
    assert any(cause in sentence for sentence in sentences), sentences


def test_json_has_all_of_it(url: str) -> None:
    found = json.loads(resihp("why-not", "2", "--ledger", url, "--json").stdout)
    assert (found["schema"], found["rank"], found["node"], found["level"], found["live"]) == (1, 2, "n1", 1.119, False)
    assert [row["outcome"] for row in found["suspicions"]] == ["fine"]
    assert found["verdict"][0].startswith("rank 2 (n1 device 2)")


def test_a_rank_that_is_none_says_which_there_are(url: str) -> None:
    with pytest.raises(UsageError, match="rank 99: job local-1 has ranks 0 to 7; resihp status local-1"):
        resihp("why-not", "99", "--ledger", url)


# --- former jobs ----------------------------------------------------------------------------------------------------


def job(name: str, day: float, *entries: journal.AnyEntry) -> Iterator[tuple[journal.AnyEntry, float]]:
    at = time.time() + 86400 * (day - 10)
    yield msgspec.structs.replace(started(), job=name), at
    for node in ("n1", "n2"):
        yield journal.NodeJoined(node=node, host="here", devices=4), at
    for rank in range(8):
        yield journal.WorkerStarted(rank=rank, node=f"n{rank // 4 + 1}", device=rank % 4, pid=1, epoch=0), at
    for entry in entries:
        yield entry, at + 1


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """Device 1 of n2 was suspected in three of five jobs, and device 0 of n1 was declared slow in one."""
    url = f"sqlite:///{tmp_path}/shared.db"
    five = suspected(1, 5)
    slow = msgspec.structs.replace(SLOW, ranks=(0,), node="n1", device=0)
    stories = {
        "a": [five, ended(five, "fine", "its probe is fine")],
        "b": [five, ended(five, "unconfirmed", "nothing could be measured")],
        "c": [
            ended(five, "dropped", "another's"),
            suspected(2, 0),
            slow,
            ended(suspected(2, 0), "slow", "a verdict"),
        ],
        "d": [suspected(1, 4), ended(suspected(1, 4, 5), "fine", "both probes are fine")],
        "e": [],
        "f": [],
    }
    for day, (name, entries) in enumerate(stories.items()):
        written(url, tmp_path, job(name, day, *entries), name)
    return url


def test_devices_suspected_in_job_after_job_are_told(shared: str) -> None:
    text = " ".join(resihp("why-not", "5", "f", "--ledger", shared).stdout.split())
    assert "n2 device 1 was suspected in 3 of 5 former jobs" in text
    assert "former" not in resihp("why-not", "6", "f", "--ledger", shared).stdout
    assert "1 of 1 former" in resihp("why-not", "5", "b", "--ledger", shared).stdout


def test_node_health_shows_suspicions_that_count_for_nothing(shared: str) -> None:
    rows = {
        row["node"]: row for row in json.loads(resihp("node", "health", "--ledger", shared, "--json").stdout)["rows"]
    }
    assert {name: (row["suspected_jobs"], row["jobs"]) for name, row in rows.items()} == {"n1": (0, 6), "n2": (3, 6)}
    assert [row["failures"] for row in rows.values()] == [0, 0]


def test_another_host_of_the_same_name_is_another_node(shared: str, tmp_path: Path) -> None:
    moved = (
        (msgspec.structs.replace(entry, host="elsewhere") if isinstance(entry, journal.NodeJoined) else entry, at)
        for entry, at in job("g", 8)
    )
    written(shared, tmp_path, moved, "g")
    assert "former" not in resihp("why-not", "5", "g", "--ledger", shared).stdout
