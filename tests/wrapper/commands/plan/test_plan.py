"""`resihp plan`: the JSON's keys, what is printed for people, the picture, errors with exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from resihp.errors import ResihpError
from resihp.parallelism.plan import Plan, spread
from resihp.scheduler import Decision, Situation, decide, planners, without_lost_replicas
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.what_if import catalogue
from resihp.scheduler.what_if.question import Question
from resihp.wrapper.cli import app
from resihp.wrapper.commands.plan import command
from resihp.wrapper.commands.plan.tables import happened
from resihp.wrapper.exit_codes import exit_code_of

LLAMA = ("--model", "llama2-13b", "--layout", "tp=4,dp=2,pp=4", "--sequence-length", "8192")
EXAMPLE = (
    *(*LLAMA, "--micro-batches", "8", "--gpus-per-node", "8", "--hardware", "a100"),
    *("--fail", "5", "--slow", "12:0.5", "--slow-link", "n1-n2:0.3"),
)
SMALL = ("--model", "llama2-7b", "--layout", "tp=2,dp=2,pp=2", "--micro-batches", "4", "--sequence-length", "1024")


def run(*argv: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, argv)], env={"COLUMNS": "100"})


def found(*argv: str | Path) -> dict[str, Any]:
    result = run(*argv, "--json")
    assert result.exit_code == 0, result.exception
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def refusal(*argv: str | Path) -> str:
    result = run(*argv)
    if isinstance(result.exception, ResihpError):
        assert exit_code_of(result.exception) == 2
        return str(result.exception)
    assert result.exit_code == 2
    return result.output


def test_a_search_finds_a_better_plan_and_says_what_was_found_at_once() -> None:
    asked = (
        *("--model", "llama2-30b", "--layout", "tp=4,dp=2,pp=8", "--sequence-length", "8192"),
        *("--zero-1", "--sequence-parallel", "--fail", "12,13,45"),
    )
    at_once, searched = found(*asked), found(*asked, "--search", "0.5")
    assert searched["after"]["iteration_seconds"] < 0.99 * at_once["after"]["iteration_seconds"]
    assert searched["alternatives"][0] == {
        "name": "at once",
        "iteration_seconds": at_once["after"]["iteration_seconds"],
    }
    assert searched["planning_seconds"] > 0.5
    assert "searched" in searched["reason"]
    assert run(*asked, "--search", "-1").exit_code == 2
    for other in (("--planner", "resihp-paper"), ("--tune",)):
        assert "starts from resihp's own plan" in refusal(*asked[:4], *other, "--search", "1")


def test_json_of_the_example() -> None:
    content = found(*EXAMPLE)
    assert list(content) == [
        *("schema", "planning_seconds", "before", "after", "unmitigated_seconds", "transition"),
        *("sole_holders", "alternatives", "reason", "explanation"),
    ]
    assert content["schema"] == 1
    assert 0 < content["planning_seconds"] < 5
    assert list(content["before"]) == ["iteration_seconds", "layout"]
    assert list(content["after"]) == ["iteration_seconds", "layout", "micro_batches", "migrations"]
    assert list(content["transition"]) == ["seconds", "bytes"]
    assert content["unmitigated_seconds"] is None
    assert content["before"]["iteration_seconds"] < content["after"]["iteration_seconds"]
    layout = content["after"]["layout"]
    ranks = [rank for replica in layout["replicas"] for stage in replica for rank in stage["ranks"]]
    assert sorted(ranks + layout["standby"]) == [rank for rank in range(32) if rank != 5]
    for replica in layout["replicas"]:
        held = [layer for stage in replica for layer in range(stage["layers"][0], stage["layers"][1] + 1)]
        assert held == list(range(40))
    assert sum(content["after"]["micro_batches"]) == 16


def test_equal_questions_have_equal_answers() -> None:
    one, other = found(*EXAMPLE), found(*EXAMPLE)
    assert one | {"planning_seconds": 0} == other | {"planning_seconds": 0}


def unchanged(situation: Situation) -> Decision:
    """What a planner says that leaves everything as it is; the warm-up's dead rank is not looked at."""
    shares = spread(situation.micro_batches, len(situation.base.replicas))
    same = Plan(epoch=2, layout=situation.base, assignment=shares)
    return Decision(plan=same, seconds=iteration_seconds(same, situation), reason="by hand")


