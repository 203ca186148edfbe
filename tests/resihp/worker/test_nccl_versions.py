"""Which NCCL is called: found out with libraries that know their version and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.worker import nccl_versions

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
LOOK_SCRIPT = """
import ctypes, json, os, sys
from types import SimpleNamespace
built = SimpleNamespace(version=lambda: (2, 28, 9))
# The installed torch may load an NCCL of its own.
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(nccl=built))
for path in sys.argv[1:]:
    ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
from resihp.worker import nccl_versions
print(json.dumps([nccl_versions.loaded(), nccl_versions.files()]))
"""


def library(folder: Path, code: int) -> str:
    folder.mkdir(parents=True)
    source, built = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {code}; return 0; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", built, source], check=True)
    return str(built)


def look(*paths: str, preload: str = "") -> tuple[list[int] | None, list[str]]:
    environment = os.environ | ({"LD_PRELOAD": preload} if preload else {})
    command = [sys.executable, "-W", "ignore", "-c", LOOK_SCRIPT, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    version, files = json.loads(done.stdout)
    return version, files


@needs_compiler
def test_a_preloaded_library_is_the_one_that_is_asked(tmp_path: Path) -> None:
    path = library(tmp_path / "site", 23007)
    assert look(preload=path) == ([2, 30, 7], [path])


@needs_compiler
def test_a_library_that_torch_has_loaded_for_itself_is_asked(tmp_path: Path) -> None:
    path = library(tmp_path / "torch", 22602)
    assert look(path) == ([2, 26, 2], [path])


@needs_compiler
def test_two_libraries_in_one_process_are_both_named(tmp_path: Path) -> None:
    first, other = library(tmp_path / "a", 23007), library(tmp_path / "b", 22809)
    shutil.move(other, path := str(tmp_path / "b" / "libnccl.so.2.28.9"))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, tmp_path / "b" / "nccl.c"], check=True)
    version, files = look(path, preload=first)
    assert (version, files) == ([2, 30, 7], [first, path])
    told = nccl_versions.doubt(tuple(version or ()), files)
    assert told == f"2 NCCL libraries are loaded in one process: {first}, {path}; calls reach 2.30.7"


def test_where_torch_has_nccl_inside_it_is_the_one_that_torch_was_compiled_with() -> None:
    assert look() == ([2, 28, 9], [])


@pytest.mark.parametrize(("code", "version"), [(2804, (2, 8, 4)), (20905, (2, 9, 5)), (23007, (2, 30, 7))])
def test_codes_of_versions(code: int, version: tuple[int, ...]) -> None:
    assert nccl_versions._decoded(code) == version
