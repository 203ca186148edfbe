"""Output of Slurm's commands, as it is, as it could be, and as it must never be: a view or SlurmOutputError."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resihp.slurm.client import Gres, JobRequest, NodeView
from resihp.slurm.errors import SlurmOutputError
from resihp.slurm.parsing import parse, parse_request
from resihp.slurm.parsing.fields import FIELD, RECORD
from resihp.slurm.parsing.reservations import reservations
from tests.slurm.fake_slurm import expand

SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "slurm"

READERS: dict[str, Callable[[bytes], object]] = {
    "nodes": parse.nodes,
    "jobs": parse.jobs,
    "request": lambda output: parse_request.request(output, "17"),
    "hostnames": lambda output: parse.hostnames(output, "n[1-3]"),
    "version": parse.version,
    "cluster": parse.cluster,
    "submitted": parse.submitted,
    "script": lambda output: parse.script(output, "7"),
    "reservations": reservations,
    "seconds_left": lambda output: parse.seconds_left(output.decode("utf-8", "replace")),
    "gpus": lambda output: parse.gpus(output.decode("utf-8", "replace")),
    "expand": lambda output: expand(output.decode("utf-8", "replace")),
}

NODE = (
    *("n1", "idle+drain", "resihp: a | b = c é", "root", "10.0.0.1", "2048", "1031000", "gpu:h100:8(S:0-1),nic:2"),
    "1795338374",
)
JOB = ("17", "17", "me", "RUNNING", "n[1-2]", "n1", "None", "1", "1-02:03:04", "N/A", "1795338374", "(null)", "a b|c")


def sample(name: str) -> str:
    path = SAMPLES / name
    if not path.exists():
        pytest.skip(f"the recorded outputs of Slurm are not here ({path.parent})")
    return path.read_text()


def output(*records: tuple[str, ...]) -> bytes:
    return "".join(FIELD.join(record) + RECORD + "\n" for record in records).encode()


def test_a_node() -> None:
    assert parse.nodes(output(NODE)) == {
        "n1": NodeView(
            name="n1",
            state="idle",
            flags=frozenset({"drain"}),
            reason="resihp: a | b = c é",
            reason_by="root",
            reason_at=1795338374.0,
            address="10.0.0.1",
            cpus=2048,
            memory_mb=1031000,
            gpus=8,
        )
    }


def test_nodes_of_two_partitions_are_one() -> None:
    other = ("n2", "DOWN+NOT_RESPONDING", "none", "Unknown", "n2", "1", "1", "(null)", "Unknown")
    views = parse.nodes(output(NODE, other, NODE))
    assert set(views) == {"n1", "n2"}
    assert views["n2"].flags == {"not_responding"}
    assert (views["n2"].state, views["n2"].reason, views["n2"].reason_by, views["n2"].gpus) == ("down", "", "", 0)


def test_line_breaks_in_a_reason_shift_nothing() -> None:
    broken = (*NODE[:2], "two\nlines\n", *NODE[3:])
    assert parse.nodes(output(broken, ("n2", *NODE[1:])))["n1"].reason == "two\nlines\n"


def test_padded_fields_are_the_same() -> None:
    padded = tuple(field.ljust(40) for field in NODE)
    assert parse.nodes(output(padded)) == parse.nodes(output(NODE))


def test_a_job() -> None:
    ((ids, view, nodelist),) = parse.jobs(output(JOB))
    assert ids == {"17"}
    assert nodelist == "n[1-2]"
    assert (view.name, view.user, view.state, view.batch_host) == ("a b|c", "me", "running", "n1")
    assert (view.why, view.restarts, view.seconds_left, view.preempted) == ("", 1, 93784.0, False)
    assert (view.submitted_at, view.element) == (1795338374, "")


def test_a_pending_job_of_an_array() -> None:
    pending = ("57", "55_2", "me", "PENDING", "", "n/a", "Priority", "0", "UNLIMITED", "N/A", "N/A", "(null)", "x")
    ((ids, view, nodelist),) = parse.jobs(output(pending))
    assert ids == {"57", "55_2"}
    assert (nodelist, view.batch_host, view.why, view.seconds_left) == ("", "", "Priority", None)
    assert (view.submitted_at, view.element) == (None, "55_2")


# What squeue of 22.05.8, 24.11.5 and 26.05.5 says of the same jobs.
_SAID = ("17", "17", "main", *("(null)",) * 3, "fast&ib", "matlab:2,fs", "wk", "(null)", "(null)", "NO")
_AMOUNTS = ("4000M", "N/A", "5M")
REQUESTS = {
    "22.05": (*_SAID, "", "gres:gpu:a100:2", "N/A", "N/A", "N/A", *_AMOUNTS, "cpu=2,mem=8000M,node=2,billing=2"),
    "24.11": (*_SAID, "", "gres/gpu:a100:2", "N/A", "cpu=2", "N/A", *_AMOUNTS, "cpu=2,mem=8000M,node=2,billing=2"),
    "26.05": (*_SAID, "NODE", "gres/gpu:a100:2", "N/A", "N/A", "N/A", *_AMOUNTS, "cpu=2,mem=7.8125G,node=2"),
}


def asking(release: str = "24.11", **changes: str) -> JobRequest:
    fields = dict(zip(parse_request._REQUEST_FIELDS, REQUESTS[release], strict=True))
    fields |= {name.replace("_", "-"): text for name, text in changes.items()}
    return parse_request.request(output(tuple(fields.values())), "17")


@pytest.mark.parametrize("release", REQUESTS)
def test_what_a_job_asked_for(release: str) -> None:
    assert asking(release) == JobRequest(
        partition="main",
        constraint="fast&ib",
        licenses="matlab:2,fs",
        wckey="wk",
        exclusive="node",
        gres=(Gres("gpu", "a100", 2),),
        memory_mb=4000,
        disk_mb=5,
    )


def test_whatever_was_asked_for_in_total() -> None:
    assert asking(tres_per_job="gres:gpu:4").gres_in_total == (Gres("gpu", "", 4),)
    in_total = asking(tres_per_task="cpu=2,gres/gpu:a100=1", tres_per_socket="gres/nic:1g.5gb:3").gres_in_total
    assert in_total == (Gres("gpu", "a100", 1), Gres("nic", "1g.5gb", 3))
    assert asking(tres_per_node="gres/gpu").gres == (Gres("gpu", "", 1),)


def test_memory_is_a_nodes_share_or_a_gpus() -> None:
    assert asking(MinMemory="0").memory_mb == 0
    assert asking(MinMemory="500M", tres_alloc="cpu=32,mem=16000M,node=2").memory_mb == 8000
    per_gpu = asking(MinMemory="500M", mem_per_tres="gres/gpu:500")
    assert (per_gpu.memory_mb, per_gpu.memory_per_gpu_mb) == (0, 500)


def test_nodes_are_taken_whole_or_shared_by_whoever() -> None:
    assert [asking("22.05", OverSubscribe=text).exclusive for text in ("NO", "OK", "YES", "USER", "MCS", "TOPO")] == [
        *("node", "", "", "user", "mcs", "topo"),
    ]
    assert asking("26.05", OverSubscribe="NO", Exclusive="NO").exclusive == ""
    assert asking("26.05", OverSubscribe="YES", Exclusive="NO").oversubscribe
    assert asking(WCKey="*usual").wckey == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"OverSubscribe": "SOMETIMES"},
        {"Exclusive": "ROW"},
        {"tres_per_node": "gres/gpu:a100:2(S:0)"},
        {"MinMemory": "much"},
        {"tres_alloc": "cpu=2,mem=8000M,node=0"},
        {"tres_alloc": "N/A"},
        {"mem_per_tres": "gres/nic:500"},
        {"Feature": "fast\n#SBATCH --wait"},
    ],
)
def test_a_request_that_cannot_be_read(changes: dict[str, str]) -> None:
    with pytest.raises(SlurmOutputError):
        asking(**changes)


def test_of_a_job_arrays_records_each_element_has_its_own() -> None:
    other = ("55", "55_1", "other", *REQUESTS["24.11"][3:])
    own = ("57", "55_2", *REQUESTS["24.11"][2:])
    assert parse_request.request(output(other, own), "55_2").partition == "main"
    with pytest.raises(SlurmOutputError, match="returned other jobs"):
        parse_request.request(output(other), "55_2")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:00", 0),
        ("4:59", 299),
        ("1:00:00", 3600),
        ("13-06:37:11", 1147031),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", 0),
    ],
)
def test_time_left(text: str, seconds: float | None) -> None:
    assert parse.seconds_left(text) == seconds


@pytest.mark.parametrize("text", ["", "-1:00", "1:2:3:4", "soon", "5", "1-", "1:00:00 left", "1٣:00"])
def test_no_time(text: str) -> None:
    with pytest.raises(SlurmOutputError):
        parse.seconds_left(text)


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("", 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:ampere:8", 8),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0,1),gpu:v100:2(S:1),nic:mlx5:9", 6),
        ("nic:2,shard:32", 0),
        ("gpu:a100:no_consume:4", 4),
        ("gpu:no_consume:4(S:0-1)", 4),
        ("bandwidth:lustre:no_consume:4G,gpu:a100_3g.20gb:2(S:0),gpu:h100", 3),
        ("gpu:nvidia_h100_80gb_hbm3:1K", 1024),
    ],
)
def test_gpus(gres: str, count: int) -> None:
    assert parse.gpus(gres) == count


@pytest.mark.parametrize(
    "bad",
    [
        ("", *NODE[1:]),
        ("-n", *NODE[1:]),
        ("n 1", *NODE[1:]),
        (NODE[0], "", *NODE[2:]),
        (NODE[0], "idle*", *NODE[2:]),
        NODE[:-1],
        (*NODE, "more"),
    ],
)
def test_nodes_that_cannot_be(bad: tuple[str, ...]) -> None:
    """An answer of such rows alone is none; among others such a row takes nothing with it."""
    with pytest.raises(SlurmOutputError, match="slurm: "):
        parse.nodes(output(bad, bad))
    other = ("n2", *NODE[1:])
    views = parse.nodes(output(bad, other))
    assert views.pop("n2").usable is False
    assert all(not view.usable and view.unreadable for view in views.values())
    assert views.keys() <= {NODE[0]}
    assert parse.nodes(output(NODE, bad)) == parse.nodes(output(NODE))


@pytest.mark.parametrize(
    "odd",
    [
        ("2K", *NODE[6:]),
        ("-1", *NODE[6:]),
        (NODE[5], "", *NODE[7:]),
        (*NODE[5:7], "gpu:a:many", NODE[8]),
        (*NODE[5:7], "gpu:h100:8:shared", "yesterday"),
    ],
)
def test_odd_figures_of_a_node_hide_neither_its_state_nor_who_has_set_it_aside(odd: tuple[str, ...]) -> None:
    """Whoever drains would take it for a healthy one, and write over the reason."""
    node = ("n2", "idle+drain", "RMA 4711, do not touch", "root(0)", NODE[4])
    view = parse.nodes(output(NODE, (*node, *odd)))["n2"]
    assert (view.draining, view.reason, view.reason_by, view.unreadable) == (True, node[2], node[3], "")


def test_one_node_with_odd_resources_is_read_beside_the_others() -> None:
    odd = ("n2", "idle", *NODE[2:7], "gpu:a100:no_consume:4", NODE[8])
    views = parse.nodes(output(NODE, odd))
    assert (views["n1"].gpus, views["n2"].gpus, views["n2"].usable) == (8, 4, True)


@pytest.mark.parametrize(
    ("place", "text"),
    [(0, "x"), (0, ""), (3, ""), (3, "R U"), (4, "n[1 -2]"), (4, "-n"), (7, ""), (7, "?"), (8, "?"), (10, "?")],
)
def test_jobs_that_cannot_be(place: int, text: str) -> None:
    with pytest.raises(SlurmOutputError, match="slurm: "):
        parse.jobs(output(JOB, (*JOB[:place], text, *JOB[place + 1 :])))


SHOWN = b"""JobId=6 JobName=u.sh
   NodeList=n[1-4]
   JOB_GRES=gpu:7
     Nodes=n[1-3] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),nic:1
     Nodes=n4 CPU_IDs=0-15 Mem=16000 GRES=gpu:1(IDX:0)
     Nodes=n5 CPU_IDs=0-15 Mem=16000 GRES=
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""


