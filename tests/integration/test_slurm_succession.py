"""The batch host dies, or its supervisor, or the network breaks: one leads, and only one, and nothing is lost."""

from __future__ import annotations

import time

import pytest

from resihp.record.journal import (
    DrainDecided,
    IterationCommitted,
    JobEnded,
    LeaderChosen,
    NodeLost,
    PlanDecided,
    Record,
    ReplacementChanged,
    WorkerEnded,
    WorkerStarted,
)
from resihp.record.journal_file import read
from resihp.record.journal_format import encode
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference, on_node

pytestmark = pytest.mark.timeout(400)

SUCCESSOR_WITHIN_S = 12.0
ADOPTED_WITHIN_S = 5.0


def journals(desk: Desk, job: str) -> dict[str, list[Record]]:
    """Every journal of the job, and every copy that an agent keeps, by file name."""
    files = [path for path in desk.local.glob(f"{job}-*/*") if path.name == "journal"]
    files += [path for path in desk.local.glob(f"{job}-*/*") if path.suffix in (".journal", ".copy")]
    return {path.name: read(path) for path in files}


def assert_one_leader(desk: Desk, job: str) -> None:
    """No number stands for two records, no term has two leaders, no iteration two outcomes, wherever it was written."""
    records: dict[int, bytes] = {}
    leaders: dict[int, str] = {}
    outcomes: dict[int, object] = {}
    for name, content in journals(desk, job).items():
        for record in content:
            assert records.setdefault(record.seq, encode(record)) == encode(record), f"{name}: record {record.seq}"
            match record.entry:
                case LeaderChosen(term=term, node=node):
                    assert leaders.setdefault(term, node) == node, f"{name}: term {term}"
                case IterationCommitted(outcome=outcome):
                    assert outcomes.setdefault(outcome.iteration, outcome) == outcome, f"{name}: {outcome.iteration}"


def taken_over(desk: Desk, job: str) -> tuple[float, LeaderChosen] | None:
    """When another supervisor took over, and which; the last one, None if there was only one."""
    records = [(record.at, record.entry) for record in desk.records(job)]
    return next(((at, entry) for at, entry in records[::-1] if isinstance(entry, LeaderChosen)), None)


def assert_completed(desk: Desk, job: str, reference: Reference) -> None:
    """Every iteration counts once and is right, whoever led, and this is what stands in every book."""
    state, _ = desk.wait(job)
    assert state in ("COMPLETED", "CANCELLED"), desk.output(job)
    assert desk.job(job).exit_code_file.read_text() == "0\n"
    (ended,) = desk.of(job, JobEnded)
    assert (ended.state, ended.exit_code) == ("completed", 0)
    assert_one_leader(desk, job)
    reference.check(desk.rows("iterations", job))
    assert desk.status(job)["state"] == "completed"
    desk.until(
        lambda: not any(on_node(desk.cluster, node, "resihp.wrapper.agent.process") for node in desk.cluster.nodes), job
    )


@pytest.mark.soak
def test_the_batch_host_dies_and_a_successor_ends_the_job(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=1))
    desk.pace(0.1)
    job = desk.sbatch_training(ITERATIONS, gpus=1)
    desk.until_committed(job, 3)
    chosen = successor_of(desk, job, "n1")
    desk.pace(0.0)
    assert_completed(desk, job, reference)
    (failure,) = desk.rows("failures", job)
    assert (failure["component"], failure["node"]) == ("node", "n1")
    assert desk.of(job, DrainDecided) == [], "never the batch host"
    assert chosen.term == 2


def successor_of(desk: Desk, job: str, node: str) -> LeaderChosen:
    """Kill the node that leads; who takes over, which must be soon."""
    before = taken_over(desk, job)
    killed_at = time.time()
    desk.cluster.kill_node(node)
    desk.until(lambda: taken_over(desk, job) != before, job)
    found = taken_over(desk, job)
    assert found is not None
    at, chosen = found
    print(f"successor of {node} on {chosen.node} after {at - killed_at:.1f} s")
    assert chosen.how == "elected"
    assert at - killed_at < SUCCESSOR_WITHIN_S
    return chosen


