"""When a supervisor takes it that it leads no longer: ten seconds without a quorum, where there is one to be had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resihp.record.journal import LeaderChosen, Record
from resihp.record.journal_file import Journal
from resihp.record.quorum import Membership
from resihp.wrapper.supervisor.journaling.gate import DecisionGate
from resihp.wrapper.supervisor.journaling.replication import Replication
from tests.wrapper.agent.test_election import beginning
from tests.wrapper.supervisor.journaling.test_replication import Source

CLAIM = LeaderChosen(term=2, node="n1", host="h", how="restarted")


@pytest.mark.parametrize(("known", "deposed"), [(1, False), (len(beginning(4)), True)])
def test_a_claim_waits_for_a_quorum_of_those_who_have_joined_and_as_long_as_it_takes_for_the_first_of_all(
    known: int, deposed: bool, tmp_path: Path
) -> None:
    """Agents that are still being started may take their time; those that have joined may have chosen another."""
    now = [1000.0]
    journal, membership = Journal(tmp_path / "journal", sync=False), Membership()
    for record in beginning(4)[:known]:
        journal.append(record.entry, record.at)
        membership.apply(record)
    nobody: Any = None
    copies = Replication(Source(journal), membership, lambda node, message: 1, lambda node: None)
    held = DecisionGate(nobody, nobody, copies, nobody, lambda: now[0])
    held.claim(CLAIM)
    now[0] += 60.0
    assert held.overdue is deposed
    if not deposed:
        assert held.joined("n1", 1) == CLAIM
        held.appended(Record(journal.append(CLAIM, 0.0).seq, 0.0, CLAIM))
        assert not held.overdue, "only now is anybody waited for"
