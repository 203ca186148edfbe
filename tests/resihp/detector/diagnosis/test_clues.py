"""Each kind of line is recognised, as that kind only, whatever stands around it; and no text is too much to read."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.detector.diagnosis.clues import MAX_CLUES, Clock, read_log, time_of
from resihp.detector.diagnosis.signatures import SIGNATURES, Depth, signature_of
from resihp.detector.diagnosis.xids import RESOLUTION_ADVICE, XIDS, advice
from tests.resihp.detector.lines import EXAMPLES, traceback, xid

CATALOGUE = Path(__file__).parents[5] / "shared" / "data" / "xid.csv"
NOISE = (
    "iteration 120/ 1000 | consumed samples: 1920 | elapsed time per iteration (ms): 812.4 | lm loss: 2.9e+00",
    "gpu-17:2217:2301 [3] NCCL INFO Channel 00/08 : 0 1 2 3",
    "/opt/torch/amp.py:12: FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated",
    "UserWarning: apex not found, ImportError ignored",
    "[191000.000001] mlx5_core 0000:5f:00.0 ens2f0: Link up",
    "[191000.000001] pcieport 0000:3a:00.0: AER: Corrected error received: 0000:3b:00.0",
    "[191000.000001] {2}[Hardware Error]: event severity: corrected",
    "loss: nan is what we would print in case of an Error",
    "INFO saved to /dev/shm/cache in 0.2 s",
)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_line_is_of_its_kind_only(kind: str) -> None:
    for example in EXAMPLES[kind]:
        for text in (example, "\n".join([*NOISE, example, *NOISE]), example.replace("\n", "\r\n")):
            assert {clue.kind for clue in read_log(text)} == {kind}, text
        assert signature_of(kind) is not None


def test_every_signature_has_an_example() -> None:
    assert {signature.kind for signature in SIGNATURES} - {"xid"} <= EXAMPLES.keys()
    assert len({signature.kind for signature in SIGNATURES}) == len(SIGNATURES)


def test_noise_is_no_clue() -> None:
    assert read_log("\n".join(NOISE)) == ()
    assert read_log("") == ()


@pytest.mark.parametrize("code", XIDS)
def test_every_xid_of_the_catalogue(code: int) -> None:
    [clue] = read_log(xid(code, pid=2217))
    assert clue.kind == f"xid {code}"
    assert clue.named == {"bus": "0000:3b:00", "xid": str(code), "pid": "2217"}
    signature = signature_of(clue.kind)
    assert signature is not None
    assert signature.words.endswith(f"(Xid {code})")
    assert advice(XIDS[code], "3b:00")


def test_xids_are_judged_as_the_catalogue_and_experience_have_it() -> None:
    def category(code: int) -> str:
        signature = signature_of(f"xid {code}")
        assert signature is not None
        return signature.category

    assert {category(code) for code in (48, 63, 64, 79, 92, 94, 95, 119, 120)} == {"device"}
    assert {category(code) for code in (74, 144, 145, 149)} == {"link"}
    assert {category(code) for code in (8, 13, 31, 43)} == {"program"}
    assert {category(code) for code in (45, 154)} == {"secondary"}
    unknown = signature_of("xid 999")
    assert unknown is not None
    assert not unknown.blames
    assert unknown.depth == Depth.SIGN
    assert "--gpu-reset -i 0000:3b:00" in advice(XIDS[119], "0000:3b:00")


def test_no_code_that_needs_a_reset_or_a_restart_of_the_machine_is_taken_for_the_program() -> None:
    for known in XIDS.values():
        if known.resolution in ("RESET_GPU", "RESTART_BM", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR"):
            assert known.role in ("device", "link"), known
        assert not known.resolution or known.resolution in RESOLUTION_ADVICE


@pytest.mark.skipif(not CATALOGUE.exists(), reason=f"{CATALOGUE.name} is not there")
def test_the_table_of_xids_is_the_catalogue() -> None:
    rows = {int(row["xid"]): row for row in csv.DictReader(CATALOGUE.read_text().splitlines())}
    assert rows.keys() == XIDS.keys()
    for code, row in rows.items():
        assert XIDS[code].resolution == row["immediate_resolution"]
        assert XIDS[code].mnemonic in row["mnemonic"]


def test_colours_and_control_characters_are_taken_out() -> None:
    [clue] = read_log("\x1b[1;31mRuntimeError: CUDA error: \x1b[0;1muncorrectable ECC error\x07 encountered\x1b[0m\x00")
    assert clue.kind == "cuda ecc"
    assert clue.line == "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def test_of_many_lines_of_a_kind_the_first_and_the_last_are_kept() -> None:
    lines = [f"2025-03-03 09:26:{i // 60:02d}:{i % 60:02d} peer {i}: Connection reset by peer" for i in range(500)]
    assert [clue.line.split()[3] for clue in read_log("\n".join(lines))] == ["0:", "1:", "498:", "499:"]
    everything = "\n".join(line for lines in EXAMPLES.values() for line in lines)
    assert len(read_log(everything * 3)) <= MAX_CLUES


HOSTILE = {
    "one line": "x" * 1_000_000,
    "one needle a line": "Connection reset by peer\n" * 40_000,
    "needles in one line": "NVRM: Xid (PCI:0000:" * 50_000,
    "escapes": "\x1b[" + "0" * 1_000_000,
    "many escapes": "\x1b[0;" * 250_000,
    "titles": "\x1b]0;" * 250_000,
    "tracebacks": "Traceback (most recent call last)\n" * 30_000,
    "endless traceback": "Traceback (most recent call last):\n" + "  File\n" * 150_000,
    "traceback then one line": "Traceback (most recent call last):\n" * 500 + " " * 1_000_000,
    "almost a completion": "Got completion from peer " * 40_000,
    "digits": "NVRM: Xid (" + "0" * 1_000_000,
    "kernel": "Killed process " * 60_000 + "Out of memory: Kill" * 10,
    "spaces": "[" + " " * 1_000_000,
    "dates": "2025-03-03T" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_to_read_is_linear_whatever_the_text(name: str) -> None:
    text = HOSTILE[name]
    began = time.process_time()
    assert len(read_log(text)) <= MAX_CLUES
    assert time.process_time() - began < 2.0


def test_a_clue_in_a_line_of_a_megabyte_is_found() -> None:
    [clue] = read_log("x" * 500_000 + " CUDA error: uncorrectable ECC error encountered " + "y" * 500_000)
    assert clue.kind == "cuda ecc"
    assert "uncorrectable ECC error encountered" in clue.line
    assert len(clue.line) <= 400


@given(st.text(max_size=400), st.sampled_from([line for lines in EXAMPLES.values() for line in lines]))
def test_any_text_is_read(text: str, line: str) -> None:
    for clue in read_log(f"{text}\n{line}\n{text}"):
        assert signature_of(clue.kind) is not None


# --- exceptions -------------------------------------------------------------------------------------------------------


def test_exceptions_are_those_that_end_a_traceback() -> None:
    assert read_log("WARNING: falling back: ImportError: no apex\nValueError: only talked about\n") == ()
    [clue] = read_log(traceback("ValueError: bad sample 17", "[rank5]: ") + "\n[rank5]: more\n")
    assert clue.raised
    assert clue.named == {"error": "ValueError: bad sample 17"}


def test_exceptions_in_a_chain() -> None:
    text = (
        f"{traceback('KeyError: 3')}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{traceback('RuntimeError: no such sample')}\n"
    )
    assert [(clue.named["error"], clue.chained) for clue in read_log(text)] == [
        ("KeyError: 3", False),
        ("RuntimeError: no such sample", True),
    ]


def test_a_traceback_that_stops_in_the_middle_names_nothing() -> None:
    cut = traceback("ValueError: bad sample")
    for end in range(len(cut) - len("ValueError: bad sample") + 1):
        assert read_log(cut[:end]) == ()


# --- times ------------------------------------------------------------------------------------------------------------

NEAR = 1_740_994_011.0  # 2025-03-03 09:26:51 UTC


@pytest.mark.parametrize(
    "line",
    [
        "2025-03-03T09:26:51+00:00 gpu-17 kernel: NVRM",
        "2025-03-03T10:26:51+0100 gpu-17 kernel: NVRM",
        "2025-03-03 09:26:51 ERROR all is lost",
        "slurmstepd: error: *** JOB 4711 ON gpu-17 CANCELLED AT 2025-03-03T09:26:51 DUE TO TIME LIMIT ***",
        "[Mon Mar  3 09:26:51 2025] NVRM: Xid",
        "Mar  3 09:26:51 gpu-17 kernel: NVRM",
        "[rank0]:[E303 09:26:51.000000000 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog",
        "E0303 09:26:51.000000 2217 net.cc:12] lost",
        "[  100.000000] NVRM: Xid",
        "4,1234,100000000,-;NVRM: Xid",
    ],
)
def test_times(line: str) -> None:
    assert time_of(line, Clock(near=NEAR + 3600, booted=NEAR - 100, utc_offset_s=0)) == pytest.approx(NEAR)


def test_times_of_local_clocks_and_at_the_turn_of_the_year() -> None:
    assert time_of("2025-03-03 10:26:51,500 lost", Clock(utc_offset_s=3600)) == pytest.approx(NEAR + 0.5)
    new_year = 1_735_689_601.0  # 2025-01-01 00:00:01 UTC
    assert time_of("Dec 31 23:59:59 gpu-17 kernel:", Clock(near=new_year, utc_offset_s=0)) == pytest.approx(
        new_year - 2
    )


@pytest.mark.parametrize("line", ["", "no time", "[12.000000] NVRM", "Mar  3 09:26:51 host", "2025-99-99 99:99:99 x"])
def test_times_that_cannot_be_told(line: str) -> None:
    assert time_of(line, Clock(utc_offset_s=0)) is None


def test_a_time_without_a_zone_is_not_guessed() -> None:
    assert time_of("2025-03-03 09:26:51,500 lost", Clock(near=NEAR)) is None
    assert time_of("2025-03-03 09:26:51Z lost", Clock()) == NEAR
