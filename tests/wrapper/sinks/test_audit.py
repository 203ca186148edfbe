"""The audit as a listener of the journal: which entries become lines, and that a broken folder costs one warning."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from resihp.record import journal
from resihp.wrapper.sinks import audit as sink
from resihp.wrapper.sinks.hooks import Hook
from resihp.wrapper.site_folders import folder as site_folder
from resihp.wrapper.site_folders.audit import append
from tests.db.conftest import BEGAN, node_story, write_journal


def shown(entry: journal.AnyEntry) -> tuple[Any, ...]:
    fields = json.loads(sink.line_of("vc", "17-r1", journal.Record(5, BEGAN, entry)))
    assert (fields["id"], fields["cluster"], fields["job"]) == ("vc:17-r1:5", "vc", "17-r1")
    return tuple(fields.get(name) for name in ("decision", "outcome", "node", "reason", "exit_code"))


def test_each_decision_about_the_cluster_is_a_line() -> None:
    lost = journal.NodeLost(node="n3", reason="no answer", how="silent")
    assert shown(lost) == ("node left out", "silent", "n3", "no answer", None)
    decided = journal.DrainDecided(drain=1, node="n3", failure=2, reason="Xid 79")
    assert shown(decided) == ("drain", "decided", "n3", "Xid 79", None)
    for step, name in (("slurm", "drain"), ("spool", "drain request"), ("exclusion", "exclusion")):
        answered = journal.DrainAnswered(drain=1, node="n3", step=step, outcome="refused", text="why")  # type: ignore[arg-type]
        assert shown(answered) == (name, "refused", "n3", "why", None)
    asked = journal.ReplacementAsked(replacement=1, node="n3", excluded=(), reason="pays")
    assert shown(asked) == ("replacement", "asked", "n3", "replacement 1: pays", None)
    changed = journal.ReplacementChanged(replacement=1, state="running", slurm_job="18", node="n9", text="")
    assert shown(changed) == ("replacement", "running", "n9", "replacement 1 (Slurm job 18)", None)
    ended = journal.JobEnded(exit_code=5, state="failed", reason="no whole replica")
    assert shown(ended) == ("end", "failed", None, "no whole replica", 5)
    again = journal.JobEnded(exit_code=75, state="cancelled", reason="time limit")
    assert shown(again) == ("requeue", "asked", None, "time limit", 75)


def hook(folder: Path, said: list[str], tmp_path: Path, past: Any = ()) -> Hook:
    return Hook(
        *("audit", lambda content: append(folder, content), "17", sink.DECISION_ENTRIES),
        noted=tmp_path / "audit.told",
        say=said.append,
        past=past,
        pauses_s=(0.0,),
        encode=lambda record, mended: sink.line_of("vc", "17", record),
    )


def test_a_missing_folder_costs_one_warning_and_no_time(tmp_path: Path) -> None:
    said: list[str] = []
    listener = hook(tmp_path / "none", said, tmp_path)
    began = time.monotonic()
    for record in write_journal(tmp_path / "journal", node_story()):
        listener.submit(record)
    listener.close(time.monotonic() + 20)
    assert time.monotonic() - began < 5
    (warning,) = said
    assert f"[site] audit {tmp_path / 'none'}: no such file or directory" in warning
    assert "the job continues" in warning


def test_a_successor_writes_no_line_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_folder, "ADMINISTRATOR_UID", os.geteuid())
    folder = tmp_path / "site"
    folder.mkdir(mode=0o755)
    records = write_journal(tmp_path / "journal", node_story())
    said: list[str] = []
    first = hook(folder, said, tmp_path)
    for record in records[: len(records) // 2]:
        first.submit(record)
    assert first.close(time.monotonic() + 20)
    second = hook(folder, said, tmp_path, past=records)
    assert second.close(time.monotonic() + 20)
    assert said == []
    (path,) = folder.iterdir()
    ids = [json.loads(each)["id"] for each in path.read_text().splitlines()]
    expected = [f"vc:17:{record.seq}" for record in records if isinstance(record.entry, sink.DECISION_ENTRIES)]
    assert len(expected) > 3
    assert ids == expected
