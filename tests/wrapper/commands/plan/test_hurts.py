"""`resihp plan --hurts`: which single loss would hurt most, of a layout, of what is left of it, and of a job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.plan import Plan
from resihp.record import journal
from resihp.wrapper.cli import app
from resihp.wrapper.commands.plan import hurts
from resihp.wrapper.exit_codes import exit_code_of
from tests.wrapper.commands.plan.test_of_job import LAYOUT, told, write

SMALL = ("--model", "llama2-7b", "--micro-batches", "4", "--sequence-length", "1024", "--gpus-per-node", "4")
TWO = (*SMALL, "--layout", "tp=2,dp=2,pp=2")


def run(*argv: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--hurts", *argv], env={"COLUMNS": "80"})


def found(*argv: str) -> dict[str, Any]:
    result = run(*argv, "--json")
    assert result.exit_code == 0, result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def answered(*argv: str) -> dict[str, Any]:
    """What `resihp plan` says of one loss."""
    result = CliRunner().invoke(app, ["plan", *argv, "--json"])
    assert result.exit_code == 0, result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_one_loss_of_each_kind_comes_to_what_plan_says_of_it() -> None:
    content = found(*TWO)
    assert list(content) == ["schema", "planning_seconds", "now", "losses", "unasked"]
    assert list(content["now"]) == ["iteration_seconds", "idle", "layout", "sole_holders"]
    losses = content["losses"]
    assert sorted([one["ranks"], *one["alike"]] for one in losses) == [
        [[0], [1], [4], [5]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[2], [3], [6], [7]],
    ]
    now_s = content["now"]["iteration_seconds"]
    for one in losses:
        alone = answered(*TWO, "--fail", ",".join(map(str, one["ranks"])))
        assert one["iteration_seconds"] == alone["after"]["iteration_seconds"]
        assert one["idle"] == len(alone["after"]["layout"]["standby"])
        assert one["bytes"] == alone["transition"]["bytes"]
        assert one["throughput"] == pytest.approx(now_s / one["iteration_seconds"])
    by_throughput = [round(one["throughput"], 2) for one in losses]
    assert by_throughput == sorted(by_throughput)
    assert len(losses[0]["ranks"]) == 4, "a node hurts more than a device"


def test_the_plan_that_answers_a_question_is_asked_about() -> None:
    content = found(*TWO, "--fail", "5")
    after = answered(*TWO, "--fail", "5")["after"]
    assert content["now"]["iteration_seconds"] == after["iteration_seconds"]
    assert content["now"]["layout"] == after["layout"]
    assert not any(5 in ranks for one in content["losses"] for ranks in (one["ranks"], *one["alike"]))


def test_one_replica_loses_state_with_any_device_and_one_node_everything() -> None:
    content = found(*SMALL, "--layout", "tp=2,dp=1,pp=2")
    node, *stages = content["losses"]
    assert node["obstacle"] == "no rank is left"
    assert (node["iteration_seconds"], node["throughput"], node["idle"], node["bytes"]) == (None, 0, None, None)
    assert len(stages) == 2
    assert all("was lost with rank" in one["state_lost"] and one["bytes"] is None for one in stages)
    assert content["now"]["sole_holders"] == [0, 1, 2, 3]


def test_what_is_held_alone_is_lost_with_any_of_its_holders() -> None:
    """One replica is left of two."""
    content = found(*TWO, "--fail", "2,3")
    assert all(one["state_lost"] for one in content["losses"])
    lost = [ranks for one in content["losses"] for ranks in (one["ranks"], *one["alike"])]
    assert sorted(ranks[0] for ranks in lost if len(ranks) == 1) == content["now"]["sole_holders"]


def test_for_people() -> None:
    result = run("--model", "llama2-7b", "--layout", "tp=4,dp=8,pp=2", "--sequence-length", "1024", "--spares", "1")
    assert result.exit_code == 0, result.exception
    text = result.stdout
    assert "8 nodes like n1" in text
    assert "32 like rank 0 (n1 device 0)" in text
    assert "The 8 standby devices are not counted" in text
    assert "Of 72 losses, 3 were planned, one of each kind of place" in text
    alone = run(*SMALL, "--layout", "tp=2,dp=1,pp=2").stdout
    assert "cannot run" in alone
    assert "4 like rank 0 (n1 device 0)" in alone
    assert "Cannot run without node n1: no rank is left." in alone
    assert "Checkpoint: no other rank holds that state." in alone
    assert "One holder left: layers 0-31, the embedding and the head are held by ranks 0-3 alone" in alone


def test_of_many_places_those_that_come_to_the_same_are_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas that are cut in unlike ways: no two devices stand in places that are alike."""
    argv = ("--model", "llama2-7b", "--layout", "tp=1,dp=2,pp=12", "--sequence-length", "1024", "--fail", "3")
    text = run(*argv).stdout
    table = [line for line in text.splitlines() if "(n" in line or " node" in line]
    assert 3 < len(table) <= 20
    assert " like rank" in text
    assert "Not shown" not in text
    monkeypatch.setattr(hurts, "MAX_ROWS", 2)
    fewer = run(*argv).stdout
    assert re.search(r"Not shown: \d+ devices? (and \d nodes? )?that hurt less \(\d+% to \d+%\); --json", fewer)


def test_equal_questions_have_equal_answers() -> None:
    assert found(*TWO) | {"planning_seconds": 0} == found(*TWO) | {"planning_seconds": 0}


@pytest.mark.parametrize("other", [("--search", "1"), ("--plot", "out.png")])
def test_what_does_not_go_with_it(other: tuple[str, str]) -> None:
    result = run(*TWO, *other)
    assert isinstance(result.exception, ResihpError)
    assert exit_code_of(result.exception) == 2
    assert "leave --search and --plot out" in str(result.exception)


def test_of_a_job_devices_are_those_of_its_ledger(tmp_path: Path) -> None:
    """Ranks 0 and 1 are lost; what came in their place is rank 8, on device 1, the only one of its kind."""
    first, second = LAYOUT.replicas
    layout = Layout((Replica((Stage((8,), first.stages[0].chunks), first.stages[1])), second))
    entries = told(plan=Plan(epoch=1, layout=layout, assignment=()).dealing(16))
    came = journal.WorkerStarted(rank=8, node="gpu-1", device=1, pid=8, epoch=0)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    write(url, [*entries[:-2], came, *entries[-2:]], tmp_path)
    content = found("7", "--ledger", url)
    [rank_8] = [one for one in content["losses"] if one["ranks"] == [8]]
    assert (rank_8["node"], rank_8["device"], rank_8["alike"]) == ("gpu-1", 1, [])
    assert "rank 8 (gpu-1 device 1)" in run("7", "--ledger", url).stdout


@pytest.mark.parametrize(("slow", "better"), [(0.5, True), (None, False)])
def test_a_job_whose_plan_is_not_the_best_is_told_so(tmp_path: Path, slow: float | None, better: bool) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    write(url, told(slow=slow), tmp_path)
    assert ("More than 100%: there are better plans than this one" in run("7", "--ledger", url).stdout) == better


def test_a_plan_under_which_state_has_one_holder_says_so() -> None:
    question = (*SMALL, "--layout", "tp=2,dp=2,pp=2", "--planner", "drop-replica", "--fail", "2")
    result = CliRunner().invoke(app, ["plan", *question], env={"COLUMNS": "100"})
    assert "One holder left: layers 0-31, the embedding and the head are held by ranks 4-7 alone" in result.stdout
    assert answered(*question)["sole_holders"] == [4, 5, 6, 7]
    assert answered(*TWO, "--planner", "drop-replica")["sole_holders"] == []