def test_gpus_of_a_jobs_nodes() -> None:
    assert parse.job_gpus(SHOWN) == [("n[1-3]", 2), ("n4", 1)]
    assert parse.job_gpus(b"JobId=6 JobName=u.sh\n   NodeList=n[1-4]\n") == []


@pytest.mark.parametrize(("old", "new"), [(b"GRES=gpu:1", b"gpu:1"), (b"gpu:1(", b"gpu:x:y("), (b"=n4 ", b"=;n4 ")])
def test_gpus_that_cannot_be(old: bytes, new: bytes) -> None:
    with pytest.raises(SlurmOutputError, match=r"slurm: cannot read .* scontrol's output"):
        parse.job_gpus(SHOWN.replace(old, new))


@pytest.mark.parametrize("length", range(1, len(output(NODE)) - 2))
def test_a_record_that_is_cut_off(length: int) -> None:
    with pytest.raises(SlurmOutputError):
        parse.nodes(output(NODE) + output(NODE)[:length])


def test_other_encodings_look_odd_and_break_nothing() -> None:
    assert parse.nodes(output(NODE).replace("é".encode(), b"\xe9"))["n1"].reason == "resihp: a | b = c �"
    with pytest.raises(SlurmOutputError):
        parse.nodes(output(NODE).replace(b"n1", b"n\xe9"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"slurm-wlm 22.05.8\n", (22, 5, 8)),
        (b"slurm 24.11.3\n", (24, 11, 3)),
        (b"slurm 25.05.0-0rc1\n", (25, 5, 0)),
        (b"slurm 25.11\n", (25, 11, 0)),
        (b"slurm 25.11-rc1\n", (25, 11, 0)),
        (b"slurm-23.02.7\n", (23, 2, 7)),
        (b"slurm 20.11.9-Bull.1.0\n", (20, 11, 9)),
        (b"slurm-wlm 23.11.4-1.2ubuntu5\n", (23, 11, 4)),
        (b"slurm-wlm-emulator 24.05.2\n", (24, 5, 2)),
        (b"slurm_22.05.11\n", (22, 5, 11)),
        (b"Welcome to cluster 7.1.2\nslurm 24.05.8-custom\n", (24, 5, 8)),
    ],
)
def test_versions(text: bytes, expected: tuple[int, int, int]) -> None:
    assert parse.version(text) == expected


