"""Checks of `resihp doctor` on the training libraries: torch, its back ends, NCCL and megatron-core.

torch is imported in a separate process, which takes seconds and may crash if a driver is broken. Each fault is reported
in a separate line; a fault that would end a job at its start is `failed`. Uses `resihp.wrapper.commands.doctor.machine`
for results and for running processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

import msgspec

from resihp.words import count_of
from resihp.worker import nccl_versions, torch_versions
from resihp.wrapper.commands.doctor import machine
from resihp.wrapper.commands.doctor.machine import CheckResult, Outcome

TORCH_QUESTION = """
import json, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import torch, torch.distributed as dist
    version = torch.__version__
    del warned[:]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
from resihp.worker import nccl_versions
print(json.dumps({
    "version": version, "cuda": torch.version.cuda, "gpus": gpus,
    "warnings": [str(warning.message).splitlines()[0] for warning in warned],
    "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(),
    "nccl_version": nccl_versions.loaded(), "nccl_files": nccl_versions.files(),
}))
"""
INSTALL_COMMAND = "pip install 'resihp[train]'"
MAX_LINE_CHARACTERS = 200


class TorchAnswer(msgspec.Struct, frozen=True):
    """The facts that torch reports about itself. `gpus`: number of GPUs that torch can use.

    `warnings`: the first line of each of torch's warnings about GPUs. `nccl_version`: version of the NCCL library that
    calls reach. `nccl_files`: library files of NCCL that are mapped into the process.
    """

    version: str
    gpus: int
    gloo: bool
    nccl: bool
    cuda: str | None = None
    nccl_version: tuple[int, ...] | None = None
    nccl_files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def torch() -> Iterator[CheckResult]:
    """Yield a result for each fault, or, without faults, one that names the versions."""
    if installed("torch") is None:
        text = f"not in {sys.prefix}: commands of any kind run, scripts that use resihp.Trainer need another Python"
        yield CheckResult(check="torch", outcome="warning", text=text, advice=INSTALL_COMMAND)
        return
    answer = ask()
    if isinstance(answer, CheckResult):
        yield answer
        return
    ways = ["gloo"] * answer.gloo
    if answer.nccl and answer.nccl_version:
        ways.append(f"NCCL {nccl_versions.shown(answer.nccl_version)}")
    core = installed("megatron-core")
    text = f"{answer.version}, {', '.join(ways) or 'no back end'}, megatron-core {core or 'missing'}"
    faults = [*of_versions(answer, core), *of_back_ends(answer), *of_gpus(answer)]
    if not faults:
        yield CheckResult(check="torch", outcome="ok", text=text)
    for outcome, fault, advice in faults:
        yield CheckResult(check="torch", outcome=outcome, text=f"{text}; {fault}", advice=advice)


def installed(package: str) -> str | None:
    """Return the installed version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ask() -> TorchAnswer | CheckResult:
    """Return the facts from torch, which is imported in a separate process; or the result that it cannot be
    imported."""
    done = machine.run_command([sys.executable, "-P", "-W", "ignore", "-c", TORCH_QUESTION])
    if not isinstance(done, str) and done.returncode == 0:
        return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), TorchAnswer)
    outcome: Outcome = "unknown"
    why = done if isinstance(done, str) else ""
    if not isinstance(done, str):
        outcome = "failed"
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:MAX_LINE_CHARACTERS]
    advice = f"{sys.executable} -c 'import torch' shows more"
    return CheckResult(check="torch", outcome=outcome, text=f"cannot be imported: {why}", advice=advice)


Fault = tuple[Outcome, str, str]
"""Severity, description, and the command to type."""


def of_versions(answer: TorchAnswer, core: str | None) -> Iterator[Fault]:
    """Yield faults in the versions of torch and megatron-core."""
    if refusal := torch_versions.refusal(answer.version):
        yield "failed", refusal, torch_versions.UPGRADE_COMMAND
    if core is None:
        yield "warning", "resihp.Trainer needs megatron-core", INSTALL_COMMAND
    elif (wanted := requirement("megatron-core")) and not allows(wanted, core):
        yield "failed", f"resihp needs megatron-core{wanted}", f"pip install 'megatron-core{wanted}'"


def of_back_ends(answer: TorchAnswer) -> Iterator[Fault]:
    """Yield faults in the libraries by which processes communicate."""
    if not answer.gloo and not answer.nccl:
        yield "failed", "processes cannot communicate", "install a build of torch with distributed"
    version = answer.nccl_version if answer.nccl else None
    if version and (doubt := nccl_versions.doubt(version, answer.nccl_files)):
        yield "warning", doubt, nccl_versions.UPGRADE_ADVICE


def of_gpus(answer: TorchAnswer) -> Iterator[Fault]:
    """Yield faults that keep torch from using this machine's GPUs, or some features of them."""
    present = len(list(machine.VISIBLE_DEVICES.glob("nvidia[0-9]*")))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    if not answer.gpus and present and not hidden:
        detail = "" if answer.cuda else ", it is a build for CPUs"
        detail = f": {answer.warnings[0][:MAX_LINE_CHARACTERS]}" if answer.warnings else detail
        advice = "install torch for your CUDA: pytorch.org"
        if any("too old" in line for line in answer.warnings):
            advice = "install a newer driver, or a torch for an older CUDA: pytorch.org"
        yield "failed", f"it sees none of {count_of(present, 'GPU')} here{detail}", advice
    if not answer.gpus:
        return
    if not answer.nccl:
        advice = "install a build of torch with NCCL: pytorch.org; RESIHP_BACKEND=gloo trains slowly"
        yield "failed", "it is built without NCCL, which GPUs use to communicate", advice
    refusal = torch_versions.refusal_of_bf16(answer.version)
    if reason := refusal or torch_versions.doubt(answer.version):
        yield "warning", reason, torch_versions.UPGRADE_COMMAND
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        fault = "no C compiler, which fused kernels need (bias_activation_fusion, torch.compile)"
        yield "warning", fault, "apt-get install gcc, or name one in CC; CUDA's nvcc is not needed"


def requirement(package: str) -> str:
    """Return the versions of a package that resihp's metadata allows, such as `>=0.16.1,<0.20`; empty if any version is
    allowed."""
    try:
        requirements = metadata.requires("resihp") or []
    except metadata.PackageNotFoundError:
        return ""
    for line in requirements:
        if match := re.match(rf"{re.escape(package)}\s*([<>=][^;]*)", line):
            bounds = sorted((bound.strip() for bound in match[1].split(",")), reverse=True)
            return ",".join(bounds)
    return ""


def allows(bounds: str, version: str) -> bool:
    """Return whether a version lies within bounds such as `>=0.16.1,<0.20`. Only `>=` and `<` are supported."""
    numbers = machine.numbers(version)
    for bound in bounds.split(","):
        if bound.startswith(">=") and numbers < machine.numbers(bound[2:]):
            return False
        if bound.startswith("<") and numbers >= machine.numbers(bound[1:]):
            return False
    return True
