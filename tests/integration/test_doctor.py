"""The doctor on a real Slurm: from the login node, inside of a job, where a node does not share, without answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.cluster import Cluster
from tests.integration.jobs import RESIHP
from tests.integration.slurm_jobs import Desk

MakeCluster = Callable[..., Cluster]


def worst(answer: Any) -> dict[str, str]:
    order = ("ok", "skipped", "warning", "unknown", "failed")
    found: dict[str, str] = {}
    for row in answer["rows"]:
        found[row["check"]] = max(found.get(row["check"], "ok"), row["outcome"], key=order.index)
    return found


def inside(desk: Desk, nodes: int) -> tuple[int, Any]:
    """The doctor's exit code and answer, in a job on so many nodes."""
    command = " ".join(RESIHP)
    script = f"#!/bin/sh\n#SBATCH --no-kill --output=%x-%j.out\n{command} doctor --json > answer\necho $? > status\n"
    job = desk.sbatch(script, f"--nodes={nodes}")
    desk.wait(job)
    status = desk.folder / "status"
    assert status.exists(), desk.output(job)
    return int(status.read_text()), json.loads((desk.folder / "answer").read_text())


def test_from_the_login_node(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, gpus=2)
    desk = Desk(made)
    done = desk.run(*RESIHP, "doctor", "--json")
    answer = json.loads(done.stdout)
    found = worst(answer)
    assert (found["slurm"], found["drain"], found["partition"], found["munge"]) == ("ok", "ok", "ok", "ok")
    assert found["nodes"] == "skipped"
    assert (done.returncode, answer["healthy"]) == (0, True), done.stdout
    texts = {row["check"]: row["text"] for row in answer["rows"]}
    assert "nodes 2 with 2 GPUs; 2 idle" in texts["partition"]
    assert "to start at" in texts["submission"]
    (desk.folder / "resihp.toml").write_text("[slurm]\npartition = 'nowhere'\n")
    done = desk.run(*RESIHP, "doctor", "--json")
    failed = {row["check"]: row["advice"] for row in json.loads(done.stdout)["rows"] if row["outcome"] == "failed"}
    assert set(failed) == {"partition", "submission"}
    assert "sinfo" in failed["submission"]
    (desk.folder / "resihp.toml").unlink()
    made.stop_controller("freeze")
    done = desk.run(*RESIHP, "doctor", "--json", "--timeout", "5s")
    found = worst(json.loads(done.stdout))
    assert (done.returncode, found["slurm"]) == (3, "unknown"), done.stdout
    assert "ok" not in (found["node death"], found["drain"], found["partition"])


def test_inside_of_a_job(cluster: MakeCluster) -> None:
    made = cluster(nodes=3, isolate=True)
    status, answer = inside(Desk(made), 3)
    found = worst(answer)
    assert status == 0, [row for row in answer["rows"] if row["outcome"] not in ("ok", "skipped")]
    assert (found["nodes"], found["shared home"], found["connections"], found["clocks"]) == ("ok", "ok", "ok", "ok")
    texts = {row["check"]: row["text"] for row in answer["rows"]}
    assert "n1, n2, n3" in texts["shared home"]
    assert "the most of 3" in texts["clocks"]


def test_a_node_that_does_not_share(cluster: MakeCluster) -> None:
    made = cluster(nodes=2, isolate=True)
    desk = Desk(made)
    Path(desk.environment["RESIHP_HOME"]).mkdir()
    made.run("mount", "-t", "tmpfs", "tmpfs", desk.environment["RESIHP_HOME"], node="n2")
    status, answer = inside(desk, 2)
    assert status == 3
    assert [row["nodes"] for row in answer["rows"] if row["outcome"] == "failed"] == [["n2"]]
    assert worst(answer)["shared home"] == "failed"


def test_a_user_without_rights(cluster: MakeCluster) -> None:
    made = cluster(nodes=1, isolate=True)
    _, answer = inside(Desk(made, "nobody"), 1)
    found = worst(answer)
    assert (found["slurm"], found["drain"], found["munge"]) == ("ok", "warning", "ok")
    assert (found["nodes"], found["shared home"]) == ("ok", "ok")