@pytest.mark.soak
def test_the_successors_node_dies_too(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=5, gpus=1))
    desk.pace(0.2)
    job = desk.sbatch_training(ITERATIONS, gpus=1)
    desk.until_committed(job, 3)
    first = successor_of(desk, job, "n1")
    desk.until_committed(job, desk.committed(job) + 1)
    desk.until(lambda: [e for e in desk.of(job, ReplacementChanged) if e.state == "joined"], job)
    second = successor_of(desk, job, first.node)
    assert (first.term, second.term) == (2, 3)
    desk.until(lambda: desk.of(job, DrainDecided), job)
    desk.pace(0.0)
    assert_completed(desk, job, reference)
    assert [row["node"] for row in desk.rows("failures", job)] == ["n1", first.node]
    assert [row["node"] for row in desk.rows("drains", job)] == [first.node], "never the batch host"
    replacement, *_ = desk.rows("replacements", job)
    assert replacement["instead"] == "n1"
    assert desk.state(replacement["slurm_job"])[0] in ("COMPLETED", "CANCELLED"), "it ends with the job"


@pytest.mark.soak
def test_a_killed_supervisor_is_followed_by_another_one_and_nobody_stops(
    cluster: MakeCluster, reference: Reference
) -> None:
    desk = Desk(cluster(nodes=2, gpus=1))
    desk.pace(0.05)
    job = desk.sbatch_training(ITERATIONS, nodes=2, gpus=1)
    desk.until_committed(job, 3)
    (supervisor,) = on_node(desk.cluster, "n1", "resihp.wrapper.supervisor.process")
    killed_at = time.time()
    supervisor.kill()
    at, chosen = desk.until(lambda: taken_over(desk, job), job)
    desk.until_committed(job, desk.committed(job) + 1)
    print(f"followed after {at - killed_at:.1f} s")
    assert (chosen.how, chosen.node) == ("restarted", "n1")
    assert at - killed_at < ADOPTED_WITHIN_S
    desk.pace(0.0)
    assert_completed(desk, job, reference)
    assert desk.state(job) == ("COMPLETED", "0:0")
    assert len(desk.of(job, WorkerStarted)) == 2
    assert [entry.exit for entry in desk.of(job, WorkerEnded)] == [0, 0]
    assert len(desk.of(job, PlanDecided)) == 1, "training was not even interrupted"


def test_most_agents_choose_a_leader_and_the_one_that_is_cut_off_gives_up(
    cluster: MakeCluster, reference: Reference
) -> None:
    # As at a site: Slurm must not give the node up, and the batch script on it, before the network is back.
    desk = Desk(cluster(nodes=4, gpus=1, network=True, settings={"SlurmdTimeout": "300"}))
    desk.pace(0.2)
    job = desk.sbatch_training(ITERATIONS, gpus=1)
    desk.until_committed(job, 3)
    cut_at = time.time()
    desk.cluster.partition("n1")
    at, chosen = desk.until(lambda: taken_over(desk, job), job)
    print(f"successor on {chosen.node} after {at - cut_at:.1f} s")
    assert chosen.how == "elected"
    assert chosen.node != "n1"
    desk.until_committed(job, desk.committed(job) + 2)
    desk.until(lambda: "no quorum follows this supervisor" in desk.output(job), job)
    assert_one_leader(desk, job)
    desk.cluster.heal("n1")
    desk.pace(0.0)
    assert_completed(desk, job, reference)


@pytest.mark.soak
def test_of_two_halves_the_one_that_led_goes_on_and_the_other_never_leads(
    cluster: MakeCluster, reference: Reference
) -> None:
    desk = Desk(cluster(nodes=4, gpus=1, network=True))
    desk.pace(0.2)
    job = desk.sbatch_training(ITERATIONS, gpus=1)
    desk.until_committed(job, 3)
    desk.cluster.partition("n3", "n4")
    desk.until(lambda: {entry.node for entry in desk.of(job, NodeLost)} == {"n3", "n4"}, job)
    logs = [desk.job(job).logs / f"{node}.agent.log" for node in ("n3", "n4")]
    desk.until(lambda: any("no quorum: n3, n4 agree" in log.read_text() for log in logs), job)
    desk.until_committed(job, desk.committed(job) + 1)

    # Only we can keep them out now: Slurm would end what runs on nodes that it has taken back.
    for node in ("n3", "n4"):
        desk.cluster.kill_slurmd(node)
    desk.cluster.heal("n3", "n4")
    desk.until(lambda: all("refuses this agent" in log.read_text() for log in logs), job)
    ours = ("resihp.wrapper.agent.process", "resihp.worker.forkserver")
    desk.until(lambda: not any(on_node(desk.cluster, node, each) for node in ("n3", "n4") for each in ours), job)
    desk.pace(0.0)
    assert_completed(desk, job, reference)
    assert desk.of(job, LeaderChosen) == []
    assert all(not isinstance(r.entry, LeaderChosen) for content in journals(desk, job).values() for r in content)
    assert len(desk.of(job, WorkerStarted)) == 4
