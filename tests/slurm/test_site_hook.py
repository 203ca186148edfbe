"""The site hook against its attackers: files of many owners in a spool, Slurm's commands replaced by a small table.

The same on a real cluster: tests/integration/test_site_hook.py.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resihp import slurm
from resihp.slurm.client import PREFIX
from resihp.slurm.drains.spool import MAX_BYTES, asked_by, put
from tests.integration.boxes import namespaces_allowed

HOOK = Path(slurm.__file__).with_name("site") / "hook.py"
ALICE, BOB, MALLORY = 20001, 20002, 20003

COMMAND = r"""#!{python} -ISE
import fcntl, json, os, sys, time
name, *argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
file = open({table!r}, "r+")
fcntl.flock(file, fcntl.LOCK_EX)
table = json.load(file)
def save():
    file.seek(0), file.truncate(), json.dump(table, file), file.flush()
table["calls"].append([name, *argv]); save()
assert os.environ["SLURM_TIME_FORMAT"] == "%s"
answer = table["answers"].get(name + " " + argv[0], table["answers"].get(name))
if answer is not None:
    sys.stderr.write(answer[1]), sys.exit(answer[0])
if name == "squeue":
    rows = table["steps" if "-s" in argv else "jobs"]
    print("\n".join("|".join(map(str, row)) for row in rows))
elif name == "sinfo":
    only = argv[argv.index("-n") + 1].split(",") if "-n" in argv else table["nodes"]
    for node in only:
        if node in table["nodes"]:
            state, who, reason, _ = table["nodes"][node]
            print("\x1f".join([node, state, who, reason or "none"]) + "\x1e")
elif argv[:2] == ["-o", "show"]:
    print("NodeName=%s State=X LastBusyTime=%d CfgTRES=cpu=1" % (argv[3], table["nodes"][argv[3]][3]))
else:
    fields = dict(word.split("=", 1) for word in argv[1:])
    node = table["nodes"][fields["NodeName"]]
    base = node[0].split("+")[0]
    if fields["State"] == "DRAIN":
        node[:3] = [base + "+drain", "root(%d)" % os.getuid(), fields["Reason"]]
    else:
        node[:3] = [base, "Unknown", ""]
    save()
