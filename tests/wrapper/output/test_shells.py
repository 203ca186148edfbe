"""The command that leads to a node: of the right Slurm job, for nodes that are still there."""

from __future__ import annotations

from resihp.wrapper.output.shells import line, shells

HERE = {"lost_at": None, "released_at": None}
NODES = [
    {"node": "n1", **HERE},
    {"node": "n2", "lost_at": "then", "released_at": None},
    {"node": "n3", "lost_at": None, "released_at": "then"},
    {"node": "n9", **HERE},
]
REPLACEMENTS = [
    {"node": "n9", "slurm_job": "15", "outcome": "joined"},
    {"node": "n1", "slurm_job": "14", "outcome": "ended"},
    {"node": None, "slurm_job": None, "outcome": "asked"},
]


def test_a_guest_is_reached_by_its_own_job() -> None:
    found = shells("12", NODES, REPLACEMENTS)
    assert found == {
        "n1": "srun --jobid=12 --overlap -w n1 --pty bash",
        "n9": "srun --jobid=15 --overlap -w n9 --pty bash",
    }
    assert line(found) == "srun --jobid=12 --overlap -w n1 --pty bash  (--jobid=15 for n9)"


def test_without_guests_there_is_one_command_and_without_nodes_none() -> None:
    assert line(shells("12", NODES[:1], [])) == "srun --jobid=12 --overlap -w n1 --pty bash"
    assert line(shells("12", NODES[1:3], [])) == ""
