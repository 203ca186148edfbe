"""Slurm and nodes in trouble: what hangs, is cut off, comes back or does not answer. The job goes on all the same."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from resihp.record.journal import (
    DrainAnswered,
    DrainDecided,
    FailureFound,
    JobEnded,
    NodeLost,
    NodeReleased,
    Reconfigured,
    Suspected,
)
from tests.integration.slurm_jobs import Desk, MakeCluster, Reference, on_node

pytestmark = pytest.mark.timeout(300)

LAST = 20
DOWN_S = 30.0 if "RESIHP_SOAK" in os.environ else 0.0
"""How long slurmctld stays down, at least."""
AGENT, WORKER_PARENT = "resihp.wrapper.agent.process", "resihp.worker.forkserver"


def begun(desk: Desk) -> str:
    """A job on four nodes that trains."""
    desk.pace(0.1)
    job = desk.sbatch_training(LAST)
    desk.until_committed(job, 3)
    return job


def ended(desk: Desk, job: str, reference: Reference) -> None:
    """Let it come to its end: all iterations, each once, as if nothing had been."""
    desk.pace(0.0)
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job), last=LAST)


def test_a_hung_node_is_given_up_and_fenced_when_it_comes_back(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=2))
    job = begun(desk)
    desk.cluster.stop_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    assert [entry.node for entry in desk.of(job, Suspected) if entry.node == "n3" and entry.rank is None]
    assert [entry.node for entry in desk.of(job, NodeLost)] == ["n3"]
    before = desk.committed(job)
    desk.cluster.cont_node("n3")
    desk.until(lambda: not on_node(desk.cluster, "n3", AGENT) and not on_node(desk.cluster, "n3", WORKER_PARENT), job)
    desk.until_committed(job, before + 2)
    ended(desk, job, reference)
    assert [(entry.node, entry.measure) for entry in desk.of(job, DrainDecided)] == [("n3", "exclude")]
    assert len(desk.of(job, FailureFound)) == 1


@pytest.mark.soak
def test_a_node_that_was_cut_off_and_comes_back_is_fenced(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=2, network=True))
    job = begun(desk)
    desk.cluster.partition("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    before = desk.committed(job)
    desk.cluster.heal("n3")
    desk.until(
        lambda: not on_node(desk.cluster, "n3", AGENT) and not on_node(desk.cluster, "n3", WORKER_PARENT), job, 90
    )
    desk.until_committed(job, before + 2)
    ended(desk, job, reference)
    assert [entry.node for entry in desk.of(job, NodeLost)] == ["n3"]
    assert len(desk.of(job, FailureFound)) == 1


@pytest.mark.soak
def test_a_dead_slurmd_changes_nothing(cluster: MakeCluster, reference: Reference) -> None:
    desk = Desk(cluster(nodes=4, gpus=2))
    job = begun(desk)
    desk.pace(0.5)
    desk.cluster.kill_slurmd("n3")
    desk.cluster.wait_state("n3", "down*", timeout_s=60)
    assert on_node(desk.cluster, "n3", AGENT), "its processes live on"
    desk.until_committed(job, desk.committed(job) + 2)
    desk.pace(0.0)
    desk.until(lambda: desk.of(job, JobEnded), job)
    assert desk.of(job, NodeLost) == []
    assert desk.of(job, FailureFound) == []
    assert desk.of(job, DrainDecided) == []
    desk.cluster.start_node("n3")  # without it, Slurm cannot end the job
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    reference.check(desk.rows("iterations", job), last=LAST)


def test_slurmctld_is_down_while_a_node_dies(cluster: MakeCluster, reference: Reference) -> None:
    """Training does not wait for Slurm; what it is to be told, it is told once, when it is back."""
    desk = Desk(cluster(nodes=4, gpus=2))
    job = begun(desk)
    desk.pace(max(0.5, DOWN_S / 12))
    desk.cluster.stop_controller()
    stopped_at = time.monotonic()
    desk.cluster.kill_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    desk.until(lambda: desk.of(job, DrainDecided), job)
    desk.until_committed(job, desk.committed(job) + 2)
    answered = desk.until(lambda: desk.of(job, DrainAnswered), job)
    assert [(entry.step, entry.outcome) for entry in answered] == [("exclusion", "done")], "which needs no Slurm"
    before = desk.committed(job)
    desk.until(lambda: time.monotonic() - stopped_at > DOWN_S, job)
    done = desk.committed(job) - before
    print(f"slurmctld down for {time.monotonic() - stopped_at:.0f} s, {done} iterations in the last part of it")
    desk.cluster.start_controller()
    desk.until(lambda: [e for e in desk.of(job, NodeReleased) if e.outcome == "done"], job, 120)
    assert desk.nodes(job) == ["n1", "n2", "n4"]
    ended(desk, job, reference)
    assert len(desk.of(job, DrainDecided)) == 1
    assert len([e for e in desk.of(job, NodeReleased) if e.outcome == "done"]) == 1


@pytest.mark.soak
def test_a_slow_scontrol_holds_up_nothing(cluster: MakeCluster, reference: Reference) -> None:
    made = cluster(nodes=4, gpus=2)
    programs = made.folder / "slow"
    programs.mkdir()
    slow(programs / "scontrol", made.environment["PATH"])
    desk = Desk(made)
    desk.environment["PATH"] = f"{programs}:{desk.environment['PATH']}"
    job = begun(desk)
    desk.cluster.kill_node("n3")
    desk.until(lambda: desk.of(job, Reconfigured), job)
    desk.until_committed(job, desk.committed(job) + 2)
    ended(desk, job, reference)
    assert (programs / "asked").exists(), "the slow one was never asked"


def slow(path: Path, search: str) -> None:
    """A program of that name that changes nodes after half a minute only, and leaves a trace of having been asked."""
    real = next(each for folder in search.split(":") if os.access(each := os.path.join(folder, path.name), os.X_OK))
    text = f'#!/bin/sh\ncase "$1" in update) touch {path.parent}/asked; sleep 30;; esac\nexec {real} "$@"\n'
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
