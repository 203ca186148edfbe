"""What a worker tells of what it trains with: versions, and the commit that git would tell, without git."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from resihp.executor.versions import commit_of, software

ONE, TWO = "1" * 40, "2" * 40


def git(folder: Path, *argv: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, *argv], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts" / "train.py").write_text("pass\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def test_versions_are_those_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "gone.py")])
    found = software()
    assert (found.torch, found.cuda) == (torch.__version__, torch.version.cuda or "")
    assert found.megatron_core == metadata.version("megatron-core")
    assert found.script_commit == ""


def test_the_scripts_commit_is_what_git_says(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    script = repository / "scripts" / "train.py"
    assert software(script).script_commit == commit
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert software().script_commit == commit
    git(repository, "pack-refs", "--all")
    assert software(script).script_commit == commit
    git(repository, "tag", "-a", "v1", "-m", "one")
    git(repository, "checkout", "-q", "--detach", "v1")
    assert software(script).script_commit == commit


def test_of_work_trees_and_links_to_scripts(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "two")
    commit = git(tmp_path / "tree", "rev-parse", "HEAD")
    assert commit != git(repository, "rev-parse", "HEAD")
    assert commit_of(tmp_path / "tree" / "scripts") == commit
    git(repository, "pack-refs", "--all")
    assert commit_of(tmp_path / "tree" / "scripts") == commit
    (tmp_path / "link").symlink_to(repository / "scripts")
    assert commit_of(tmp_path / "link") == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({}, ""),
        ({"HEAD": ONE}, ONE),
        ({"HEAD": "ref: refs/heads/a"}, ""),
        ({"HEAD": "ref: refs/heads/a", "packed-refs": f"# pack-refs with: peeled\n{TWO} refs/heads/ab\n^{ONE}\n"}, ""),
        ({"HEAD": "ref: refs/heads/a", "packed-refs": f"{TWO} refs/heads/ab\n{ONE} refs/heads/a\n"}, ONE),
        ({"HEAD": "ref: refs/heads/a", "packed-refs": f"{TWO} refs/heads/a\n", "refs/heads/a": ONE + "\n"}, ONE),
        ({"HEAD": "ref: refs/heads/a", "refs/heads/a": "secret"}, ""),
        ({"HEAD": "ref: ../../outside"}, ""),
        ({"HEAD": "ref: \0"}, ""),
        ({"HEAD": "\xff\xfe garbage"}, ""),
    ],
    ids=str,
)
def test_what_is_no_commit_is_not_told(tmp_path: Path, files: dict[str, str], commit: str) -> None:
    (tmp_path / "outside").write_text("not a commit")
    (tmp_path / "code" / ".git").mkdir(parents=True)
    for name, text in files.items():
        file = tmp_path / "code" / ".git" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert commit_of(tmp_path / "code") == commit


@pytest.mark.parametrize("text", ["", "gitdir: /nowhere", "gitdir: \0", "garbage"])
def test_a_git_file_that_leads_nowhere(tmp_path: Path, text: str) -> None:
    (tmp_path / ".git").write_text(text)
    assert commit_of(tmp_path) == ""
