"""The wheel as a site installs it: on its own, away from the repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

import resihp
from tests.integration.cluster import Cluster
from tests.integration.jobs import EXAMPLE, REPOSITORY, TINY
from tests.integration.slurm_jobs import Desk

MakeCluster = Callable[..., Cluster]

NOT_FOR_TRAINING = (
    *("alembic", "jinja2", "llvmlite", "numba", "pandas", "pyarrow", "pydantic", "pydantic_settings", "rich", "scipy"),
    *("sqlalchemy", "submitit", "typer"),
)
"""Dependencies of the commands and the supervisor, which agents and training processes never import."""


def tracked_files(*folders: str) -> list[str]:
    """Return the paths that git tracks below the folders, or below the repository."""
    command = ["git", "ls-files", "-z", *folders]
    answer = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return answer.stdout.split("\0")[:-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a clone with this checkout's changes."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, source], check=True)
    for name in tracked_files():
        (source / name).unlink(missing_ok=True)
        if (REPOSITORY / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def installed(wheel: Path, folder: Path, without: Collection[str] = ()) -> Path:
    """Install the wheel in an environment that has what the tests' own has, except for the packages `without`; return
    its `bin`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.partition(".")[0] not in without:
            (dependencies / entry.name).symlink_to(entry)
    # A path file in a folder that a path file names is not read: so the checkout's installation is not found.
    (packages / "needed.pth").write_text(f"{dependencies}\n")
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, stderr=subprocess.PIPE)
    return folder / "bin"


def test_the_wheel_has_one_name_and_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"resihp"}
    folders = ("resihp", "db", "slurm", "wrapper")
    sources = [name for name in tracked_files(*folders) if not (REPOSITORY / name).is_symlink()]
    expected = {name if name.startswith("resihp/") else f"resihp/{name}" for name in sources}
    assert expected - names == {"resihp/db/migrations/script.py.mako"}, "that one is for developers"


def test_the_version_names_the_commit() -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    build = "from setuptools_scm import get_version; print(get_version())"
    done = subprocess.run([sys.executable, "-c", build], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    version, _, local = done.stdout.strip().partition("+")
    assert version.startswith("0.")
    assert commit.stdout.startswith(local.split(".")[0].removeprefix("g"))
    assert resihp.__version__.startswith("0.")


def test_a_first_job_from_init_to_report(wheel: Path, cluster: MakeCluster, tmp_path: Path) -> None:
    commands = installed(wheel, tmp_path / "site")
    on = cluster(nodes=2, gpus=2)
    desk = Desk(on, forks=False, PATH=f"{commands}:{on.environment['PATH']}")
    where = desk.run("python", "-P", "-c", "import resihp; print(resihp.__file__)")
    assert Path(where.stdout).is_relative_to(tmp_path), where.stderr
    training = ["python", str(EXAMPLE), *TINY, "--iterations", "3"]
    assert desk.run("resihp", "init", "--time", "20m", "--", *training).returncode == 0
    submitted = desk.run("resihp", "submit", "job.toml")
    assert submitted.returncode == 0, submitted.stderr
    (job,) = desk.run("squeue", "-h", "-o", "%A").stdout.split()
    assert desk.wait(job) == ("COMPLETED", "0:0"), desk.output(job)
    status = json.loads(desk.run("resihp", "status", job, "--json").stdout)
    assert status["iteration"] == 3
    assert "completed" in desk.run("resihp", "jobs").stdout
    iterations = json.loads(desk.run("resihp", "history", "iterations", job, "--json").stdout)
    assert [row["iteration"] for row in iterations["rows"]] == [1, 2, 3]
    report = desk.run("resihp", "report", job, "-o", "report.html")
    assert report.returncode == 0, report.stderr
    assert (desk.folder / "report.html").stat().st_size > 10_000


def test_training_needs_no_more_than_msgspec_and_psutil(wheel: Path, tmp_path: Path) -> None:
    """Beside torch: a training environment takes resihp without its other dependencies."""
    site, training = installed(wheel, tmp_path / "site"), installed(wheel, tmp_path / "training", NOT_FOR_TRAINING)
    for name in NOT_FOR_TRAINING:
        code = f"import importlib.util as u; assert u.find_spec({name!r}) is None"
        subprocess.run([training / "python", "-c", code], check=True)
    subprocess.run([training / "python", "-P", "-c", "import resihp.wrapper.agent.process"], check=True, cwd=tmp_path)
    command = [site / "resihp", "run", "--local", "--nodes", "2", "--gpus-per-node", "1", "--pp", "2", "--"]
    done = subprocess.run(
        [*command, training / "python", EXAMPLE, *TINY, "--iterations", "3"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RESIHP_LOCAL": str(tmp_path / "local")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
