"""`resihp plan JOB`: a job's layout, model and slow devices come from its ledger, what is asked comes on top."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from resihp.db.writer import Ledger
from resihp.errors import ResihpError
from resihp.parallelism.layout import Layout, Replica, Stage
from resihp.parallelism.model import ModelSpec
from resihp.parallelism.plan import Plan, spread
from resihp.protocol.messages import Declare
from resihp.record import journal
from resihp.wrapper.cli import app
from tests.db.conftest import outcome

MODEL = ModelSpec(layers=16, hidden=1024, heads=16, kv_groups=16, ffn_hidden=4096, vocab=32000, sequence=2048)
DECLARE = Declare(model=MODEL, micro_batches=16, iterations=1000, resume_from=0, fingerprint="same")
LAYOUT = Layout.uniform(tp=2, pp=2, dp=2, layers=16)
PLAN = Plan(epoch=1, layout=LAYOUT, assignment=spread(16, 2))


def told(
    hardware: str = "NVIDIA A100-SXM4-80GB",
    slow: float | None = None,
    declare: bool = True,
    plan: Plan = PLAN,
) -> list[journal.AnyEntry]:
    """A job of DP2 x PP2 x TP2 on gpu-1 and gpu-2, of which rank 6 is at half speed if so asked."""
    entries: list[journal.AnyEntry] = [
        journal.JobStarted(
            job="7",
            command=("python", "train.py"),
            nodes=2,
            gpus_per_node=4,
            tp=2,
            pp=2,
            schedule="1f1b",
            host="here",
            user="me",
            restart_count=0,
            version="0.1.0",
            configuration={"job": {"memory_per_device": 80_000_000_000}},
        )
    ]
    for rank in range(8):
        node = f"gpu-{1 + rank // 4}"
        if rank % 4 == 0:
            entries.append(journal.NodeJoined(node=node, host=node, devices=4))
        entries.append(journal.WorkerStarted(rank=rank, node=node, device=rank % 4, pid=rank, epoch=0))
    probe = journal.DeviceProbe(
        rank=0,
        node="gpu-1",
        device=0,
        flops=1e14,
        memory_bytes=1e12,
        speed=1.0,
        fit=True,
        evidence="",
        hardware=hardware,
    )
    entries.append(journal.ProbesTaken(probe=1, occasion="start", seconds=0.3, devices=(probe,), links=()))
    if declare:
        entries.append(journal.ModelDeclared(declare=DECLARE))
    entries.append(journal.PlanDecided(plan=plan, next_iteration=1, action="start", finish=None, reason="start"))
    entries.append(journal.PlanInEffect(epoch=1))
    if slow is not None:
        failure = journal.FailureFound(
            failure=1,
            kind="fail-slow",
            component="device",
            cause="rank 6 works at 50%",
            ranks=(6,),
            node="gpu-2",
            device=2,
            iteration=3,
            epoch=1,
            evidence="probe",
            detect_s=None,
            speed=slow,
            confidence=0.9,
        )
        entries.append(failure)
    return entries


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def write(url: str, entries: list[journal.AnyEntry], folder: Path) -> None:
    with Ledger.open(url, folder) as ledger:
        for seq, entry in enumerate(entries, 1):
            ledger.submit(journal.Record(seq, 1_750_000_000.0 + seq, entry))
        assert ledger.flush()


def asked(url: str, *argv: str) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(app, ["plan", *argv, "--ledger", url, "--json"])
    assert done.exit_code == 0, done.exception
    content: dict[str, Any] = json.loads(done.stdout)
    return content, done.stderr


def refusal(url: str, *argv: str) -> str:
    done = CliRunner().invoke(app, ["plan", *argv, "--ledger", url])
    assert isinstance(done.exception, ResihpError), done.output
    return str(done.exception)


def test_a_rank_of_a_job_fails(ledger: str, tmp_path: Path) -> None:
    write(ledger, told(), tmp_path)
    content, said = asked(ledger, "7", "--fail", "6")
    assert said == ""
    assert content["unmitigated_seconds"] is None
    after = content["after"]
    ranks = [rank for replica in after["layout"]["replicas"] for stage in replica for rank in stage["ranks"]]
    assert 6 not in ranks
    assert sum(after["micro_batches"]) == 16
    assert content["before"]["iteration_seconds"] < after["iteration_seconds"]


def small(seconds: float, *, hardware: str = "AMD EPYC") -> list[journal.AnyEntry]:
    """A job that GPUs would do in microseconds, on processors; ten iterations are done."""
    model = ModelSpec(layers=6, hidden=64, heads=4, kv_groups=4, ffn_hidden=256, vocab=256, sequence=256)
    declare = msgspec.structs.replace(DECLARE, model=model, micro_batches=4, device="cpu", back_end="gloo")
    layout = Layout.uniform(tp=4, pp=1, dp=2, layers=6)
    entries = told(hardware, plan=Plan(epoch=1, layout=layout, assignment=spread(4, 2)))
    entries = [journal.ModelDeclared(declare=declare) if isinstance(e, journal.ModelDeclared) else e for e in entries]
    entries[0] = msgspec.structs.replace(entries[0], tp=4, pp=1)
    for i in range(1, 11):
        entries.append(journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=seconds, predicted_seconds=None))
    return entries


def shown(url: str, *argv: str) -> tuple[list[str], str]:
    """Lines of words, and what was said."""
    done = CliRunner().invoke(app, ["plan", *argv, "--ledger", url], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.exception
    return [" ".join(line.split()) for line in done.stdout.splitlines() if line.strip()], done.stderr


def test_a_small_job_is_told_in_its_own_times_and_a_loss_makes_it_no_faster(ledger: str, tmp_path: Path) -> None:
    write(ledger, small(0.76), tmp_path)
    lines, said = shown(ledger, "7", "--fail", "5")
    assert said == (
        "resihp: an iteration now takes 0.76 s, the median of the last 10 under the plan in effect; other times are "
        "scaled from it by layers and micro-batches alone, as its devices are unknown (--hardware)\n"
    )
    assert lines[0] == "job 7, 256 tokens per sequence, on 8 devices of 2 nodes; rank 5 lost"
    assert "before 0.76 s 1.00 x 5.0 MB DP2 x PP1 x TP4" in lines
    assert "after 1.14 s 1.50 x 7.9 MB 6 ranks work, 1 on standby" in lines
    assert any(line.startswith("Highest memory, rank 4: 2.6 MB of state, 5.3 MB of activations") for line in lines)


def test_times_of_a_very_fast_job_are_told_in_small_units(ledger: str, tmp_path: Path) -> None:
    write(ledger, small(0.00042), tmp_path)
    lines, _ = shown(ledger, "7")
    assert lines[0].endswith("on 8 devices of 2 nodes; nothing more has failed")
    assert "before 420 µs 1.00 x 5.0 MB DP2 x PP1 x TP4" in lines


def test_a_loss_that_seems_to_make_a_job_faster_is_explained(ledger: str, tmp_path: Path) -> None:
    """On devices that would do nothing but communicate, fewer of them are faster; without a failure, too."""
    write(ledger, small(0.76, hardware="NVIDIA A100-SXM4-80GB"), tmp_path)
    lines, said = shown(ledger, "7", "--fail", "5")
    assert "by operations and bytes of a100" in said
    assert "before 0.76 s 1.00 x 5.0 MB DP2 x PP1 x TP4" in lines
    [told] = [line for line in lines if line.startswith("Faster than before")]
    assert told.startswith(
        "Faster than before: not due to the failure, but to a better plan, which is faster without the failure, too (0."
    )
    assert told.endswith(" x); to search on all devices: resihp plan 7 --search 10.")
    assert not any(line.startswith("Faster") for line in shown(ledger, "7")[0]), "nothing has failed"


def test_the_times_that_a_plan_was_decided_by_tell_plans_apart(ledger: str, tmp_path: Path) -> None:
    """The job has learnt that its head takes as long as all layers together, which no arithmetic says."""
    times = journal.LearnedTimes(layers=((1e-3,) * 3,), embedding=(0.0,) * 3, head=(16e-3,) * 3)
    entries = told("Xeon")
    decided = next(n for n, entry in enumerate(entries) if isinstance(entry, journal.PlanDecided))
    entries[decided] = msgspec.structs.replace(entries[decided], basis=journal.PlanBasis(times=times))
    for i in range(1, 6):
        entries.append(journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=2.0, predicted_seconds=None))
    write(ledger, entries, tmp_path)
    content, said = asked(ledger, "7", "--slow", "6:0.5,7:0.5")
    assert "scaled from it by the measured times of its layers" in said
    assert content["before"]["iteration_seconds"] == pytest.approx(2.0)
    assert content["unmitigated_seconds"] > 3.0, "the last stage, which has the head, is half as fast"


def test_what_a_job_found_slow_is_in_what_was_measured(ledger: str, tmp_path: Path) -> None:
    entries = told(slow=0.5)
    for i in range(1, 6):
        entries.append(journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=2.0, predicted_seconds=None))
    write(ledger, entries, tmp_path)
    content, _ = asked(ledger, "7")
    assert content["unmitigated_seconds"] == pytest.approx(2.0)
    assert content["before"]["iteration_seconds"] < 1.6, "when all was well"


@pytest.mark.parametrize(("healed", "takes"), [(None, 2.0), (46, 1.0)])
def test_iterations_before_the_last_change_of_what_is_slow_do_not_tell_how_long_they_take_now(
    healed: int | None, takes: float, ledger: str, tmp_path: Path
) -> None:
    *entries, slow = told(slow=0.5)
    assert isinstance(slow, journal.FailureFound)
    for i in range(1, 51):
        seconds = 2.0 if 41 <= i < (healed or 51) else 1.0
        entries.append(journal.IterationCommitted(epoch=1, outcome=outcome(i), seconds=seconds, predicted_seconds=None))
    entries.append(msgspec.structs.replace(slow, iteration=41))
    if healed is not None:
        entries.append(journal.FailureEnded(failure=1, node="gpu-2", device=2, iteration=healed, evidence=""))
    write(ledger, entries, tmp_path)
    content, said = asked(ledger, "7")
    assert f"an iteration now takes {takes:.2f} s, the median" in said
    assert content["unmitigated_seconds"] == pytest.approx(takes)


def test_the_first_iteration_after_a_change_of_plan_tells_how_long_they_take(ledger: str, tmp_path: Path) -> None:
    """Just after a failure is when one asks; what GPUs of the catalogue would take is no answer for processors."""
    entries = small(0.76)
    decided = next(entry for entry in entries if isinstance(entry, journal.PlanDecided))
    plan = msgspec.structs.replace(decided.plan, epoch=2)
    entries += [
        msgspec.structs.replace(decided, plan=plan, next_iteration=11, action="between"),
        journal.PlanInEffect(epoch=2),
        journal.IterationCommitted(epoch=2, outcome=outcome(11), seconds=0.8, predicted_seconds=None),
    ]
    write(ledger, entries, tmp_path)
    content, said = asked(ledger, "7")
    assert "the median of the last 1 under the plan in effect" in said
    assert content["before"]["iteration_seconds"] == pytest.approx(0.8)


def test_other_hardware_is_asked_about_by_its_arithmetic(ledger: str, tmp_path: Path) -> None:
    write(ledger, small(0.76), tmp_path)
    content, said = asked(ledger, "7", "--hardware", "h100")
    assert (said, content["before"]["iteration_seconds"] < 1e-3) == ("", True)


def test_a_job_with_a_stage_without_ranks(ledger: str, tmp_path: Path) -> None:
    first, second = LAYOUT.replicas
    layout = Layout((Replica((first.stages[0], Stage((), first.stages[1].chunks))), second), (2, 3))
    write(ledger, told(plan=Plan(epoch=1, layout=layout, assignment=()).dealing(16)), tmp_path)
    content, said = asked(ledger, "7", "--fail", "2")
    assert said == "", "what passes elsewhere is as it was dealt"
    assert 0 < content["before"]["iteration_seconds"] < math.inf
    assert content["after"]["iteration_seconds"] <= content["before"]["iteration_seconds"]


def test_what_is_slow_in_the_job_is_slow_in_the_question(ledger: str, tmp_path: Path) -> None:
    write(ledger, told(slow=0.5), tmp_path)
    content, _ = asked(ledger)
    assert content["unmitigated_seconds"] > 1.3 * content["before"]["iteration_seconds"]
    assert content["after"]["iteration_seconds"] < content["unmitigated_seconds"]
    healed, _ = asked(ledger, "7", "--slow", "6:1")
    assert healed["unmitigated_seconds"] == pytest.approx(healed["before"]["iteration_seconds"])
    gone, _ = asked(ledger, "7", "--fail-node", "gpu-2")
    assert gone["unmitigated_seconds"] is None


def test_for_people_it_says_whose_plan_it_is(ledger: str, tmp_path: Path) -> None:
    write(ledger, told(slow=0.5), tmp_path)
    done = CliRunner().invoke(app, ["plan", "--ledger", ledger], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.exception
    assert done.stdout.startswith("job 7, 2048 tokens per sequence, on 8 a100 of 2 nodes; slow: rank 6 at 0.5")


def test_devices_that_nobody_knows_are_taken_for_others_and_that_is_said(ledger: str, tmp_path: Path) -> None:
    write(ledger, told(hardware="Xeon"), tmp_path)
    _, said = asked(ledger, "7")
    assert said == (
        "resihp: Xeon is not in the catalogue: times are for a100, only their ratios count; "
        "name the devices with --hardware\n"
    )
    assert asked(ledger, "7", "--hardware", "h100")[1] == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("7", "--fail", "9"), "--fail 9: no such rank; there are ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (("7", "--fail-node", "n1"), "--fail-node n1: no node n1; there are gpu-1, gpu-2"),
        (("7", "--fail", "6", "--slow", "6:0.5"), "rank 6: given as slow and as failed"),
        (("7", "--model", "llama2-7b"), "plan 7: a job has its own model and layout"),
    ],
)
def test_refusals(ledger: str, tmp_path: Path, argv: tuple[str, ...], said: str) -> None:
    write(ledger, told(), tmp_path)
    assert said in refusal(ledger, *argv)


def test_a_job_that_has_not_said_what_it_trains(ledger: str, tmp_path: Path) -> None:
    write(ledger, told(declare=False), tmp_path)
    assert refusal(ledger, "7") == (
        "job 7: has no plan yet, or an older resihp wrote its ledger; use --model and --layout"
    )


@pytest.mark.parametrize(("device", "back_end"), [("cpu", "gloo"), ("cuda", "gloo"), ("cuda", "nccl")])
def test_memory_is_that_of_what_the_jobs_ranks_work_with(
    ledger: str, tmp_path: Path, device: str, back_end: str
) -> None:
    declare = msgspec.structs.replace(DECLARE, device=device, back_end=back_end)
    entries = [e for e in told() if not isinstance(e, journal.ModelDeclared)]
    write(ledger, [*entries[:-2], journal.ModelDeclared(declare=declare), *entries[-2:]], tmp_path)
    done = CliRunner().invoke(app, ["plan", "--fail", "5", "--ledger", ledger])
    assert done.exit_code == 0, done.exception
    assert ("CUDA's context" in done.output) == (device == "cuda")
    assert ("NCCL's communicators" in done.output) == (back_end == "nccl")
