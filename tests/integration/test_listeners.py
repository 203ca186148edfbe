"""A job that loses a worker, with somebody listening on every way there is, one of them hung."""

from __future__ import annotations

import json
import socket
import urllib.request
from typing import Any

import pytest

from tests.integration.jobs import Job
from tests.wrapper.sinks.test_metrics import free_port, samples


def test_a_job_that_is_listened_to(job: Job) -> None:
    port = free_port()
    got = job.folder / "got"
    scraped: list[dict[Any, float]] = []
    with socket.create_server(("127.0.0.1", 0), backlog=50) as hung:  # takes connections, says nothing
        job.environment |= {
            "RESIHP_METRICS__PORT": str(port),
            "RESIHP_METRICS__TEXTFILE": str(job.folder / "{job}.prom"),
            "RESIHP_HOOKS__WEBHOOK": f"http://127.0.0.1:{hung.getsockname()[1]}/SECRET",
            "RESIHP_HOOKS__COMMAND": json.dumps(["/bin/sh", "-c", f"cat >> {got}"]),
            "RESIHP_HOOKS__EVENTS": '["failure", "plan", "recovery", "end"]',
        }
        job.train("--fault", "kill:rank=1@iteration=5", iterations=12, nodes=1, gpus=2, tp=1, pp=1)

        def trains() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    scraped.append(samples(answer.read()))
            except OSError:
                return False  # not yet
            return scraped[-1]["resihp_iteration",] >= 1

        job.until(trains, timeout_s=150)
        assert job.wait().status == 0, job.stderr
    state = job.ask("status")
    found = samples((job.folder / "local-1.prom").read_bytes())
    assert found["resihp_iterations_total",] == 12
    assert found["resihp_failures_total", "component=device", "kind=fail-stop", "node=n1"] == 1
    assert found["resihp_goodput_ratio",] == pytest.approx(state["goodput"], rel=1e-4)
    assert found["resihp_ranks", "state=suspected"] == 0
    told = [json.loads(line) for line in got.read_text().splitlines()]
    assert [each["kind"] for each in told if each["kind"] != "plan"] == ["failure", "recovery", "end"]
    assert told[-1]["ids"]["exit_code"] == 0
    assert "hook webhook: " in job.stderr
    everything = [job.stdout, job.stderr, *(p.read_text(errors="replace") for p in job.folder.rglob("*.log"))]
    assert not [text for text in everything if "SECRET" in text]
    configuration = (job.folder / "home" / "jobs" / "local-1" / "journal").read_bytes()
    assert b"SECRET" not in configuration