def test_a_submitted_job() -> None:
    assert parse.submitted(b"17\n") == "17"
    assert parse.submitted(b"17;cluster-b\n") == "17"
    assert parse.submitted(b"your quota is fine\n17\n") == "17"
    for text in (b"", b"\n", b"Submitted batch job\n", b"17;\n", b"x17\n"):
        with pytest.raises(SlurmOutputError):
            parse.submitted(text)


def test_a_script_is_read_as_it_is_or_not_at_all() -> None:
    assert parse.script("#!/bin/sh\necho é\n".encode(), "7") == "#!/bin/sh\necho é\n"
    for text in (b"", b"no script\n", b"#!/bin/sh\necho \xe9\n"):
        with pytest.raises(SlurmOutputError, match="7"):
            parse.script(text, "7")


@pytest.mark.parametrize("reader", READERS)
@given(text=st.binary() | st.text().map(str.encode) | st.text("n0123456789[]-,: \n+_|\x1e\x1f").map(str.encode))
def test_whatever_comes_is_read_or_an_output_error(reader: str, text: bytes) -> None:
    with contextlib.suppress(SlurmOutputError):
        READERS[reader](text)


@given(
    fields=st.lists(
        st.tuples(*(st.text(max_size=12) | st.sampled_from([*NODE, "gpu:1", "7"]) for _ in NODE)), max_size=4
    ),
    jobs=st.lists(st.tuples(*(st.text(max_size=12) | st.sampled_from([*JOB, "7"]) for _ in JOB)), max_size=4),
)
def test_records_of_the_right_shape_are_read_or_an_output_error(
    fields: list[tuple[str, ...]], jobs: list[tuple[str, ...]]
) -> None:
    for read, records in ((parse.nodes, fields), (parse.jobs, jobs)):
        raw = "".join(FIELD.join(record) + RECORD + "\n" for record in records).encode("utf-8", "replace")
        with contextlib.suppress(SlurmOutputError):
            read(raw)


