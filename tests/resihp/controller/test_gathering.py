"""The start: nodes that never come."""

from __future__ import annotations

from resihp.controller import Controller, Settings
from resihp.controller import interface as api


def test_a_node_whose_agent_cannot_start_ends_the_job_at_once() -> None:
    """Not after all the time that a start may take."""
    controller = Controller(Settings(job="77", nodes=3, gpus_per_node=1, tp=1, pp=1))
    controller.handle(api.AgentJoined(node="n1", host="n1", devices=1), 0.0)
    actions = controller.handle(api.AgentLost(node="n2", reason="its agent exited with status 127"), 1.0)
    actions += controller.handle(api.AgentLost(node="n3", reason="its agent exited with status 127"), 1.0)
    ends = [action for action in actions if isinstance(action, api.End)]
    assert [(end.exit_code, end.reason) for end in ends] == [
        (5, "node n2: its agent exited with status 127 before it joined")
    ]