"""


class Site:
    """A spool, a state folder, and a Slurm of five nodes: n1 and n2 Alice's (job 1), n3 Bob's (job 2)."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder / "spool"
        self.state = folder / "state"
        self.spool.mkdir()
        self.spool.chmod(0o1733)
        self.table = folder / "table.json"
        self.now = time.time()
        self.content: dict[str, Any] = {
            "jobs": [self.job(1, ALICE, "n[1-2]"), self.job(2, BOB, "n3")],
            "steps": [],
            "nodes": {f"n{i}": ["idle", "Unknown", "", 0] for i in range(1, 6)},
            "answers": {},
            "calls": [],
        }
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("squeue", "sinfo", "scontrol"):
            (self.bin / name).write_text(COMMAND.format(python=sys.executable, table=str(self.table)))
            (self.bin / name).chmod(0o755)

    def job(
        self, job: int, uid: int, nodes: str, state: str = "RUNNING", ago_s: float = 5000, ended_s: float = -3600
    ) -> list[Any]:
        return [job, uid, state, int(self.now - ago_s), int(self.now - ended_s), nodes]

    def request(
        self, uid: int, /, kind: str = "drain", node: str = "n1", *, reason: str = "rank 3 died", **changed: Any
    ) -> Path:
        """As `resihp.slurm.drains.spool` writes it, as that user; `changed` replaces what it says, `name` and `mode`
        the file's."""
        name = changed.pop("name", None) or f"{secrets.token_hex(16)}.json"
        mode = changed.pop("mode", 0o644)
        fields = {"version": 1, "id": name.removesuffix(".json"), "kind": kind, "node": node, "job": "1"}
        return self.file(
            uid, name, json.dumps({**fields, "reason": reason, "time": self.now, **changed}).encode(), mode
        )

    def file(self, uid: int, name: str, content: bytes, mode: int = 0o644) -> Path:
        path = self.spool / name
        path.write_bytes(content)
        path.chmod(mode)
        os.chown(path, uid, uid)
        return path

    def hook(
        self, *options: str, check: bool = True, environment: dict[str, str] | None = None, before: Sequence[str] = ()
    ) -> str:
        """Run it once; what it says."""
        self.table.write_text(json.dumps(self.content))
        done = subprocess.run(
            [
                *before,
                sys.executable,
                "-I",
                str(HOOK),
                "--spool",
                str(self.spool),
                "--state",
                str(self.state),
                *(options or ["--all"]),
            ],
            env={"PATH": str(self.bin), **(environment or {})},
            capture_output=True,
            text=True,
            timeout=100,
        )
        self.content = json.loads(self.table.read_text())
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        if check:
            assert done.returncode == 0, done.stderr
        return done.stderr

    @property
    def left(self) -> list[str]:
        return sorted(os.listdir(self.spool))

    def reason(self, node: str) -> str:
        state, _, reason, _ = self.content["nodes"][node]
        return reason if "drain" in state else ""

    @property
    def drained(self) -> list[str]:
        return [node for node in self.content["nodes"] if self.reason(node)]

    def updates(self) -> list[list[str]]:
        return [call for call in self.content["calls"] if call[:2] == ["scontrol", "update"]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    if os.geteuid() != 0:
        pytest.skip("needs root, to own files for other users")
    return Site(tmp_path)


def hook_module() -> Any:
    spec = importlib.util.spec_from_file_location("hook_under_test", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its NamedTuples look their annotations up there
    spec.loader.exec_module(module)
    return module


def test_a_command_of_slurm_that_hangs_is_no_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = hook_module()
    monkeypatch.setattr(hook, "SLURM_TIMEOUT_S", 0.2)
    (site.bin / "sinfo").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setenv("PATH", str(site.bin))
    with pytest.raises(hook.NoAnswer, match="sinfo: no answer within"):
        hook.SlurmCommands(None).views()


def test_one_run_reads_no_more_requests_than_it_may(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading that is left waits for the next run; the users are in another order then."""
    hook = hook_module()
    monkeypatch.setattr(hook, "MAX_READS", 3)
    for uid, node in ((ALICE, "n1"), (BOB, "n3")):
        for _ in range(3):
            site.request(uid, node=node)
    spool = hook.Spool(str(site.spool), False)
    requests, _ = spool.look(spool.names(), site.now)
    options = hook.parse(["--spool", str(site.spool), "--state", str(site.state), "--all"])
    turns = hook.SiteHook(options, spool, None, None, site.now)._turns(requests)
    assert len(turns) == 3
    assert len({request.uid for request in turns}) == 1


# --- what it is for -------------------------------------------------------------------------------------------------


def test_drains_a_node_that_the_file_owners_job_holds(site: Site) -> None:
    site.request(ALICE, node="n2", reason="rank 3: Xid 79")
    said = site.hook()
    assert site.reason("n2") == f"{PREFIX}rank 3: Xid 79 (asked by uid {ALICE}, job 1)"
    assert asked_by(site.reason("n2")) == ALICE
    assert site.left == []
    assert said.count("\n") == 1
    assert "drained node n2" in said
    assert f"uid {ALICE}" in said


def test_what_the_spool_module_writes_is_accepted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(site.spool, "drain", "n1", job_id="1", reason='say "hi"; $(reboot) | x', now=time.time())
    os.chown(path, ALICE, ALICE)
    site.hook()
    assert site.reason("n1") == f"{PREFIX}say hi (reboot) x (asked by uid {ALICE}, job 1)"


def test_undrains_what_it_drained_for_the_same_user(site: Site) -> None:
    site.request(ALICE, node="n2")
    site.hook()
    site.request(ALICE, "undrain", "n2")
    said = site.hook()
    assert site.drained == []
    assert "undrained node n2" in said
    assert site.updates()[-1] == ["scontrol", "update", "NodeName=n2", "State=UNDRAIN", "Reason=none"]


def test_asking_twice_drains_once(site: Site) -> None:
    site.request(ALICE)
    site.hook()
    site.request(ALICE, reason="again")
    assert "already drained" in site.hook()
    assert len(site.updates()) == 1
    assert site.left == []


def test_an_empty_spool_costs_no_call_and_says_nothing(site: Site) -> None:
    assert site.hook() == ""
    assert site.content["calls"] == []
    assert not site.state.exists()


def test_on_a_node_only_its_own_requests_are_answered(site: Site) -> None:
    site.request(ALICE, node="n1", name="1" * 32 + ".json")
    site.request(ALICE, node="n2", name="2" * 32 + ".json")
    assert site.hook("--node", "n3") == ""
    assert site.content["calls"] == []
    site.hook("--conf", "/nonexistent", environment={"SLURMD_NODENAME": "n2"})
    assert site.drained == ["n2"]
    assert site.left == ["1" * 32 + ".json"]


def test_dry_run_changes_nothing(site: Site) -> None:
    path = site.request(ALICE)
    site.file(MALLORY, "x.json", b"{")
    said = site.hook("--all", "--dry-run")
    assert "not done (dry run): drained node n1" in said
    assert site.drained == []
    assert site.left == sorted([path.name, "x.json"])
    assert "memory.json" not in os.listdir(site.state)


# --- whose nodes ----------------------------------------------------------------------------------------------------


def refused(site: Site, *options: str, because: str) -> None:
    said = site.hook(*options)
    assert "refused" in said
    assert because in said, said
    assert site.updates() == []
    assert site.left == []


def test_another_users_node_is_refused(site: Site) -> None:
    site.request(ALICE, node="n3")
    refused(site, because="no job of this user holds it")


def test_a_user_without_any_job_is_not_even_read(site: Site) -> None:
    site.request(MALLORY, node="n1")
    refused(site, because=f"1 of uid {MALLORY}")


@pytest.mark.parametrize("claim", [{"uid": ALICE}, {"user": "root", "owner": 0}, {"job": "1"}])
def test_the_content_does_not_say_who_asks(site: Site, claim: dict[str, Any]) -> None:
    site.request(BOB, node="n1", **claim)
    refused(site, because="no job of this user holds it")


def test_a_node_just_given_back_is_proved_by_the_running_step(site: Site) -> None:
    site.content["jobs"] = [site.job(1, ALICE, "n1"), site.job(2, BOB, "n3")]
    site.content["steps"] = [["1.0", ALICE, "STEP", int(site.now - 5000), int(site.now - 5000), "n[1-2]"]]
    site.content["nodes"]["n2"][3] = int(site.now - 100)
    site.request(ALICE, node="n2")
    site.hook()
    assert site.drained == ["n2"]


@pytest.mark.parametrize("other", [None, "MALLORY"])
def test_a_node_given_back_long_ago_is_not(site: Site, other: str | None) -> None:
    """However long the step runs: the node was idle since, or somebody else has had it."""
    site.content["jobs"] = [site.job(1, ALICE, "n1")]
    if other:
        site.content["jobs"].append(site.job(3, MALLORY, "n2", ago_s=2000))
    site.content["steps"] = [["1.0", ALICE, "STEP", int(site.now - 5000), int(site.now - 5000), "n[1-2]"]]
    site.content["nodes"]["n2"][3] = int(site.now - (10 if other else 2000))
    site.request(ALICE, node="n2")
    refused(site, because="no job of this user holds it")


def test_what_the_hook_saw_is_remembered(site: Site) -> None:
    site.hook("--all", "--remember")
    site.content["jobs"] = [site.job(1, ALICE, "n1")]  # n2 was given back, and no step tells
    site.request(ALICE, node="n2")
    site.hook()
    assert site.drained == ["n2"]


@pytest.mark.parametrize(("ended_s", "accepted"), [(300, True), (1000, False)])
def test_a_job_that_has_ended(site: Site, ended_s: float, accepted: bool) -> None:
    site.content["jobs"] = [site.job(1, ALICE, "n[1-2]", "FAILED", ended_s=ended_s)]
    site.request(ALICE)
    site.hook()
    assert bool(site.drained) is accepted


def test_a_shared_node_is_not_one_users_to_drain(site: Site) -> None:
    site.content["jobs"].append(site.job(3, BOB, "n2", ago_s=10))
    site.request(ALICE, node="n2")
    refused(site, because="other users' jobs were on it")
    site.request(ALICE, node="n2")
    site.hook("--all", "--shared")
    assert site.drained == ["n2"]


def test_the_next_user_of_a_node_does_not_make_it_shared(site: Site) -> None:
    site.content["jobs"] = [site.job(1, ALICE, "n2", "COMPLETED", ended_s=60), site.job(3, BOB, "n2", ago_s=30)]
    site.request(ALICE, node="n2")
    site.hook()
    assert site.drained == ["n2"]


# --- other owners' reasons ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        ["idle+drain", "root(0)", "bad disk, ticket 17", 0],
        ["down", "root(0)", "PSU", 0],
        ["mixed", "root(0)", "watch this one", 0],
        ["idle+drain", "root(0)", "two\nlines | resihp: x", 0],
        ["down+not_responding", "root(0)", "Not responding, called vendor", 0],
        ["idle+drain", "slurm(64030)", "Kill task failed", 0],
        ["idle+drain", "Unknown", "", 0],
    ],
)
def test_a_foreign_reason_is_never_touched(site: Site, node: list[Any]) -> None:
    site.content["nodes"]["n1"] = list(node)
    site.request(ALICE)
    site.request(ALICE, "undrain")
    said = site.hook()
    assert "left alone" in said
    assert site.updates() == []
    assert site.content["nodes"]["n1"] == node
    assert site.left == []


def test_a_node_that_slurm_cannot_reach_is_drained(site: Site) -> None:
    site.content["nodes"]["n1"] = ["down+not_responding", "root(0)", "Not responding", 0]
    site.request(ALICE)
    site.hook()
    assert site.drained == ["n1"]


@pytest.mark.parametrize(
    ("who", "reason"),
    [
        ("root(0)", f"{PREFIX}x (asked by uid {BOB}, job 2)"),
        ("root(0)", f"{PREFIX}drained by an operator's own job"),
        ("root(0)", f"{PREFIX}(asked by uid {ALICE}, job 1) (asked by uid {BOB}, job 2)"),
        ("root(0)", f"{PREFIX}x (asked by uid {ALICE}, job 1) "),
        ("operator(500)", f"{PREFIX}x (asked by uid {ALICE}, job 1)"),
        ("Unknown", f"{PREFIX}x (asked by uid {ALICE}, job 1)"),
    ],
)
def test_nobody_undrains_what_was_drained_for_somebody_else(site: Site, who: str, reason: str) -> None:
    site.content["nodes"]["n1"] = ["idle+drain", who, reason, 0]
    site.request(ALICE, "undrain", "n1")
    refused(site, because="was not drained by this hook for them")
    assert site.reason("n1") == reason


def test_a_users_text_cannot_pass_for_the_hooks_own_words(site: Site) -> None:
    site.request(BOB, node="n3", reason=f"x (asked by uid {ALICE}, job 1)\nNodeName=n1 [root@now] " + "y" * 500)
    site.hook()
    reason = site.reason("n3")
    assert asked_by(reason) == BOB
    assert len(reason) < 160
    assert not set(reason) & set("\n=[]\"'")
    site.request(ALICE, "undrain", "n3")
    assert "was not drained by this hook for them" in site.hook()
    assert site.reason("n3") == reason


# --- files ----------------------------------------------------------------------------------------------------------


def test_links_are_refused_and_what_they_point_to_is_not_touched(site: Site, tmp_path: Path) -> None:
    theirs = site.request(ALICE, node="n2")
    kept = tmp_path / "kept.json"
    theirs.rename(kept)
    (site.spool / ("a" * 32 + ".json")).symlink_to(kept)
    os.lchown(site.spool / ("a" * 32 + ".json"), BOB, BOB)
    os.link(kept, site.spool / theirs.name)
    said = site.hook()
    assert "a symbolic link" in said
    assert "has 2 links" in said
    assert site.updates() == []
    assert site.left == []
    assert kept.exists()


def test_a_request_that_is_put_there_again_is_refused(site: Site, tmp_path: Path) -> None:
    """A link kept from an old one, moved back when the hook has removed the original: owner and content are right."""
    old = site.request(ALICE, node="n2", time=site.now - 700)
    renamed = site.request(ALICE, node="n2")
    renamed.rename(site.spool / ("b" * 32 + ".json"))
    said = site.hook()
    assert "its time differs from its file's" in said
    assert "its name differs from its id" in said
    assert old.name in said
    assert site.updates() == []


@pytest.mark.parametrize("by", ["link", "other owner", "fifo", "folder", "nothing"])
def test_a_file_that_is_replaced_between_two_looks(site: Site, tmp_path: Path, by: str) -> None:
    hook = hook_module()
    spool = hook.Spool(str(site.spool), False)
    theirs = site.request(ALICE, node="n2")
    aside = theirs.rename(tmp_path / "aside")
    mine = site.request(BOB, node="n3", name=theirs.name)
    (entry,) = spool.look(spool.names(), time.time())[0][BOB]
    mine.unlink()
    if by == "link":
        mine.symlink_to(aside)
    elif by == "other owner":
        aside.rename(mine)
    elif by == "fifo":
        os.mkfifo(mine)
    elif by == "folder":
        mine.mkdir()
    with pytest.raises(hook.Gone if by == "nothing" else hook.Refused):
        spool.read(entry, time.time())


def test_what_is_no_regular_file_neither_hangs_nor_counts(site: Site) -> None:
    os.mkfifo(site.spool / "fifo.json")
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(site.spool)
        try:
            listener.bind("socket.json")
        finally:
            os.chdir(before)
        for name in os.listdir(site.spool):
            os.chown(site.spool / name, ALICE, ALICE)
        (site.spool / "audit").mkdir()  # root's, another folder of the site
        (site.spool / "empty.json").mkdir()
        os.chown(site.spool / "empty.json", MALLORY, MALLORY)
        (site.spool / "full.json").mkdir()
        (site.spool / "full.json" / "inner.json").touch()
        said = site.hook()
    assert "not a regular file" in said
    assert site.left == ["audit", "full.json"]
    assert site.updates() == []


def test_what_is_no_plain_file_is_not_even_opened(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a device or a pipe as root is to do something to it."""
    hook = hook_module()
    os.mkfifo(site.spool / "fifo.json")
    spool = hook.Spool(str(site.spool), False)
    found = (site.spool / "fifo.json").lstat()
    entry = hook.SpoolEntry("fifo.json", found.st_uid, found.st_ctime)
    opened: list[object] = []
    monkeypatch.setattr(hook.os, "open", lambda name, *rest, **options: opened.append(name))
    with pytest.raises(hook.Refused, match="not a regular file"):
        spool.read(entry, time.time())
    assert opened == []


HOSTILE: list[dict[str, Any]] = [
    {"node": "../n1"},
    {"node": "n1,n3"},
    {"node": "n[1-3]"},
    {"node": "ALL"},
    {"node": "-n1"},
    {"node": "n1\nState=DOWN"},
    {"node": "n1 State=DOWN"},
    {"node": ""},
    {"node": None},
    {"node": ["n1"]},
    {"kind": "resume"},
    {"kind": {"drain": 1}},
    {"version": 2},
    {"id": 7},
    {"reason": 7},
    {"time": None},
    {"time": float("nan")},
    {"time": float("inf")},
    {"time": 10**400},
    {"time": True},
    {"mode": 0o666},
    {"mode": 0o664},
    {"name": "short.json"},
    {"name": "x" * 200 + ".json"},
    {"name": "a b" * 5 + ".json"},
]


@pytest.mark.parametrize("hostile", HOSTILE, ids=[str(hostile)[:40] for hostile in HOSTILE])
def test_a_request_that_is_not_as_it_should_be(site: Site, hostile: dict[str, Any]) -> None:
    site.request(ALICE, **hostile)
    refused(site, because="names no node" if hostile.get("node", "ALL") != "ALL" else "refused ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * MAX_BYTES,
        b'{"a":' * 800,
        b"9" * MAX_BYTES,
        b" " * (MAX_BYTES + 1),
        b"\0" * 100,
    ],
    ids=range(10),
)
def test_broken_content(site: Site, content: bytes) -> None:
    site.file(ALICE, "c" * 32 + ".json", content)
    refused(site, because="refused ")


def test_a_large_sparse_file_is_not_read(site: Site) -> None:
    path = site.request(ALICE)
    os.truncate(path, 1 << 40)
    refused(site, because="at most 4096 are read")


def test_names_that_are_no_text_do_not_reach_the_log(site: Site) -> None:
    name = os.fsencode(site.spool) + b"/\xff\x1b[2J\n%s.json"
    Path(os.fsdecode(name)).write_bytes(b"{}")
    os.chown(name, ALICE, ALICE)
    said = site.hook()
    assert said.isascii()
    assert "\x1b" not in said
    assert said.count("\n") == 1
    assert site.left == []


def test_what_something_is_mounted_on_is_not_looked_at(site: Site) -> None:
    """A user's own file system could make whoever looks at it wait for ever."""
    if not namespaces_allowed():
        pytest.skip("this machine does not allow namespaces of our own")
    mine = site.request(ALICE, node="n1")
    theirs = site.request(ALICE, node="n2", name="odd name.json")
    unshare, mount = (shutil.which(name) or name for name in ("unshare", "mount"))
    bound = f'{mount} --bind "$1" "$1" && shift && exec "$@"'
    assert site.hook(before=[unshare, "--mount", "/bin/sh", "-c", bound, "sh", str(theirs)]).count("\n") == 1
    assert site.drained == ["n1"]
    assert site.left == [theirs.name]
    assert not mine.exists()


def test_half_written_files_are_left_for_a_while(site: Site) -> None:
    site.file(ALICE, ".d.tmp", b"{")
    assert site.hook() == ""
    assert site.left == [".d.tmp"]


def test_an_old_request_is_refused(site: Site) -> None:
    site.request(ALICE)
    refused(site, "--all", "--max-age-s", "0", because="older than")


# --- many files -----------------------------------------------------------------------------------------------------


def test_ten_thousand_files_neither_hang_the_hook_nor_starve_anybody(site: Site) -> None:
    for number in range(10_000):
        (site.spool / f"{number:032d}.json").touch()
        os.chown(site.spool / f"{number:032d}.json", BOB, BOB)
    for number in range(40):
        site.request(BOB, node="n3", reason=f"number {number}", name=f"e{number:031d}.json")
    site.request(ALICE, node="n1")
    began = time.monotonic()
    said = site.hook()
    took_s = time.monotonic() - began
    assert "n1" in site.drained
    assert site.left == []
    assert said.count("\n") <= 12
    assert took_s < 20


def test_many_owners_without_jobs_share_one_line(site: Site) -> None:
    """Subordinate uids give a user tens of thousands of them."""
    for number in range(3000):
        site.request(100_000 + number, node="n1")
    site.request(ALICE, node="n1")
    said = site.hook()
    assert site.drained == ["n1"]
    assert said.count("\n") == 2
    assert site.left == []


def test_one_users_rate_is_bounded_and_does_not_bound_others(site: Site) -> None:
    for _ in range(4):
        site.request(ALICE, node="n1")
        site.hook("--all", "--user-rate", "3")
        site.request(ALICE, "undrain", "n1")
        site.hook("--all", "--user-rate", "3")
    assert len(site.updates()) == 3
    site.request(BOB, node="n3")
    assert "carried out within the hour" not in site.hook("--all", "--user-rate", "3")
    assert "n3" in site.drained


def test_beyond_the_sites_rate_requests_wait_and_say_so_once(site: Site) -> None:
    site.request(ALICE, node="n1")
    site.hook("--all", "--rate", "1")
    site.request(BOB, node="n3")
    assert "waits: 1 requests were carried out within the hour" in site.hook("--all", "--rate", "1")
    assert site.hook("--all", "--rate", "1") == ""
    assert len(site.left) == 1
    site.hook("--all", "--rate", "2")
    assert site.drained == ["n1", "n3"]


def test_no_more_nodes_are_drained_at_once_than_the_site_allows(site: Site) -> None:
    site.content["nodes"]["n5"] = ["idle+drain", "root(0)", f"{PREFIX}by another host's hook", 0]
    site.request(ALICE, node="n1")
    site.request(ALICE, node="n2")
    said = site.hook("--all", "--drained", "2")
    assert len(site.drained) == 2
    assert "as many as the site allows" in said
    assert len(site.left) == 1


def test_one_user_cannot_use_up_what_the_site_allows(site: Site) -> None:
    site.request(ALICE, node="n1")
    site.hook("--all", "--user-drained", "1")
    site.request(ALICE, node="n2")
    assert "1 nodes are drained for this user" in site.hook("--all", "--user-drained", "1")
    site.request(BOB, node="n3")
    site.hook("--all", "--user-drained", "1")
    assert site.drained == ["n1", "n3"]


@pytest.mark.parametrize("clock", [+7200, -7200])
def test_a_clock_that_jumps_does_not_lift_the_rate(site: Site, clock: float) -> None:
    site.request(ALICE, node="n1")
    site.hook("--all", "--rate", "1")
    memory = json.loads((site.state / "memory.json").read_text())
    assert [uid for _, uid in memory["acted"]] == [ALICE]
    memory["acted"] = [[at + clock, uid] for at, uid in memory["acted"]]
    (site.state / "memory.json").write_text(json.dumps(memory))
    site.request(BOB, node="n3")
    said = site.hook("--all", "--rate", "1")
    assert ("waits" in said) is (clock > 0)  # remembered two hours ahead: it counts as just now, and for an hour
    memory = json.loads((site.state / "memory.json").read_text())
    assert all(at <= time.time() for at, _ in memory["acted"])


# --- folders, locks, Slurm ------------------------------------------------------------------------------------------


def unsafe(site: Site, said: str, because: str) -> None:
    assert because in said, said
    assert site.content["calls"] == []
    assert len(site.left) == 1


def test_a_spool_where_others_can_rename_files_is_refused(site: Site) -> None:
    site.request(ALICE)
    site.spool.chmod(0o777)
    unsafe(site, site.hook(), "not sticky")


@pytest.mark.parametrize("mode", [0o755, 0o1777, 0o700])
def test_a_folder_that_is_no_spool_is_left_alone(site: Site, mode: int) -> None:
    """A mistyped path, such as /etc or /tmp, whose files would be removed."""
    site.request(ALICE)
    site.spool.chmod(mode)
    unsafe(site, site.hook(), f"no spool, its mode is {mode:o}; if it is to be one: chmod 1733 {site.spool}")


def test_a_spool_of_somebody_else_is_refused(site: Site) -> None:
    site.request(ALICE)
    os.chown(site.spool, MALLORY, MALLORY)
    unsafe(site, site.hook(), f"belongs to uid {MALLORY}")


def test_a_link_on_the_way_to_the_spool_is_refused(site: Site, tmp_path: Path) -> None:
    site.request(ALICE)
    (tmp_path / "way").symlink_to(tmp_path)
    real, site.spool = site.spool, tmp_path / "way" / "spool"
    said = site.hook()
    site.spool = real
    unsafe(site, said, "a link, or no folder")


def test_a_folder_on_the_way_that_others_can_write_is_refused(site: Site, tmp_path: Path) -> None:
    site.request(ALICE)
    tmp_path.chmod(0o777)
    unsafe(site, site.hook(), "others may write there")


def test_a_state_folder_that_others_can_read_is_refused(site: Site) -> None:
    site.request(ALICE)
    site.state.mkdir(mode=0o755)
    unsafe(site, site.hook(), "must not be accessible to others")


def test_a_broken_memory_stops_one_run_and_is_kept(site: Site) -> None:
    site.request(ALICE)
    site.state.mkdir(mode=0o700)
    (site.state / "memory.json").write_text('{"acted": [[')
    unsafe(site, site.hook(), "memory.broken")
    assert (site.state / "memory.broken").exists()
    site.hook()
    assert site.drained == ["n1"]


def test_a_second_hook_at_the_same_time_does_nothing(site: Site) -> None:
    site.request(ALICE)
    site.state.mkdir(mode=0o700)
    with (site.state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert site.hook() == ""
    assert len(site.left) == 1
    site.hook()
    assert site.drained == ["n1"]


@pytest.mark.parametrize("command", ["squeue", "sinfo", "scontrol update"])
def test_without_an_answer_of_slurm_everything_waits(site: Site, command: str) -> None:
    site.request(ALICE)
    site.content["answers"] = {command: [1, "slurm_load_jobs error: Unable to contact slurm controller"]}
    assert "Unable to contact" in site.hook()
    assert len(site.left) == 1
    assert site.drained == []
    site.content["answers"] = {}
    site.hook()
    assert site.drained == ["n1"]


def test_a_no_of_slurm_is_the_end_of_a_request(site: Site) -> None:
    site.request(ALICE)
    site.content["answers"] = {"scontrol update": [1, "slurm_update error: Invalid node state specified"]}
    assert "Slurm says no: slurm_update error: Invalid node state" in site.hook()
    assert site.left == []


def test_a_node_that_slurm_does_not_know(site: Site) -> None:
    del site.content["nodes"]["n1"]
    site.request(ALICE)
    refused(site, because="Slurm does not know it")


def test_malformed_answers_of_slurm_prove_nothing(site: Site) -> None:
    site.content["jobs"] = [[1, ALICE, "RUNNING", "N/A", "N/A", "n1"], [1, ALICE, "RUNNING", 0, 0, "n[1-"], ["x"], [""]]
    site.request(ALICE)
    site.hook()
    assert site.updates() == []


def test_wrong_use_ends_with_2(site: Site) -> None:
    assert "usage" in site.hook("--node", "n1", "--all", check=False)
    assert "required" in site.hook("--dry-run", check=False)


# --- by itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11,20],login", ["n08", "n09", "n10", "n11", "n20", "login"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("b4-[1-2, 05], b5-[1,4 , 8],b6-[2] ", ["b4-1", "b4-2", "b4-05", "b5-1", "b5-4", "b5-8", "b6-2"]),
        ("n1, n2,\tn3", ["n1", "n2", "n3"]),
        ("", []),
        ("(null)", ["(null)"]),
    ],
)
def test_node_lists(nodes: str, names: list[str]) -> None:
    assert list(hook_module().expanded(nodes)) == names


@pytest.mark.parametrize("nodes", ["n[a-b]", "n[1-99999999999]", "n[]", "n[1-999][1-999][1-999]"])
def test_node_lists_that_are_none(nodes: str) -> None:
    expanded: Iterable[str] = hook_module().expanded(nodes)
    with pytest.raises(ValueError, match=r".*"):
        list(expanded)


def test_stands_alone_in_an_old_python() -> None:
    """Sites copy it to machines whose Python is what their distribution has."""
    tree = ast.parse(HOOK.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)
    assert hook_module().PREFIX == PREFIX
    assert hook_module().MAX_BYTES == MAX_BYTES
