"""Elements of a job array: what happens to one of them happens to none of the others."""

from __future__ import annotations

import os

import pytest

from resihp.record.journal import JobEnded, JobSignalled, JobStarted, NodeReleased
from tests.integration.slurm_jobs import ITERATIONS, Desk, MakeCluster, Reference

pytestmark = pytest.mark.timeout(400)


def test_one_element_is_warned_and_comes_back_one_is_cancelled_one_loses_a_node(
    cluster: MakeCluster, reference: Reference
) -> None:
    check(Desk(cluster(nodes=6, gpus=1)), reference, "lost", "cancelled", "warned")


@pytest.mark.soak
def test_the_last_element_loses_a_node(cluster: MakeCluster, reference: Reference) -> None:
    check(Desk(cluster(nodes=6, gpus=1)), reference, "warned", "undisturbed", "lost")


def check(desk: Desk, reference: Reference, *roles: str) -> None:
    """An array of as many elements as there are roles: to each happens what its role says, and nothing else.

    The last one's number, which is what its SLURM_JOB_ID says, is that of the whole array.
    """
    desk.pace(0.1)
    array = desk.sbatch(
        desk.script(
            ITERATIONS,
            nodes=2,
            gpus=1,
            changes={
                "#SBATCH --output=%x-%j.out": "#SBATCH --output=%x-%A_%a.out\n#SBATCH --array=1-3",
                "--tp 1 --pp 2": "--tp 1 --pp 1",
            },
        )
    )
    elements = {role: f"{array}_{number}" for number, role in enumerate(roles, start=1)}
    for element in elements.values():
        desk.until_committed(element, 2, timeout_s=180)
    assert desk.shown(elements[roles[-1]])["JobId"] == array

    desk.cluster.kill_node(desk.nodes(elements["lost"])[1])
    if "cancelled" in elements:
        assert desk.run("scancel", elements["cancelled"]).returncode == 0
    assert desk.run("scancel", "--batch", "--signal=USR2", elements["warned"]).returncode == 0
    desk.until(lambda: desk.of(elements["lost"], NodeReleased), elements["lost"])
    desk.until(lambda: desk.of(elements["warned"], JobEnded), elements["warned"])
    desk.until(lambda: desk.shown(elements["warned"])["Restarts"] == "1", elements["warned"])
    desk.pace(0.0)

    for role in ("lost", "undisturbed"):
        if role in elements:
            assert desk.wait(elements[role]) == ("COMPLETED", "0:0"), desk.output(elements[role])
            assert desk.shown(elements[role])["Restarts"] == "0"
            assert desk.of(elements[role], JobSignalled) == []
            reference.check(desk.rows("iterations", elements[role]))
    if "cancelled" in elements:
        assert desk.wait(elements["cancelled"])[0] == "CANCELLED"
    done = desk.committed(elements["warned"])
    desk.start_again(elements["warned"])
    assert desk.wait(elements["warned"]) == ("COMPLETED", "0:0"), desk.output(elements["warned"])
    again = f"{elements['warned']}-r1"
    assert desk.status(elements["warned"])["job"] == again, "as typed, it is the newest run"
    reference.check(desk.rows("iterations", again), first=done + 1)
    assert sorted(os.listdir(desk.folder / "home" / "jobs")) == sorted([*elements.values(), again])
    begun = {name: desk.of(name, JobStarted)[0] for name in (*elements.values(), again)}
    assert begun[again].run == begun[elements["warned"]].run, "attempts of one run"
    assert len({each.run for each in begun.values()}) == len(elements)
    for number, role in enumerate(roles, start=1):
        identity = begun[elements[role]].slurm
        assert identity is not None
        assert identity.submitted_at is not None
        assert (identity.array_job, identity.array_task) == (int(array), number)
        assert str(identity.job) == desk.shown(elements[role])["JobId"], "sacct's JobIDRaw"
