"""Containers: which are refused, what is written in front of a command, and workers that run behind such a front.

The runtimes are pretended by scripts that do to descriptors, environment and process ids what the real ones do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from resihp.errors import ConfigurationError
from resihp.wrapper.config import container
from resihp.wrapper.config.run_spec import Container
from resihp.wrapper.config.schema import ContainerSection
from tests.waiting import gone
from tests.wrapper.conftest import SOON, StubJob
from tests.wrapper.test_processes import FOREVER, exits, running

COMMAND = ["python3", "-P", "-m", "resihp.worker.forkserver"]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image.sif"
    path.write_bytes(b"")
    (tmp_path / "image.sqsh").write_bytes(b"")
    return path


def test_without_a_container_nothing_changes() -> None:
    assert container.check(ContainerSection()) is None
    assert container.with_folders(None, [Path("/odd name")]) is None
    assert container.wrap(None, COMMAND) == COMMAND
    assert container.environment(None, {"A": "1"}) == {"A": "1"}
    assert container.of_workers(None, {"PATH": "/bin"}) == {"PATH": "/bin"}


def test_apptainer_runs_the_command_with_the_jobs_folders(image: Path) -> None:
    section = ContainerSection(runtime="apptainer", image=str(image), mounts=("/data:/mnt:ro", "/scratch"))
    made = container.with_folders(container.check(section), [Path("/home/me"), Path("/scratch")])
    assert container.wrap(made, COMMAND, ["OMP_NUM_THREADS"]) == [
        *["apptainer", "--silent", "exec", "--nv", "--pwd", "/"],
        *["--bind", "/data:/mnt:ro", "--bind", "/scratch:/scratch:rw", "--bind", "/home/me:/home/me:rw"],
        str(image),
        *COMMAND,
    ]


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
def test_pyxis_images_are_started_by_enroot_itself(image: Path, runtime: Any) -> None:
    section = ContainerSection(runtime=runtime, image=str(image.with_suffix(".sqsh")), mounts=("/data:/mnt:ro",))
    made = container.with_folders(container.check(section), [Path("/home/me")])
    assert container.wrap(made, COMMAND, ["OMP_NUM_THREADS"]) == [
        *["enroot", "start"],
        *["--mount", "/data:/mnt:none:x-create=auto,rbind,ro"],
        *["--mount", "/home/me:/home/me:none:x-create=auto,rbind"],
        *["--env", "OMP_NUM_THREADS", "--env", "NVIDIA_VISIBLE_DEVICES", "--env", "NVIDIA_DRIVER_CAPABILITIES"],
        str(image.with_suffix(".sqsh")),
        *COMMAND,
    ]
    assert container.environment(made, {"A": "1"})["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert container.environment(made, {"NVIDIA_VISIBLE_DEVICES": "none"})["NVIDIA_VISIBLE_DEVICES"] == "none"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"image": "x.sif"}, "no runtime is set; set it to apptainer, enroot or pyxis"),
        ({"runtime": "apptainer"}, "no image is set"),
        ({"runtime": "apptainer", "image": "gone.sif"}, "gone.sif does not exist; name a file that all nodes can read"),
        ({"runtime": "enroot", "image": "image.sif"}, r"image.sif does not end in \.sqsh or \.squashfs"),
        ({"runtime": "enroot", "image": "."}, "is a folder; enroot starts .sqsh files"),
        ({"runtime": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.01-py3"}, "run enroot import -o image.sqsh nvcr.io#"),
        ({"runtime": "apptainer", "image": "docker://ubuntu"}, "run apptainer pull image.sif docker://ubuntu"),
    ],
)
def test_containers_that_cannot_be_started_are_refused(
    image: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(image.parent)
    with pytest.raises(ConfigurationError, match=message):
        container.check(ContainerSection(**section))


def test_folder_that_no_runtime_can_mount_is_refused(image: Path) -> None:
    made = container.check(ContainerSection(runtime="apptainer", image=str(image)))
    with pytest.raises(ConfigurationError, match=r"/my files: cannot be mounted in a container, because .* ' '"):
        container.with_folders(made, [Path("/my files")])


def test_workers_are_told_what_the_host_knows_but_not_its_places() -> None:
    made = Container(runtime="apptainer", image="/i.sif", mounts=())
    assert container.of_workers(made, {"PATH": "/host", "WANDB_MODE": "offline"}) == {"WANDB_MODE": "offline"}


def test_folders_of_the_job_are_those_that_its_workers_open(tmp_path: Path) -> None:
    (tmp_path / "libraries").mkdir()
    path = f"{tmp_path}/libraries:{tmp_path}/gone"
    assert container.job_folders("/home", tmp_path, Path("/home"), path) == [
        Path("/home"),
        tmp_path,
        tmp_path / "libraries",
    ]


# --- workers inside -----------------------------------------------------------------------------------------------

APPTAINER = """
import os, sys
arguments = sys.argv[1:]
command = arguments[arguments.index('{image}') + 1:]
assert '--nv' in arguments
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]) & 255)
os.environ.update(PATH='/image/bin', LD_LIBRARY_PATH='/image/lib')
os.chdir('/')
os.execv(command[0], command)
"""
ENROOT = """
import os, sys
arguments = sys.argv[1:]
command = arguments[arguments.index('{image}') + 1:]
exported = [name for option, name in zip(arguments, arguments[1:]) if option == '--env']
os.closerange(3, 4096)
inside = {{name: os.environ[name] for name in exported}} | {{'PATH': '/image/bin', 'LD_LIBRARY_PATH': '/image/lib'}}
os.execve(command[0], command, inside)
"""
SCRIPT = (
    "import os\n"
    "names = ('PATH', 'LD_LIBRARY_PATH', 'OMP_NUM_THREADS', 'WANDB_MODE', 'RANK')\n"
    "print(*[os.environ.get(name) for name in names], os.getcwd())\n"
    "print(repr(open(0).read()))\n"
)


@pytest.fixture(params=["apptainer", "enroot"])
def inside(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    """A container of each kind, whose runtime is pretended."""
    image = "/images/image"
    source = {"apptainer": APPTAINER, "enroot": ENROOT}[request.param].format(image=image)
    runtime = tmp_path / "bin" / request.param
    runtime.parent.mkdir()
    runtime.write_text(f"#!{sys.executable}\n{source}")
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", str(runtime.parent), prepend=os.pathsep)
    return Container(runtime=request.param, image=image, mounts=((str(tmp_path), str(tmp_path), False),))


def test_workers_run_in_the_container(stub_job: StubJob, inside: Container) -> None:
    stub_job.start(SCRIPT, gpus=2, container=inside, environment={"WANDB_MODE": "offline"})
    assert stub_job.wait() == 0, stub_job.stderr + stub_job.log("n1.forkserver.log")
    assert stub_job.log("n1.rank1.log") == f"/image/bin /image/lib 1 offline 1 {stub_job.folder}\n''\n"
    assert exits(stub_job) == {0: 0, 1: 0}


def test_what_is_inside_ends_with_the_agent_outside(stub_job: StubJob, inside: Container) -> None:
    """It is the runtime's child, or has its parent's number but not its death signal: the socket's end tells it."""
    stub_job.start(FOREVER, nodes=2, container=inside, environment=SOON)
    workers = running(stub_job, 2)
    (agent,) = stub_job.processes("resihp.wrapper.agent.process --run " + str(stub_job.job.run_file) + " --node n2")
    (worker,) = [each.pid for each in workers if each.node == "n2"]
    agent.kill()
    stub_job.until(lambda: gone(worker))
    assert stub_job.wait() != 0