def test_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_decider", lambda _: unchanged)
    content = found(*LLAMA)
    assert content["before"]["layout"] == content["after"]["layout"]
    assert content["transition"] == {"seconds": 0.0, "bytes": 0}
    assert content["unmitigated_seconds"] == pytest.approx(content["before"]["iteration_seconds"])


def test_micro_batches_are_per_replica() -> None:
    assert found(*SMALL)["after"]["micro_batches"] == [4, 4]


def test_failures_may_be_repeated_or_joined() -> None:
    once = found(*SMALL, "--fail", "1,4")
    twice = found(*SMALL, "--fail", "1", "--fail", "4")
    assert once["after"] == twice["after"]


def test_for_people() -> None:
    result = run(*EXAMPLE)
    assert result.exit_code == 0, result.exception
    text = result.stdout
    assert "llama2-13b, 8192 tokens per sequence, on 32 a100 of 4 nodes; rank 5 lost; slow: rank 12 at 0.5" in text
    assert "DP2 x PP4 x TP4" in text
    assert "cannot run" in text
    assert "4 each" in text  # equal stages of equal replicas once
    assert "GB of state to move" in text
    assert "Why: " in text
    assert "Alternatives: " in text


def test_for_people_when_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_decider", lambda _: unchanged)
    assert "Nothing changes." in run(*LLAMA).stdout


def test_a_slow_device_says_when_the_change_has_paid_for_itself() -> None:
    assert "it pays for itself if the failure lasts" in run(*LLAMA, "--slow", "12:0.3").stdout


def test_a_layout_that_does_not_fit_is_refused_unless_that_is_to_be_ignored() -> None:
    asked = ("--model", "llama2-70b", "--layout", "tp=4,dp=1,pp=2", "--sequence-length", "8192", "--fail", "1")
    refused = refusal(*asked)
    assert "before anything fails, its device has 80.0 GB" in refused
    assert "--ignore-memory plans without any limit" in refused
    result = run(*asked, "--ignore-memory")
    assert result.exit_code == 0
    assert "memory is not checked" in result.stderr
    assert "memory is not checked" not in result.stdout


def test_many_changed_replicas_are_not_all_shown() -> None:
    failed = ",".join(str(8 * d + 1) for d in range(10))
    text = run(*SMALL[:2], "--layout", "tp=2,dp=12,pp=4", "--fail", failed).stdout
    assert "more changed: --json has them all" in text


