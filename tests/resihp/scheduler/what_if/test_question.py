"""Questions: read, refused, made into a situation; and what the answer says."""

from __future__ import annotations

import json
import math
import re

import msgspec
import pytest

from resihp.errors import LayoutError, PlanError, UsageError
from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Migration, Plan
from resihp.scheduler import Decision, decide, without_lost_replicas
from resihp.scheduler.cost import device_memory
from resihp.scheduler.cost.device_memory import GAP_SHARE
from resihp.scheduler.cost.prices import iteration_seconds
from resihp.scheduler.transition_cost import NO_COST
from resihp.scheduler.what_if import catalogue, option_texts, question
from resihp.scheduler.what_if.answer import WhatIfAnswer, answer, as_json
from resihp.scheduler.what_if.question import Question

LLAMA = Question(
    model=catalogue.model("llama2-13b", 4096),
    hardware=catalogue.hardware("a100"),
    tp=4,
    pp=4,
    dp=2,
    micro_batches=8,
    gpus_per_node=8,
)


def asked(**changes: object) -> Question:
    return msgspec.structs.replace(LLAMA, **changes)


def answered(given: Question) -> WhatIfAnswer:
    base = question.first_plan(given)
    situation = question.pose(given, base)
    return answer(given, base, situation, decide(situation))


