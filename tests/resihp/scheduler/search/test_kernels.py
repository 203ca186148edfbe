"""Inner loops of the search: what the timeline says, for any pipeline, compiled or not, and no bound above it."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.parallelism.layout import Layout
from resihp.parallelism.plan import Order, Plan, Primitive, Stop
from resihp.pipeline.compiled import PRIMITIVE_KINDS
from resihp.pipeline.schedules import orders_of
from resihp.pipeline.timeline import Orders, play
from resihp.scheduler.search.kernels import compilation
from resihp.scheduler.search.kernels.compilation import machine_code
from resihp.scheduler.search.kernels.own_orders import schedule_lower_bound, schedule_pipeline, write_limits
from resihp.scheduler.search.kernels.pipeline_times import play_lower_bound, play_pipeline

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 40), st.booleans(), st.integers(0, 1_000_000))


class Pipeline:
    """Stages at random times, one in four of them without any."""

    def __init__(self, stages: int, count: int, split: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.stages, self.count, self.split = stages, count, split
        self.f, self.b, self.w = (rng.uniform(0.1, 3.0, stages) for _ in range(3))
        self.late = rng.uniform(0.0, 2.0, stages) * (rng.random() < 0.75)
        self.late[-1] = 0.0
        self.plan = Plan(
            epoch=1,
            layout=Layout.uniform(tp=1, pp=stages, dp=1, layers=stages),
            assignment=(tuple(range(count)),),
            schedule="zero-bubble" if split else "1f1b",
        )

    @property
    def told(self) -> tuple[Any, ...]:
        """As the kernels take it."""
        b = self.b if self.split else self.b + self.w
        return self.stages, self.count, self.f, b, self.w, self.late, self.split

    def seconds(self, orders: Orders) -> float:
        def cost(stop: Stop, primitive: Primitive) -> float:
            s = stop.stage
            whole = self.b[s] if self.split else self.b[s] + self.w[s]
            return float({"F": self.f[s], "B": whole, "W": self.w[s]}[primitive.kind])

        def late(sender: Stop, receiver: Stop) -> float:
            return float(self.late[min(sender.stage, receiver.stage)])

        return play(self.plan, orders, cost, late).makespan


@settings(max_examples=60, deadline=None)
@given(SHAPES)
def test_a_pipeline_takes_what_the_timeline_says(shape: tuple[int, int, bool, int]) -> None:
    pipeline = Pipeline(*shape)
    expected = pipeline.seconds(orders_of(pipeline.plan))
    assert play_pipeline(*pipeline.told) == pytest.approx(expected, rel=1e-12)
    assert play_lower_bound(*pipeline.told) <= expected * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(-1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 6))
def test_orders_that_are_made_take_no_longer_than_is_said_and_keep_to_memory(
    shape: tuple[int, int, bool, int], further: int, patience: float, most: int
) -> None:
    pipeline = Pipeline(*shape)
    stages, count, split = pipeline.stages, pipeline.count, pipeline.split
    limits, caps = np.empty(stages, np.int64), np.full(stages, most)
    write_limits(stages, count, further, limits)
    rows = np.empty((stages, count * (3 if split else 2)), np.int64)
    seconds = schedule_pipeline(*pipeline.told, limits, caps, patience, math.inf, rows)
    lanes: tuple[Order, ...] = tuple(
        tuple(Primitive(PRIMITIVE_KINDS[at % 3], at // 3) for at in row) for row in rows.tolist()
    )
    assert pipeline.seconds((lanes,)) <= seconds * (1 + 1e-12)
    assert schedule_lower_bound(*pipeline.told) <= seconds * (1 + 1e-12)
    for order in lanes:
        alive = 0
        for primitive in order:
            alive += {"F": 1, "B": 0 if split else -1, "W": -1}[primitive.kind]
            assert alive <= most


@pytest.mark.parametrize("split", [False, True])
def test_without_numba_the_numbers_are_the_same(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(5, 9, split, 7)
    compiled = play_pipeline(*pipeline.told)
    monkeypatch.setitem(sys.modules, "numba", None)
    plain = machine_code(getattr(play_pipeline, "py_func", play_pipeline))
    assert plain(*pipeline.told) == compiled


def test_numba_is_loaded_by_a_search_alone() -> None:
    probe = "import sys, resihp.wrapper.cli, resihp.scheduler, resihp.controller; print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_where_nothing_can_be_written_kernels_work_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caching = pytest.importorskip("numba.core.caching")

    def nowhere(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(caching.FunctionCache, "__init__", nowhere)
    double = machine_code(lambda x: 2.0 * x)
    assert math.isclose(double(1.5), 3.0)


def twice(x: float) -> float:
    return 2.0 * x


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_a_cache_that_a_crash_left_half_is_compiled_anew(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert math.isclose(machine_code(twice)(1.5), 3.0)
    (kept,) = tmp_path.rglob(f"*.{kind}")
    kept.write_bytes(b"")
    assert math.isclose(machine_code(twice)(1.5), 3.0)
    assert kept.stat().st_size > 0


def test_machine_code_is_compiled_anew_when_another_file_of_its_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It contains the functions that it calls, and their constants."""
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    machine_code(twice)(1.5)
    again: Any = machine_code(twice)
    again(1.5)
    assert again.stats.cache_hits
    monkeypatch.setattr(compilation, "_stamp_of_the_folder", lambda: "changed")
    changed: Any = machine_code(twice)
    changed(1.5)
    assert not changed.stats.cache_hits


def test_a_disk_that_is_full_keeps_nobody_from_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    caching = pytest.importorskip("numba.core.caching")

    def write(self: object, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", write)
    assert math.isclose(machine_code(twice)(1.5), 3.0)


YAML = """
def safe_load(file):
    return dict(line.strip().split(": ") for line in file if ": " in line)
"""
"""So much of PyYAML as numba asks for; most that train have it, and our tests do not."""


@pytest.mark.parametrize("settings", ["cache_dir: {}\n", "broken"])
def test_current_folder_does_not_say_where_machine_code_is_found(tmp_path: Path, settings: str) -> None:
    """It would be unpickled: whoever called `resihp plan` in a folder of somebody else's ran what was put there."""
    evil, folder, packages = tmp_path / "evil", tmp_path / "folder", tmp_path / "packages"
    for path in (evil, folder, packages):
        path.mkdir()
    broken = "def safe_load(file):\n    raise ValueError('no settings')\n"
    (packages / "yaml.py").write_text(broken if settings == "broken" else YAML)
    (folder / ".numba_config.yaml").write_text(settings.format(evil))
    code = (
        f"import sys; sys.path.append({str(packages)!r}); import numpy as np\n"
        "from resihp.scheduler.search.kernels.pipeline_times import play_pipeline\n"
        "one = np.ones(2)\n"
        "print(play_pipeline(2, 4, one, one, one, np.zeros(2), False))\n"
        "import os; assert 'NUMBA_CACHE_DIR' not in os.environ\n"
    )
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    root = str(Path(__file__).parents[4])
    done = subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(evil.iterdir())