@given(
    reason=st.text(st.characters(exclude_characters="\x00\x1e\x1f", exclude_categories=["Cs"])).map(
        lambda text: text.strip(" ")
    )
)
@example(reason="State=IDLE\n\nn2")
def test_any_reason_is_read_back(reason: str) -> None:
    view = parse.nodes(output((*NODE[:2], reason, *NODE[3:])))["n1"]
    assert view.reason == ("" if reason == "none" else reason)
    assert view.cpus == 2048


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"gpus"}))
def test_other_commands_output_is_no_answer(reader: str) -> None:
    """Real output of other commands and formats: what a wrapper script in PATH may print."""
    paths = sorted(SAMPLES.glob("*.txt"))
    if not paths:
        pytest.skip(f"the recorded outputs of Slurm are not here ({SAMPLES})")
    for path in paths:
        with pytest.raises(SlurmOutputError):
            READERS[reader](path.read_bytes())


def test_recorded_node_lists() -> None:
    text = sample("sample-scontrol-output-large.txt")
    found = re.findall(r" Nodes=(\S+) .* TotalNodes=([0-9]+) ", text)
    assert len(found) == 8
    for nodelist, total in found:
        assert parse.NODE_LIST.fullmatch(nodelist)
        names = expand(nodelist)
        assert len(names) == len(set(names)) == int(total)


def test_recorded_times_and_resources() -> None:
    jobs = [line.split("|#") for line in sample("sample-squeue-output.txt").splitlines() if "|#" in line]
    assert [parse.seconds_left(job[13]) for job in jobs] == [1147031.0, 237394.0, 258901.0, 3600.0, 259200.0]
    nodes = [line.split("|") for line in sample("sinfo-output-for-structured.txt").splitlines() if "|" in line]
    assert {parse.gpus(node[1].strip()) for node in nodes} == {8}
