"""A device that is slow for a while in a real job of eight workers: noticed, located, reported, worked around."""

from __future__ import annotations

from tests.integration.jobs import UNWATCHED, Job

ONSET, END, ITERATIONS = 30, 45, 60


def test_a_slow_rank_of_a_tensor_parallel_group_is_found_and_worked_around(job: Job) -> None:
    """Its whole chunks take no longer than those of the peers that wait for it (test_stopwatch.py)."""
    for name in UNWATCHED:
        del job.environment[name]
    fault = f"slow:rank=5,speed=0.4@iteration={ONSET},until={END}"
    job.train("--fault", fault, iterations=ITERATIONS, nodes=2, gpus=4, tp=4, pp=1).wait()
    assert job.status == 0, job.stderr
    rows = job.history("iterations")
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))
    assert sum(row["predicted_seconds"] is not None for row in rows) > ITERATIONS / 2
    found = [row for row in job.history("failures") if row["ranks"] == [5]]
    assert len(found) == 1, "it became slow once"
    failure = found[0]
    assert (failure["kind"], failure["component"]) == ("fail-slow", "device")
    assert (failure["node"], failure["device"]) == ("n2", 1)
    noticed = sum(row["finished_at"] <= failure["noticed_at"] for row in rows) - ONSET + 1
    print(f"onset {failure['iteration']}, verdict after {noticed} iterations and {failure['detect_seconds']:.2f} s")
    assert ONSET <= failure["iteration"] <= ONSET + 1
    assert noticed <= 6
    assert 0.3 < failure["speed"] < 0.55
    plans = [row for row in job.history("plans") if row["outcome"] in ("in effect", "superseded")]
    changed = next(plan for plan in plans if plan["epoch"] == failure["recovered_epoch"])
    before, shares = plans[0], [len(share) for share in changed["assignment"]]
    assert 5 in changed["layout"]["standby"] or shares[1] < shares[0], "its replica has less to do, or goes without it"
    probes = job.history("probes")
    assert sum(row["kind"] == "device" for row in probes if row["occasion"] == "start") == 8
    links = [row for row in probes if row["kind"] == "link" and row["occasion"] == "start"]
    assert len(links) == 6, "neighbours within nodes; two between nodes are too few to compare"
    assert any(row["rank"] == 5 and not row["passed"] for row in probes if row["occasion"] == "suspicion")
    if 5 not in changed["layout"]["standby"]:  # standing by, it is measured once a minute
        assert END <= failure["ended_iteration"] <= END + 6
        assert (plans[-1]["layout"], plans[-1]["assignment"]) == (before["layout"], before["assignment"])
