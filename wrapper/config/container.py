"""Containers: the command line that starts a program of ours inside a container. Pure; this module runs nothing.

Only the fork server runs inside, and with it all workers, because it needs the user's libraries. Supervisor and agents
stay on the host, where Slurm's commands are. Runtimes pass on standard input, output and error, and differ in
everything else: enroot closes all other descriptors (enroot-switchroot calls closefrom(3)), and apptainer puts a
process of its own between the program and us. So a program inside gets its socket as standard input, and does not check
its parent process. Both runtimes keep the host's process ids, unless a site forces PID namespaces (apptainer --pid,
ENROOT_UNSHARE_PID), which is not supported.

Pyxis is a plugin of srun, and its options apply only to programs that srun itself starts. Workers are not started by
srun; but pyxis runs enroot with the same images, and so does this module.

Sources: enroot 3.5 and later (`src/runtime.sh`, `bin/enroot-switchroot.c`, `doc/cmd/start.md`), apptainer 1.x
(`cmd/starter/c/starter.c`: it leaves inherited descriptors alone).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from resihp.errors import ConfigurationError
from resihp.wrapper.config.run_spec import Container
from resihp.wrapper.config.values import expanded

if TYPE_CHECKING:  # agents never check a configuration, and start faster without this import
    from resihp.wrapper.config.schema import ContainerSection

IMAGE_SUFFIXES = {"apptainer": (".sif", ".img", ".sqsh", ".squashfs"), "enroot": (".sqsh", ".squashfs")}

PLACE_VARIABLES = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LIBRARY_PATH",
    "CPATH",
    "MANPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "CUDA_HOME",
    "CUDA_PATH",
    "SHELL",
    "HOME",
    "TMPDIR",
)
"""Environment variables that contain paths. Workers get the container's values of these variables, and the host's
values of all others."""


def check(section: ContainerSection) -> Container | None:
    """Return the configured container; None if none is configured. Raises ConfigurationError for a container that
    cannot start."""
    if not section.runtime:
        if section.image or section.mounts:
            raise ConfigurationError("[container]: no runtime is set; set it to apptainer, enroot or pyxis")
        return None
    runtime: Literal["apptainer", "enroot"] = "apptainer" if section.runtime == "apptainer" else "enroot"
    image = expanded(section.image)
    if not section.image:
        raise ConfigurationError("[container]: no image is set; name a file that all nodes can read")
    if "://" in section.image or (not image.exists() and "#" in section.image):
        imported = "apptainer pull image.sif" if runtime == "apptainer" else "enroot import -o image.sqsh"
        raise ConfigurationError(
            f"[container] image: {section.image} is in a registry, and each node would fetch it at every start; "
            f"run {imported} {section.image}, and name that file"
        )
    if not image.exists() or (image.is_file() and image.suffix not in IMAGE_SUFFIXES[runtime]):
        problem = "does not exist" if not image.exists() else f"does not end in {' or '.join(IMAGE_SUFFIXES[runtime])}"
        raise ConfigurationError(f"[container] image: {image} {problem}; name a file that all nodes can read")
    if image.is_dir() and runtime == "enroot":
        raise ConfigurationError(f"[container] image: {image} is a folder; enroot starts .sqsh files")
    mounts = tuple(_parsed(text) for text in section.mounts)
    return Container(runtime=runtime, image=str(image.absolute()), mounts=mounts)


def with_folders(container: Container | None, folders: Iterable[Path]) -> Container | None:
    """Return the container with these folders added to its mounts, at the same paths inside as outside. A folder is not
    added if something else is mounted at its path.

    Raises ConfigurationError for a name that no runtime can mount.
    """
    if container is None:
        return None
    mounts = {destination: (source, destination, read_only) for source, destination, read_only in container.mounts}
    for folder in folders:
        path = str(folder)
        odd = next((character for character in path if character in ":," or character.isspace()), None)
        if odd is not None:
            raise ConfigurationError(f"{path}: cannot be mounted in a container, because its name contains {odd!r}")
        mounts.setdefault(path, (path, path, False))
    return msgspec.structs.replace(container, mounts=tuple(mounts.values()))


def _parsed(mount: str) -> tuple[str, str, bool]:
    source, _, rest = mount.partition(":")
    destination, _, mode = rest.partition(":")
    return source, destination or source, mode == "ro"


def wrap(container: Container | None, argv: Sequence[str], exported: Iterable[str] = ()) -> list[str]:
    """Return the command line that runs `argv` inside the container; `argv` itself without a container.

    `exported`: names of our environment variables that the command line must set inside, because enroot passes none on.
    """
    if container is None:
        return list(argv)
    if container.runtime == "apptainer":
        options = ["exec", "--nv", "--pwd", "/"]
        for source, destination, read_only in container.mounts:
            options += ["--bind", f"{source}:{destination}:{'ro' if read_only else 'rw'}"]
        return ["apptainer", "--silent", *options, container.image, *argv]
    options = ["start"]
    for source, destination, read_only in container.mounts:
        flags = "x-create=auto,rbind" + (",ro" if read_only else "")
        options += ["--mount", f"{source}:{destination}:none:{flags}"]
    for name in (*exported, "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"):
        options += ["--env", name]
    return ["enroot", *options, container.image, *argv]


def environment(container: Container | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for the command from `wrap`. It includes the variables that enroot's hook needs to show
    GPUs to the container."""
    if container is None or container.runtime == "apptainer":
        return dict(given)
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility", **given}


def of_workers(container: Container | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the workers: ours; in a container, without the variables that contain paths of the
    host."""
    if container is None:
        return dict(environment)
    return {name: value for name, value in environment.items() if name not in PLACE_VARIABLES}


def job_folders(cwd: str, folder: Path, checkpoints: Path, python_path: str) -> list[Path]:
    """Return the folders that workers open: the working folder, the job's folder, checkpoints, and the entries of
    PYTHONPATH."""
    entries = [Path(entry) for entry in python_path.split(os.pathsep) if entry and Path(entry).is_dir()]
    return list(dict.fromkeys([Path(cwd), folder, checkpoints, *entries]))
