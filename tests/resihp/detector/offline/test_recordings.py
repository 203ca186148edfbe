"""Reading logs and CSV: every form of line, every kind of damage, and errors that name the nearest thing found."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import pytest

from resihp.detector.offline.iteration_model import Point
from resihp.detector.offline.recordings.formats import read, recognise
from resihp.detector.offline.recordings.recording import Recording
from resihp.errors import UsageError
from resihp.record import journal

TAIL = "learning rate: 1.420000E-05 | global batch size:   128 | lm loss: 1.8E+00 | number of nan iterations:   0 |"


def line(iteration: int, ms: float | str = 1200.0, prefix: str = " [2024-05-01 12:00:00] ") -> str:
    return (
        f"{prefix}iteration {iteration:8d}/  500000 | consumed samples: {iteration * 128:12d} | "
        f"elapsed time per iteration (ms): {ms} | {TAIL}"
    )


def of(*lines: str) -> Recording:
    return read(("\n".join(lines) + "\n").encode())


def iterations(recording: Recording) -> list[list[int]]:
    return [[point.iteration for point in run.points] for run in recording.runs]


@pytest.mark.parametrize(
    "made",
    [
        line(10, 1234.5),
        line(10, 1234.5, " "),
        " iteration 10/ 500 | consumed samples: 5 | elapsed time per iteration (ms): 1234.5 | learning rate: 1.0E-06 |",
        "[default7]: iteration       10/  292968 | samples: 10240 | elapsed time per iteration (s): 1.2345 | x |",
        " iteration  10/50000 | tokens:  1153 | elapsed time per iteration (ms):  1234.5 | gloabl batch size:  512 |",
        "7:  iteration 10/ 500 | elapsed time per iteration (ms): 1234.5 | lm loss: 1.0 |",
        " 7: [default7]: [2024-05-01 12:00:00.1234] iteration 10/ 5 | elapsed time per iteration (ms): 1234.5 | a: 1 |",
        "[Rank 0 | Local Rank 0] iteration 10/100 | samples: 80 | elapsed time per iteration (ms): 1234.5 | b |",
        "\x1b[32m" + line(10, 1234.5) + "\x1b[0m",
        line(10, "1.2345E+03"),
        "iteration 10/ 100 | elapsed time per iteration (ms): 1234.5",
    ],
)
def test_every_form_of_the_line_is_read(made: str) -> None:
    recording = of("using world size: 8", made, "  validation loss at iteration 10 | lm loss value: 2.0 |")
    (run,) = recording.runs
    (point,) = run.points
    assert recording.kind == "megatron-log"
    assert (point.iteration, point.seconds) == (10, pytest.approx(1.2345))


def test_bad_bytes_carriage_returns_and_a_torn_end_do_no_harm() -> None:
    content = (
        (line(1) + "\r\n" + line(2)).encode() + b"\n\xff\xfe\x80\n" + line(3).encode() + b"\n" + line(4).encode()[:95]
    )
    recording = read(content)
    assert iterations(recording) == [[1, 2, 3]]
    assert any("torn" in remark for remark in recording.remarks)


def test_a_number_cut_in_the_middle_is_not_taken_for_a_time() -> None:
    whole = line(3, 1234.5)
    cut = whole[: whole.index("1234.5") + 2]  # "... (ms): 12"
    assert iterations(of(line(1), line(2), cut)) == [[1, 2]]
    assert iterations(of(line(1), line(2), cut + line(4))) == [[1, 2, 4]]
    assert iterations(of(line(1), line(2), cut + "\n" + line(4))) == [[1, 2, 4]]


def test_two_lines_in_one_are_both_read() -> None:
    assert iterations(of(line(1) + line(2), line(3))) == [[1, 2, 3]]


def test_where_the_number_falls_a_new_run_begins() -> None:
    recording = of(*(line(i) for i in (98, 99, 100, 91, 92, 93)), *(line(i) for i in (1, 2)))
    assert iterations(recording) == [[98, 99, 100], [91, 92, 93], [1, 2]]


def test_interleaved_ranks_are_one_run() -> None:
    lines = []
    for i in range(1, 30):
        lines.append(line(i, 1000 + i, "[default7]: "))
        if i > 2:
            lines.append(line(i - 1, 1000, "[default3]: "))  # late by one
    recording = of(*lines)
    assert iterations(recording) == [list(range(1, 30))]
    assert recording.runs[0].points[4].seconds == pytest.approx(1.005)
    assert any("other ranks" in remark for remark in recording.remarks)


def test_another_rank_that_speaks_after_a_restart_is_heard() -> None:
    first = [line(i, 1000, "15: ") for i in range(1, 20)]
    second = [line(i, 1000, "7: ") for i in range(11, 40)]
    assert iterations(of(*first, *second)) == [list(range(1, 20)), list(range(11, 40))]


def test_unmarked_ranks_that_repeat_or_lag_are_one_run() -> None:
    assert iterations(of(*(line(i) for i in (1, 1, 2, 2, 4, 3, 5, 5, 6)))) == [[1, 2, 4, 5, 6]]


@pytest.mark.parametrize("bad", ["nan", "0.0", "-5.1", "inf"])
def test_times_that_cannot_be_are_left_out_and_counted(bad: str) -> None:
    recording = of(line(1), line(2, bad), line(3))
    assert iterations(recording) == [[1, 3]]
    assert "1 iteration without a usable time left out, line 2" in recording.remarks


def test_a_log_interval_is_told() -> None:
    recording = of(*(line(i) for i in range(10, 210, 10)))
    assert recording.runs[0].interval == 10
    assert any("mean over 10 iterations" in remark for remark in recording.remarks)


def test_missing_iterations_are_told() -> None:
    recording = of(*(line(i) for i in (*range(1, 10), *range(14, 30))))
    assert recording.runs[0].interval == 1
    assert any("4 iterations are missing" in remark for remark in recording.remarks)


def test_the_batch_size_is_the_workload() -> None:
    grown = line(2).replace("global batch size:   128", "global batch size:   256")
    assert [point.tokens for point in of(line(1), grown).runs[0].points] == [128, 256]


# --- CSV ------------------------------------------------------------------------------------------------------------


def test_a_csv_is_read_in_any_order_once() -> None:
    recording = of("iteration,seconds", "3,1.3", "1,1.1", "2,1.2", "2,1.2", "2,9")
    assert recording.kind == "series"
    assert [(p.iteration, p.seconds) for p in recording.runs[0].points] == [(1, 1.1), (2, 1.2), (3, 1.3)]
    assert "2 repeated rows left out" in recording.remarks


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_milliseconds_other_delimiters_and_upper_case_will_do(mark: str) -> None:
    content = "\ufeff# made by hand\n" + "\n".join(
        mark.join(row) for row in (("Iteration", " Milliseconds"), ("5", "1500"))
    )
    (point,) = read(content.encode()).runs[0].points
    assert (point.iteration, point.seconds) == (5, 1.5)


def test_workload_columns_are_read_where_they_are_numbers() -> None:
    points = of("iteration,seconds,tokens,sum_squared_lengths", "1,1.0,100,5000", "2,1.0,,nan").runs[0].points
    assert (points[0].tokens, points[0].squares) == (100, 5000)
    assert (points[1].tokens, points[1].squares) == (None, None)


def test_ranks_have_a_series_each() -> None:
    recording = of("rank,iteration,seconds", "1,2,1.2", "0,1,1.0", "1,1,1.1", "0,2,1.0", "0,2,1.0")
    ranks = recording.runs[0].ranks
    assert {rank: [p.iteration for p in points] for rank, points in ranks.items()} == {0: [1, 2], 1: [1, 2]}


def test_rows_that_cannot_be_are_left_out_and_counted() -> None:
    recording = of("iteration,seconds", "1,1.0", "2,nan", "3,-1", "4,0", "5,x", "6", "7,1.0")
    assert [point.iteration for point in recording.runs[0].points] == [1, 7]
    assert set(recording.remarks) == {
        "1 row cut short left out, line 7",
        "4 rows without a usable time left out, the first is line 3",
    }


def test_labels_that_are_no_whole_numbers_are_numbered() -> None:
    recording = of("iteration,seconds", "2024-05-01T12:00,1.0", "2024-05-01T12:01,1.1")
    assert [point.iteration for point in recording.runs[0].points] == [0, 1]
    assert any("numbered" in remark for remark in recording.remarks)


def test_a_csv_of_a_restarted_job_has_two_runs() -> None:
    rows = [f"{i},{1 + i / 1000}" for i in range(50)] + [f"{i},{2 + i / 1000}" for i in range(40, 90)]
    assert [len(run.points) for run in of("iteration,seconds", *rows).runs] == [50, 50]


# --- neither --------------------------------------------------------------------------------------------------------


def test_a_parquet_file_is_known_by_its_first_bytes() -> None:
    assert recognise(b"PAR1\x00\x01") == "parquet"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "empty"),
        ("worker,gpu,time,batch_time_norm\n0,25,1,476\n", "`batch_time_norm`"),
        ("iteration,second\n1,2\n", "did you mean `second` for `seconds`"),
        ("epoch 3\nstep 10: loss 2.0, 1.2 s/it\n", "step 10: loss 2.0"),
        ("elapsed time per iteration (ms): 12.0 | x\n", "before it"),
        ("iteration 3/ 10 | lm loss: 2.0 |\n", "no `elapsed time per iteration`"),
        ("\x00\x01\x02binary\x00", "nearest"),
    ],
)
def test_what_is_neither_is_refused_with_the_nearest_thing_found(content: str, named: str) -> None:
    with pytest.raises(UsageError, match="parquet") as refused:
        read(content.encode())
    assert named in str(refused.value)


def test_a_file_without_one_usable_time_is_refused() -> None:
    with pytest.raises(UsageError, match="no iteration has a usable time: 2 iterations"):
        of(line(1, "nan"), line(2, 0))
    with pytest.raises(UsageError, match="no iteration has a usable time"):
        of("iteration,seconds")


# --- what resihp run prints -----------------------------------------------------------------------------------------


def test_what_we_print_is_read_with_all_that_stands_around_it() -> None:
    recording = of(
        "resihp: job 4711: 4 nodes of 8, logs in /home/me/.resihp/jobs/4711/logs",
        "11-25 17:09:01 waiting for the first iteration: 4 of 4 nodes have joined, 31 of 32 workers have started",
        "11-25 17:09:02 iteration 1  loss 10.8312  18.2k tokens/s  0.45 s",
        "\x1b[33m11-25 17:09:03 failure 1: rank 5 (n2 device 1) killed by signal 9, noticed in iteration 3\x1b[0m",
        "11-25 17:09:04 iteration 4  loss nan  812 tokens/s  4 min 05 s  step skipped, gradients not finite",
        "11-25 17:09:05 iteration 5  loss 2.0000",
        "0: 11-25 17:09:06 iteration 6  loss 2.0000  1.2G tokens/s  1 h 02 min",
        "11-25 17:09:08 checkpoint of iteration 6: 2.8 MB in 0.03 s",
        "iteration 12  loss 2.0000 and more words  18.2k tokens/s  0.45 s",
        "11-25 18:00:00 iteration 2  loss 2.0000  18.2k tokens/s  12.3 s",
    )
    assert recording.kind == "resihp-log"
    assert iterations(recording) == [[1, 4, 6], [2]]
    assert [point.seconds for run in recording.runs for point in run.points] == [0.45, 245.0, 3720.0, 12.3]
    bad, between = recording.remarks
    assert bad == "1 iteration without a usable time left out, line 6"
    assert between.startswith("3 iterations are missing: at most one line a second is printed")


@pytest.mark.parametrize("seconds", [250e-6, 0.0031, 0.0099, 0.45, 12.3, 245.0, 3720.0, 97200.0])
def test_lines_as_the_live_view_prints_them(seconds: float) -> None:
    from resihp.wrapper.sinks.terminal import iteration_line
    from tests.db.conftest import outcome

    entry = journal.IterationCommitted(epoch=1, outcome=outcome(12), seconds=seconds, predicted_seconds=None)
    (run,) = of(f"11-25 17:09:02 {iteration_line(entry)}").runs
    assert [(point.iteration, point.seconds) for point in run.points] == [(12, pytest.approx(seconds))]


# --- JSON -----------------------------------------------------------------------------------------------------------


def points(recording: Recording) -> list[list[tuple[int, float]]]:
    return [[(point.iteration, point.seconds) for point in run.points] for run in recording.runs]


ROWS = '{"iteration": 1, "seconds": 1.5, "tokens": 4096}', '{"iteration": 2, "seconds": 2.5, "tokens": 4096}'


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ['{"step": 1, "step_time_ms": 1500, "tokens": 4096}', '{"step": 2, "step_time_ms": 2500, "tokens": 4096}'],
        ['{"Global_Step": 1, "time": 1.5, "num_tokens": 4096}', '{"Global_Step": 2, "time": 2.5, "num_tokens": 4096}'],
        [f'{{"level": "info", "data": {{"iter": {n}, "iter_time": "{n}.5", "tokens": 4096}}}}' for n in (1, 2)],
        [f"[\n{ROWS[0]},", f"{ROWS[1]}]"],
        [f'{{"schema": 1, "rows": [{", ".join(ROWS)}]}}'],
    ],
)
def test_json_under_the_usual_names(rows: list[str]) -> None:
    recording = of(*rows)
    assert recording.kind == "series"
    assert points(recording) == [[(1, 1.5), (2, 2.5)]]
    assert [point.tokens for point in recording.runs[0].points] == [4096.0, 4096.0]
    assert recording.remarks == ()


def test_json_lines_between_others_and_broken_ones_are_counted_and_the_first_is_named() -> None:
    recording = of(
        "starting",
        '{"iteration": 1, "seconds": 1.0}',
        '{"iteration": 1, "validation": 2.0}',
        '{"iteration": 2, "seconds": NaN}',
        '{"iteration": 3, "sec',
        '{"iteration": 4, "seconds": 1.0}',
        '{"iteration": 5, "seconds": 1.0}',
    )
    assert iterations(recording) == [[1, 4, 5]]
    assert recording.remarks == (
        "1 line that is not JSON left out, line 5: unterminated string starting at at column 18: "
        '`{"iteration": 3, "sec`',
        "1 row without a usable time left out, line 4",
        "1 row without its time left out, line 3",
        "1 line without JSON left out, line 1",
    )


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (
            ['{"iteration": 1, "seconds": 1.0}', "{iteration: 2}", "{x"],
            "line 2 is not a JSON object: expecting property",
        ),
        (['{"itration": 1, "seconds": 1.0}'], "line 1 has no field for the iteration (iteration, iter, step,"),
        (['{"itration": 1, "seconds": 1.0}'], "it has `itration`, `seconds`; is it `itration`? Rename that"),
        (
            ['{"a": 1}', '{"step": 1, "loss": 2.0}'],
            "line 2 has no field for the time (seconds, step_time, ",
        ),
        (['{"step": 1, "seconds": null}'], "line 1 has no field for the time"),
    ],
)
def test_json_that_cannot_be_used_is_refused_with_the_line(rows: list[str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        of(*rows)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    "moment",
    [
        lambda s: f'"timestamp": {1.7e9 + s}',
        lambda s: f'"ts": {1_700_000_000_000 + round(1000 * s)}',
        lambda s: f'"time": "2026-01-31T12:00:{s:06.3f}Z"',
        lambda s: f'"time": {s}',
    ],
)
def test_where_only_moments_are_told_times_are_those_between(moment: Callable[[float], str]) -> None:
    rows = [f'{{"step": {10 * n}, {moment(n * 1.0 + (n > 5))}}}' for n in range(1, 32)]
    recording = of(*rows, f'{{"step": 10, {moment(50.0)}}}', f'{{"step": 20, {moment(53.0)}}}')
    assert [[round(seconds, 6) for _, seconds in run] for run in points(recording)] == [
        [0.1] * 4 + [0.2] + [0.1] * 25,
        [0.3],
    ]
    assert any("each time is the difference of two lines'" in remark for remark in recording.remarks)


def test_json_fields_that_are_of_no_use_where_they_are_do_no_harm() -> None:
    recording = of(
        '{"iteration": 1, "seconds": 1.0, "job": ["a"], "rank": [0]}',
        '{"iteration": null, "seconds": 9.0, "job": ["a"], "rank": 0}',
        '{"iteration": 2, "seconds": 1.0, "job": ["a"], "rank": 0}',
        '{"iteration": 3, "seconds": 1.0, "job": ["a"], "rank": 0}',
    )
    assert iterations(recording) == [[2, 3]]
    assert "1 row without a usable time left out, line 1" in recording.remarks
    assert "1 row without its iteration left out, line 2" in recording.remarks


def test_ranks_of_json_have_a_series_each() -> None:
    recording = of(
        *(f'{{"step": {n}, "rank": {rank}, "step_time": {1 + rank}}}' for n in range(3) for rank in range(2))
    )
    assert {rank: len(series) for rank, series in recording.runs[0].ranks.items()} == {0: 3, 1: 3}


@pytest.mark.parametrize("document", [True, False], ids=["document", "lines"])
def test_of_json_nothing_is_kept_that_is_not_needed(document: bool) -> None:
    """As `resihp history iterations --json` writes a million rows: they took nine times the file's size."""
    rows = [
        {"iteration": i, "seconds": 0.5, "Tokens": 32768 + i, "samples_digest": f"{i:064x}", "loss": 2.5 + i}
        | {
            "gradient_norm": 1.0 / i,
            "learning_rate": 1e-4 / i,
            "predicted_seconds": 0.5 / i,
            "epoch": 1,
            "skipped": False,
        }
        for i in range(1, 5001)
    ]
    text = json.dumps({"schema": 1, "rows": rows}) if document else "\n".join(map(json.dumps, rows))
    content = text.encode()
    tracemalloc.start()
    try:
        [run] = read(content).runs
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(content)
    assert run.points[-1] == Point(5000, 0.5, tokens=37768.0)