def test_own_hardware_and_model(tmp_path: Path) -> None:
    model, hardware = tmp_path / "mine.toml", tmp_path / "device.toml"
    model.write_text("layers = 12\nhidden = 768\nheads = 12\nffn_hidden = 3072\nvocab = 50304\n")
    hardware.write_text(
        "flops = 1e14\nmemory_bytes = 24e9\nmemory_bytes_per_s = 7e11\n"
        "inside_bytes_per_s = 1e10\nbetween_bytes_per_s = 1e9\n"
    )
    content = found("--model", model, "--hardware", hardware, "--layout", "tp=2,dp=2,pp=2", "--fail", "1")
    assert content["after"]["layout"]["replicas"]
    assert (
        "mine, 4096 tokens per sequence, on 8 device"
        in run("--model", model, "--hardware", hardware, "--layout", "tp=2,dp=2,pp=2").stdout
    )


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--fail", "99"), "--fail 99: no such rank; there are ranks 0 to 31"),
        (("--fail", "five"), "--fail five: not a rank; for example --fail 5,17"),
        (("--fail-node", "n9"), "--fail-node n9: no node n9; there are n1 to n4"),
        (("--slow", "12:0"), "has failed: --fail 12"),
        (("--slow", "12:nan"), "it is more than 0 and at most 1"),
        (("--slow", "12"), "1 is healthy, 0.5 half as fast"),
        (("--slow-link", "n1:0.3"), "for example --slow-link n1-n2:0.3"),
        (("--fail", "0-31"), "nothing is left"),
        (("--fail", "1-31"), "ranks 1-31 lost: "),
        (("--micro-batches", "0"), "--micro-batches 0: must be at least 1"),
        (("--sequence-length", "0"), "--sequence-length 0: must be at least 1"),
        (("--hardware", "b100"), "hardware b100: not known; did you mean"),
        (("--schedule", "gpipe"), "--schedule gpipe: not known"),
        (("--planner", "oobleck"), "resihp-paper"),
    ],
)
def test_refusals(argv: tuple[str, ...], said: str) -> None:
    assert said in refusal(*LLAMA, *argv)


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("llama2-30b", "tp=8,dp=1,pp=2", "52 attention heads cannot be divided by tensor-parallel degree 8"),
        ("llama2-7b", "tp=2,dp=1,pp=33", "33 stages for 32 layers"),
        ("llama2-7b", "tp=2,dp=1", "pp is missing; for example tp=4,dp=2,pp=4"),
        ("llama-7b", "tp=2,dp=1,pp=2", "did you mean llama2-7b?"),
        ("nowhere.toml", "tp=2,dp=1,pp=2", "cannot be read: No such file"),
    ],
)
def test_layouts_and_models_that_cannot_be(model: str, layout: str, said: str) -> None:
    assert said in refusal("--model", model, "--layout", layout)


def test_the_paper_s_planner_is_asked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Situation] = []

    def progressive(situation: Situation) -> Decision:
        asked.append(situation)
        return without_lost_replicas(situation)

    monkeypatch.setattr(planners, "progressive", progressive)
    content = found(*SMALL, "--fail", "1", "--planner", "resihp-paper")
    assert len(asked) == 2  # the first to warm up
    assert len(content["after"]["layout"]["replicas"]) == 1


def test_a_stage_that_the_paper_leaves_without_ranks_is_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    argv = (*LLAMA, "--fail", "4-7", "--planner", "resihp-paper")
    content = found(*argv)
    assert content["after"]["layout"]["replicas"][0][1] == {"ranks": [], "layers": [10, 19]}
    assert len(content["after"]["migrations"]) == 8
    result = run(*argv, "--plot", tmp_path / "out.png")
    assert result.exit_code == 0, result.exception
    assert "8 stages of micro-batches will be computed by another replica." in result.stdout