def unchanged(given: Question) -> WhatIfAnswer:
    """As if the planner left everybody at work."""
    base = question.first_plan(given)
    situation = question.pose(given, base)
    standby = tuple(rank for rank in base.layout.standby if rank in situation.available)
    same = msgspec.structs.replace(base, epoch=2, layout=Layout(base.layout.replicas, standby))
    return answer(given, base, situation, Decision(plan=same, seconds=iteration_seconds(same, situation), reason=""))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_degrees() -> None:
    assert option_texts.degrees("tp=4,dp=2,pp=8") == (4, 2, 8)
    assert option_texts.degrees(" pp=8, tp=4 ,dp=2") == (4, 2, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=4,dp=2", "pp is missing; for example tp=4,dp=2,pp=4"),
        ("tp=4,dp=2,pp=0", "pp must be at least 1"),
        ("tp=4,dp=2,pp=-1", "pp=-1 is not a degree"),
        ("tp=4,dp=2,pp=1.5", "pp=1.5 is not a degree"),
        ("tp=4,dp=2,pq=4", "unknown degree pq; did you mean"),
        ("tp=4,tp=2,pp=4", "tp is given twice"),
        ("4x2x4", "4x2x4 is not a degree"),
        ("", "nothing is not a degree"),
    ],
)
def test_degrees_that_are_none(text: str, said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        option_texts.degrees(text)
    assert said in str(caught.value)


def test_ranks_nodes_speeds_and_links() -> None:
    assert option_texts.ranks(["5,17", "8-10"]) == (5, 8, 9, 10, 17)
    assert option_texts.names(["n3", "n1,n3"]) == ("n3", "n1")
    assert option_texts.speeds(["12:0.5,13:1", "2:.25"]) == {12: 0.5, 13: 1.0, 2: 0.25}
    assert option_texts.links(["n2-n1:0.3"]) == {("n1", "n2"): 0.3}


@pytest.mark.parametrize("text", ["x", "-1", "5-3", "1.5", "", "5,,6", "0-99999999"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--fail"):
        option_texts.ranks([text])


@pytest.mark.parametrize("speed", ["0", "-0.5", "nan", "1.01", "inf", "fast", ""])
def test_speeds_that_are_none(speed: str) -> None:
    with pytest.raises(UsageError, match="speed"):
        option_texts.speeds([f"12:{speed}"])
    with pytest.raises(UsageError, match="speed"):
        option_texts.links([f"n1-n2:{speed}"])


def test_a_speed_of_zero_is_a_failure() -> None:
    with pytest.raises(UsageError, match="has failed: --fail 12"):
        option_texts.speeds(["12:0"])


@pytest.mark.parametrize("text", ["n1:0.5", "n1-n1:0.5", "n1-n2-n3:0.5", "-n2:0.5", "n1-n2:0.5,n2-n1:0.4"])
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--slow-link"):
        option_texts.links([text])


# --- asking -----------------------------------------------------------------------------------------------------------


def test_ranks_fill_nodes_and_spares_come_after() -> None:
    given = asked(tp=2, pp=3, dp=1, gpus_per_node=4, spares=1)
    assert given.nodes == {
        **dict.fromkeys(range(4), "n1"),
        **dict.fromkeys((4, 5), "n2"),
        **dict.fromkeys(range(6, 10), "n3"),
    }
    assert question.first_plan(given).layout.standby == (6, 7, 8, 9)


def test_the_situation_says_what_has_happened() -> None:
    given = asked(failed=(5,), failed_nodes=("n3",), slow={12: 0.5, 13: 1.0}, slow_links={("n1", "n2"): 0.3})
    base = question.first_plan(given)
    situation = question.pose(given, base)
    assert situation.base == base.layout == Layout.uniform(tp=4, pp=4, dp=2, layers=40)
    assert situation.lost == {5, *range(16, 24)}
    assert situation.speeds == {12: 0.5}
    assert situation.links == {("n1", "n2"): 0.3}
    assert (situation.micro_batches, situation.epoch) == (16, 2)
    assert situation.memory_bytes == 80_000_000_000
    assert situation.profile is not None
    assert situation.unit == "s"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed": (32,)}, "--fail 32: no such rank; there are ranks 0 to 31"),
        ({"slow": {99: 0.5}}, "--slow 99: no such rank"),
        ({"failed_nodes": ("n5",)}, "--fail-node n5: no node n5; there are n1 to n4"),
        ({"slow_links": {("n1", "n9"): 0.5}}, "--slow-link n1-n9: no node n9"),
        ({"slow": {5: 0.5}, "failed": (5,)}, "rank 5: given as slow and as failed"),
        ({"slow": {5: math.nan}}, "speed of 5: nan"),
        ({"failed": tuple(range(32))}, "nothing is left: all 32 ranks have failed"),
        ({"micro_batches": 0}, "--micro-batches 0: must be at least 1"),
        ({"pp": 41}, "41 stages for 40 layers, each needs one; choose pp=40 or less"),
        ({"chunks": 11}, "44 virtual stages for 40 layers, each needs one; choose pp=3 or less"),
        ({"tp": 3}, "40 attention heads cannot be divided by tensor-parallel degree 3; possible are tp=1, 2"),
        ({"tp": 8, "gpus_per_node": 4}, "a tensor-parallel group of 8 does not fit a node of 4"),
        ({"schedule": "1f2b"}, "--schedule 1f2b: not known; did you mean 1f1b?"),
    ],
)
def test_what_cannot_be_asked(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        question.first_plan(asked(**changes))
    assert said in str(caught.value)


def test_nothing_left_for_a_stage_is_refused_by_the_planner() -> None:
    """One rank is left, which has too little memory."""
    given = asked(failed=tuple(range(1, 32)))
    base = question.first_plan(given)
    with pytest.raises(PlanError):
        decide(question.pose(given, base))


# --- answering --------------------------------------------------------------------------------------------------------


def test_nothing_happened() -> None:
    found = unchanged(LLAMA)
    assert found.unmitigated_s == pytest.approx(found.before.seconds) == pytest.approx(found.after.seconds)
    assert found.cost == NO_COST
    assert answered(LLAMA).after.seconds <= found.after.seconds * (1 + 1e-9)


def test_a_dead_device_cannot_be_ignored() -> None:
    found = answered(asked(failed=(5,)))
    assert found.unmitigated_s is None
    assert answered(LLAMA).after.seconds < found.after.seconds, "the healthy job, planned alike"
    assert 5 not in found.after.plan.layout.active
    assert found.cost.lost_s == pytest.approx(found.before.seconds / 2)
    assert found.cost.total_bytes > 0


def test_a_slow_device_is_better_mitigated() -> None:
    found = answered(asked(slow={12: 0.3}))
    assert found.unmitigated_s is not None
    assert answered(LLAMA).after.seconds < found.after.seconds < found.unmitigated_s, "the healthy job, planned alike"
    assert found.cost.lost_s == 0.0  # between two iterations


def test_before_is_healthy_and_unmitigated_is_not() -> None:
    given = asked(slow={12: 0.3}, slow_links={("n1", "n2"): 0.1})
    base = question.first_plan(given)
    found = answered(given)
    assert found.before.seconds == iteration_seconds(base, question.pose(LLAMA, base))
    assert found.unmitigated_s == iteration_seconds(base, question.pose(given, base))
    assert found.before.seconds == answered(LLAMA).before.seconds


def test_a_dead_spare_changes_nothing() -> None:
    found = unchanged(asked(spares=1, failed=(35,)))
    assert found.unmitigated_s == pytest.approx(found.before.seconds)
    assert found.cost == NO_COST


def test_a_spare_node_takes_the_place_of_a_lost_one() -> None:
    lost = answered(asked(failed_nodes=("n2",)))
    spared = answered(asked(failed_nodes=("n2",), spares=1))
    assert spared.after.seconds < lost.after.seconds
    assert spared.after.seconds == pytest.approx(answered(LLAMA).after.seconds, rel=0.02)


def test_a_layout_that_does_not_fit_is_said_so_and_goes_on() -> None:
    given = asked(model=catalogue.model("llama2-70b", 8192), tp=4, pp=2, dp=1, failed=(3,))
    base = question.first_plan(given)
    assert question.pose(given, base).memory_bytes is None
    found = answered(given)
    assert "its device has 80.0 GB: memory is not checked; --sequence-parallel would need less" in found.remarks[0]


def test_lost_state_is_said_so() -> None:
    """The only replica lost a node."""
    given = asked(dp=1, pp=4, tp=4, failed_nodes=("n1",))
    assert question.pose(given, question.first_plan(given)).fresh, "nothing is held beside what is loaded"
    assert not question.pose(LLAMA, question.first_plan(LLAMA)).fresh
    found = answered(asked(dp=1, pp=4, tp=4, failed_nodes=("n1",)))
    assert "all state has to come from the last checkpoint" in found.remarks[-1]
    copies = found.cost.total_bytes / (12 * 13e9)
    assert copies == pytest.approx(round(copies), rel=0.02), "as many as there are replicas then"


def test_memory_is_eighteen_bytes_a_parameter_activations_of_two_and_what_a_gpu_takes() -> None:
    """Worked by hand: the first stage of four keeps four micro-batches."""
    model = LLAMA.model
    needs = question.stage_bytes(LLAMA, question.first_plan(LLAMA))[0]
    found = [(need - LLAMA.overhead.with_gaps(1)) / (1 + GAP_SHARE) for need in needs]
    state = 18 * (10 * model.parameters_per_layer + model.vocab_rows * model.hidden) / 4
    # Into and out of two norms; queries, keys, values, the first two turned, what was attended, a gated MLP's inside
    # on four devices; sine and cosine.
    numbers = 4 * model.hidden + (6 * model.hidden + 3 * model.ffn_hidden) / 4 + 4 * model.head_width
    activations = 4 * 10 * 4096 * 2 * numbers
    assert found[0] == pytest.approx(state + activations, rel=0.002)
    assert found[2] < found[1] < found[0]


def test_a_model_in_fp32_is_asked_about_with_its_own_state_and_twice_the_activations() -> None:
    """And with queries once more in each layer: attention in fp32 goes document by document."""
    half = msgspec.structs.replace(LLAMA, overhead=device_memory.NO_OVERHEAD, pp=1)
    whole = msgspec.structs.replace(half, model=msgspec.structs.replace(LLAMA.model, precision="fp32"))
    logits = 4096 * LLAMA.model.vocab_rows // 4
    parameters, in_loss = LLAMA.model.parameters / 4, 4 * min(logits, 1 << 23)
    queries = LLAMA.model.layers * 4096 * 4 * LLAMA.model.heads * LLAMA.model.head_width / 4
    (few,), (many,) = (question.stage_bytes(given, question.first_plan(given))[0] for given in (half, whole))
    activations = few - 18 * parameters - in_loss
    assert many == pytest.approx(16 * parameters + 2 * activations + queries + in_loss, rel=0.002)


def test_what_does_not_fit_is_told_with_the_parts_that_it_needs() -> None:
    small = msgspec.structs.replace(LLAMA.hardware, memory_bytes=25_000_000_000)
    remark = answered(asked(hardware=small)).remarks[0]
    assert "before anything fails, its device has 25.0 GB" in remark
    for part in ("state", "activations", "CUDA's context", "NCCL's communicators", "gaps between allocations"):
        assert re.search(rf"[\d.]+ GB of {part}", remark), remark


def test_equal_replicas_need_the_same() -> None:
    given = asked(dp=8, micro_batches=4)
    needs = question.stage_bytes(given, question.first_plan(given))
    assert len(needs) == 8
    assert len(set(needs)) == 1


def test_json_has_the_keys_that_were_agreed() -> None:
    given = asked(failed=(5,))
    base = question.first_plan(given)
    situation = question.pose(given, base)
    found = as_json(answer(given, base, situation, without_lost_replicas(situation)), 0.25)
    assert list(found) == [
        *("schema", "planning_seconds", "before", "after", "unmitigated_seconds", "transition"),
        *("sole_holders", "alternatives", "reason"),
    ]
    assert found["planning_seconds"] == 0.25
    after = found["after"]
    assert isinstance(after, dict)
    assert list(after) == ["iteration_seconds", "layout", "micro_batches", "migrations"]
    assert sum(after["micro_batches"]) == 16
    assert after["layout"]["standby"] == [rank for rank in range(16) if rank != 5]
    assert after["layout"]["replicas"][0][0] == {"ranks": [16, 17, 18, 19], "layers": [0, 9]}
    json.dumps(found, allow_nan=False)


def test_json_of_virtual_stages_and_migrations() -> None:
    given = asked(chunks=2, schedule="interleaved", pp=2, tp=2, dp=2)
    base = question.first_plan(given)
    plan = Plan(
        epoch=2,
        layout=base.layout,
        assignment=base.assignment,
        schedule="interleaved",
        migrations=(Migration(micro_batch=3, virtual_stage=1, replica=1),),
    )
    situation = question.pose(given, base)
    decision = Decision(plan=plan, seconds=1.0, reason="by hand", alternatives=(("none", math.inf),))
    found = as_json(answer(given, base, situation, decision), 0.0)
    after = found["after"]
    assert isinstance(after, dict)
    assert after["layout"]["replicas"][0][0] == {"ranks": [0, 1], "chunks": [[0, 9], [20, 29]]}
    assert after["migrations"] == [{"micro_batch": 3, "virtual_stage": 1, "replica": 1}]
    assert found["alternatives"] == [{"name": "none", "iteration_seconds": None}]


def test_a_job_of_16384_devices_is_answered() -> None:
    given = asked(
        model=catalogue.model("llama3-405b", 8192),
        hardware=catalogue.hardware("h100"),
        tp=8,
        pp=16,
        dp=128,
        failed=(3,),
        sequence_parallel=True,
    )
    base = question.first_plan(given)
    situation = question.pose(given, base)
    left = Layout(base.layout.replicas[1:], tuple(rank for rank in range(128) if rank != 3))
    spread_again = Plan(epoch=2, layout=left, assignment=question.first_plan(asked(dp=127)).assignment)
    found = answer(given, base, situation, Decision(plan=spread_again, seconds=1.0, reason=""))
    assert found.cost.total_bytes == 0
    assert found.cost.groups_s > 0