def test_only_the_decision_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow before and after does not count."""
    clock = [0.0]

    def slowly(situation: Situation) -> Decision:
        clock[0] += 2.0
        return decide(situation)

    monkeypatch.setattr(command, "_decider", lambda _: slowly)
    monkeypatch.setattr(command.time, "perf_counter", lambda: clock[0])
    assert found(*SMALL, "--fail", "1")["planning_seconds"] == 2.0


# --- picture ----------------------------------------------------------------------------------------------------------


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    result = run(*SMALL, "--fail", "1", "--plot", picture)
    assert result.exit_code == 0, result.exception
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"plot written to {picture}" in result.stderr


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "the plot cannot be written" in refusal(*SMALL, "--plot", tmp_path / "no" / "out.png")
    assert "the plot cannot be written" in refusal(*SMALL, "--plot", tmp_path / "out.wav")


def test_without_matplotlib_the_picture_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in refusal(*SMALL, "--plot", tmp_path / "out.png")


def test_equal_replicas_are_drawn_once_and_boxes_stand_where_the_timeline_puts_them() -> None:
    from resihp.scheduler.cost.prices import iteration_seconds
    from resihp.scheduler.what_if import catalogue, question
    from resihp.wrapper.commands.plan.picture import half

    asked = question.Question(
        model=catalogue.model("llama2-7b", 1024),
        hardware=catalogue.hardware("a100"),
        tp=2,
        dp=4,
        pp=2,
        micro_batches=4,
        gpus_per_node=8,
        schedule="zero-bubble",
        slow={5: 0.5},
    )
    base = question.first_plan(asked)
    situation = question.pose(asked, base)
    seconds = iteration_seconds(base, situation)
    drawn = half("as it is", base, situation, seconds)
    assert [words for words, _ in drawn.replicas] == ["replica 1", "replicas 0 2-3"]
    lanes = [lane for _, stages in drawn.replicas for lane in stages]
    assert [len(lane.order) for lane in lanes] == [12] * 4  # F, B and W of four micro-batches
    assert {number for lane in lanes for number in lane.numbers} == {0, 1, 2, 3}
    assert max(lane.ends[-1] for lane in lanes) == drawn.computed_s < seconds
    assert lanes[0].label == "stage 0: 16 layers, ranks 4-5"


def test_a_plan_is_explained() -> None:
    asked = (*LLAMA[:4], "--sequence-parallel", "--fail", "5,22")
    told = found(*asked)["explanation"]
    assert list(told) == ["iteration", "unit", "limiting", "beside", "idle", "bound", "above_bound", "all_well"]
    assert 0.5 < told["limiting"]["share"] < 1
    assert told["bound"] * (1 + told["above_bound"]) == pytest.approx(told["iteration"])
    assert {rank for idle in told["idle"] for rank in idle["ranks"]} == set(found(*asked)["after"]["layout"]["standby"])
    said = run(*asked).stdout
    assert f"works {told['limiting']['share']:.0%} of the iteration" in said
    assert all(any(line.split()[:2] == words for line in said.splitlines()) for words in (["bound", "no"],))


def test_even_layers_of_uneven_models_are_told_by_what_they_cost() -> None:
    """The issue's example: a failure looks free where the layout was never good."""
    asked = ("--model", "qwen2.5-14b", "--layout", "tp=1,dp=1,pp=8", "--sequence-parallel", "--fail", "3")
    asked = (*asked, "--ignore-memory")
    told = found(*asked)["explanation"]["all_well"]
    assert told["excess"] > 0.05
    assert told["tuned"] < told["spread"] < told["plain"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({}, "nothing has failed"),
        ({"devices": {0: 0}}, "nothing more has failed"),
        ({"failed": (5,), "failed_nodes": ("n1",)}, "ranks 0-3 5 lost"),
        ({"slow": {rank: 0.5 for rank in range(12)}}, f"slow: rank {', '.join(f'{n} at 0.5' for n in range(12))}"),
        (
            {"slow": {rank: 0.5 for rank in range(14)}},
            f"slow: rank {', '.join(f'{n} at 0.5' for n in range(12))} and 2 more",
        ),
        ({"failed": (1,), "slow_links": {("n1", "n2"): 0.3}}, "rank 1 lost; link n1-n2 at 0.3"),
    ],
)
def test_what_has_happened_is_told_in_a_line(what: dict[str, Any], text: str) -> None:
    asked = Question(
        model=catalogue.model("llama2-7b", 1024),
        hardware=catalogue.hardware("a100"),
        **{"tp": 2, "dp": 2, "pp": 4, "micro_batches": 4, "gpus_per_node": 4},
        **what,
    )
    assert happened(asked) == text


def test_the_first_layout_is_tuned_on_request() -> None:
    uneven = ("--model", "qwen2.5-7b", "--layout", "tp=1,dp=2,pp=4", "--tune")
    content = found(*uneven)
    assert content["after"]["iteration_seconds"] < 0.8 * content["before"]["iteration_seconds"]
    assert content["transition"] == {"seconds": 0.0, "bytes": 0}
    assert [other["name"] for other in content["alternatives"]] == ["Megatron's grid"]
    said = run(*uneven).stdout
    assert "Why: tuned: predicted" in said
    assert "Transition" not in said
    assert "leave --fail, --slow and the like out" in refusal(*uneven, "--fail", "3")
