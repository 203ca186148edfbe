"""Logs, exports and rows of other trainers than Megatron-LM, in the forms that their versions print."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import time
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from resihp.detector.offline.recordings.formats import read
from resihp.detector.offline.recordings.recording import Recording
from resihp.detector.offline.series import analyse
from resihp.errors import UsageError

ROWS = 60
SECONDS = 1.25


def clock(seconds: float) -> str:
    """A logger's moment, with its comma."""
    return (datetime(2025, 6, 16, 22, 30) + timedelta(seconds=seconds)).isoformat(" ", "milliseconds").replace(".", ",")


def passed(seconds: float) -> str:
    """As a progress bar writes it."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes:02}:{rest:02}"


def lines(made: Callable[[int], str]) -> str:
    return "\n".join(["starting", *(made(number) for number in range(ROWS))])


def of(text: str) -> Recording:
    return read(text.encode())


TEXT = {
    "nemo bar": lambda i: (
        f"Epoch 0:   1%|          | {i}/77225 [9:07:58<878:01:48, 1.25s/it, loss=3.1, v_num=, "
        f"reduced_train_loss=3.090, global_step={i}.0, consumed_samples=1.6e+6, train_step_timing in s=1.250]"
    ),
    "nemo 2": lambda i: (
        f"Training epoch 0, iteration {i}/149 | lr: 3e-05 | global_batch_size: 1 | global_step: {i} | "
        "reduced_train_loss: 1.2 | train_step_timing in s: 1.25 | val_loss: 4.1"
    ),
    "nanotron": lambda i: (
        f"01/17/2024 13:48:41 [INFO|DP=0|PP=0|TP=0|ip-26-0-1-2]: iteration: {i} / 1000 | consumed_tokens: 634K | "
        "elapsed_time_per_iteration_ms: 1.25K | tokens_per_sec: 17.9K | lm_loss: 10.6"
    ),
    "maxtext": lambda i: (
        f"I0219 19:34:48.97 136 metric_logger.py:20] completed step: {i}, seconds: 1.250, TFLOP/s/device: 257.9, "
        "Tokens/s/device: 36653.2, total_weights: 196608, loss: 10.374"
    ),
    "maxtext 2023": lambda i: f"completed step: {i}, seconds: 1.250, TFLOP/s: 36.722, loss: 2.191",
    "nanogpt": lambda i: f"iter {i}: loss 2.1021, time 1250.00ms, mfu 12.30%",
    "llm.c": lambda i: (
        f"step {i:4}/18865 | loss 10.9 (+nanz)| norm 33.2 (+nanz)| lr 8e-07 | 1250.00 ms | 53.1% bf16 MFU"
    ),
    "lit-llama": lambda i: f"iter {i} step {i}: loss 2.1, time: 1250.00ms",
    "verl": lambda i: (
        f"(TaskRunner pid=12) step:{i} - actor/loss:0.01 - timing_s/gen:0.50 - timing_s/step:1.25 - perf/mfu:0.1"
    ),
    "paddle": lambda i: (
        f"[2024-05-01 10:00:00,123] [    INFO] - loss: 1.2, learning_rate: 3e-05, global_step: {i}, "
        "interval_runtime: 1.25, interval_samples_per_second: 6.4, interval_steps_per_second: 0.8, epoch: 0.1"
    ),
    "mindformers": lambda i: (
        f"2024-05-01 10:00:00,123 - INFO - {{ Epoch:[{1 + i // 20:3}/  3], step:[{1 + i % 20:5}/   20], "
        "loss: 1.234, per_step_time: 1250ms, lr: 1e-06, overflow cond: False }"
    ),
    "olmo-core": lambda i: (
        f"{clock(SECONDS * i)}\tn1:0\tconsole_logger:55\tINFO\t[step={i}/1000,epoch=1]\n    train/CE loss=2.2"
    ),
    "deepspeed pipeline": lambda i: f"steps: {i} loss: 4.8123 iter time (s): 1.250 samples/sec: 12.345",
    "nanochat": lambda i: (
        f"step {i:05d}/21400 ({i / 214:.2f}%) | loss: 8.213 | lrm: 1.00 | dt: 1250.00ms | tok/sec: 419,430 | "
        f"mfu: 48.10 | total time: {i * SECONDS / 60:.2f}m"
    ),
    "modded-nanogpt": lambda i: f"step:{i}/1750 train_time:{1250 * i}ms step_avg:1249.00ms",
    "detectron2": lambda i: (
        f"[06/16 22:30:50 d2.utils.events]:  eta: 1:00:00  iter: {i}  total_loss: 1.2  time: 1.2500  "
        "last_time: 0.30 data_time: 0.01  lr: 1e-3 max_mem: 1234M"
    ),
    "mmcv 1": lambda i: (
        f"2021-06-16 22:30:50,322 - mmdet - INFO - Epoch [{1 + i // 20}][{1 + i % 20}/20]\tlr: 1.978e-03, "
        "eta: 5:00:00, time: 1.250, data_time: 0.05, memory: 3456, loss: 1.2"
    ),
    "mmcv 1 without epochs": lambda i: (
        f"2021-06-16 22:30:50,322 - mmseg - INFO - Iter [{i}/160000]\tlr: 1.978e-03, eta: 5:00:00, time: 1.250, "
        "data_time: 0.05, memory: 3456, decode.loss_ce: 1.2"
    ),
    "timm": lambda i: (
        f"Train: {i // 20} [{i % 20:4d}/20 ({5 * (i % 20):3d}%)]  Loss: 6.9 (6.9)  Time: 1.250s,  742.0/s  "
        "(0.350s,  731.0/s)  LR: 1.0e-3  Data: 0.01 (0.02)"
    ),
    "imagenet of pytorch's examples": lambda i: (
        f"Epoch: [{i // 20}][{i % 20:4d}/20]\tTime  1.250 ( 0.350)\tData  0.010 ( 0.020)\tLoss 6.9e+00 (6.9e+00)"
    ),
    "metric logger of mae and dino": lambda i: (
        f"Epoch: [{i // 20}]  [{i % 20:4d}/20]  eta: 0:10:00  lr: 0.0001  loss: 6.9  time: 1.2500  data: 0.0001  "
        "max mem: 12345"
    ),
    "mlx": lambda i: f"Iter {i}: Train loss 2.345, Learning Rate 1.000e-05, It/sec 0.800, Tokens/sec 123.4",
    "json of ms-swift": lambda i: json.dumps({"global_step/max_steps": f"{i}/60", "elapsed_time": f"{1.25 * i:.2f}s"}),
    "json with units in names": lambda i: f'{{"Step": {i}, "perf/Step Time (ms)": 1250.0}}',
    "torchtitan": lambda i: (
        f"[rank0]:[titan] {clock(SECONDS * i)} - root - INFO - \x1b[31mstep: {i:2}  \x1b[32mloss:  6.1384  "
        "\x1b[33mmemory: 49.66GiB(52.28%)  \x1b[34mtps: 5,856  \x1b[36mtflops: 339.16  \x1b[35mmfu: 34.29%\x1b[39m"
    ),
    "torchtitan of eight unmarked ranks": lambda i: "\n".join(
        [f"[titan] {clock(SECONDS * i)} - root - INFO - step: {i:2}  loss:  7.62585  grad_norm: 26.6250"] * 8
    ),
    "deepspeed": lambda i: (
        f"[{clock(SECONDS * i)}] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0, lr=[5e-05], mom=[0.9]\n"
        f"[{clock(SECONDS * i)}] [INFO] [timer.py:258:stop] epoch=0/micro_step={4 * i}/global_step={i}, "
        "RunningAvgSamplesPerSec=16.1, CurrSamplesPerSec=16.8, MemAllocated=0.02GB"
    ),
    "deepspeed 0.6": lambda i: (
        f"[{clock(SECONDS * i)}] [INFO] [timer.py:189:stop] 0/{i}, SamplesPerSec=83.4, MemA=0.2GB"
    ),
    "fairseq": lambda i: (
        f"2021-05-01 10:00:00 | INFO | train_inner | epoch 001: {i} / 500 loss=3, ups=0.8, num_updates={i}"
    ),
    "tf slim": lambda i: f"INFO:tensorflow:global step {i}: loss = 60.8808 (1.250 sec/step)",
    "dicts of python": lambda i: f"INFO:root:{{'step': {i}, 'step_time': 1.25, 'loss': nan}}",
    "json behind srun's label": lambda i: f'0: {{"step": {i}, "step_time": 1.25}}',
    "json of several ranks": lambda i: "\n".join(f'{r}: {{"step": {i}, "step_time": 1.25}}' for r in range(4)),
    "json with a rate": lambda i: f'{{"step": {i}, "train/steps_per_second": 0.8}}',
    "json of wandb": lambda i: (
        f'{{"_step": {3 * i}, "train/global_step": {i}, "perf/step_time": 1.25, "eval/step_time": 9}}'
    ),
    "milliseconds by the clock": lambda i: f'{{"step": {i}, "step_time": 1250.0, "timestamp": {1.7e9 + SECONDS * i}}}',
    "microseconds since 1970": lambda i: f'{{"step": {i}, "ts": {1_718_570_000_000_000 + 1_250_000 * i}}}',
    "nanoseconds since 1970": lambda i: f'{{"step": {i}, "ts": {1_718_570_000_000_000_000 + 1_250_000_000 * i}}}',
    "microseconds by the clock": lambda i: f'{{"step": {i}, "step_time": 1250000, "timestamp": {1.7e9 + SECONDS * i}}}',
    "json with a field without a name": lambda i: f'{{"": {i}, "step": {i}, "step_time": 1.25}}',
    "a clock set back": lambda i: f'{{"step": {i}, "timestamp": {1.7e9 + SECONDS * i - 3600 * (i > 40)}}}',
}


@pytest.mark.parametrize("tool", TEXT)
def test_each_trainers_line_is_read(tool: str) -> None:
    (run,) = of(lines(TEXT[tool])).runs
    assert len(run.points) >= ROWS - 2
    assert {point.iteration for point in run.points} <= set(range(ROWS + 1))
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, abs=1e-4)] * len(run.points)
    assert run.interval == 1


TABLES = {
    "tensorboard": ("Wall time,Step,Value", lambda i: f"{1.7e9 + SECONDS * 10 * i},{10 * i},2.3"),
    "wandb chart": (
        '"Step","run-1 - perf/step_time","run-1 - perf/step_time__MIN","run-1 - perf/step_time__MAX"',
        lambda i: f'"{10 * i}","1.25","1.2","1.3"',
    ),
    "wandb table": (
        "_step,_runtime,_timestamp,train/loss,train/global_step",
        lambda i: f"{i},{i},{1.7e9 + 12.5 * i},2.5,{10 * i}",
    ),
    "decimal commas": ("iteration;seconds", lambda i: f"{10 * i};1,25"),
    "decimal commas and thousands": ("Step;Step_Time_ms", lambda i: f"{10 * i};1.250,00"),
    "units in a header": ("Iteration,Step Time [ms]", lambda i: f"{10 * i},1250"),
    "pandas' index": (",step,step_time", lambda i: f"{i},{10 * i},1.25"),
    "a column without a name": ("step,step_time,", lambda i: f"{10 * i},1.25,{'ab'[i % 2]}"),
    "thousands in quotes": ("step,step_time_ms", lambda i: f'{10 * i},"1,250.0"'),
    "thousands in quotes under our names": ("iteration,milliseconds", lambda i: f'{10 * i},"1,250.0"'),
    "thousands of iterations": ("step,step_time", lambda i: f'"{10 * i:,}",1.25'),
    "lightning": ("epoch,step,train_loss,train_step_timing", lambda i: f"0,{10 * i + 9},2.0,1.25"),
}


@pytest.mark.parametrize("tool", TABLES)
def test_each_tools_table_is_read(tool: str) -> None:
    header, row = TABLES[tool]
    (run,) = of("\n".join([header, *map(row, range(ROWS))])).runs
    assert len(run.points) >= ROWS - 1
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS)] * len(run.points)
    assert run.interval == 10


NAMES = {
    "iter,dt": "1.25",
    "step,batch_time": "1.25",
    "step,train_step_time_ms": "1250",
    "step,time_per_step_ms": "1250",
    "step,avg_step_time": "1.25",
    "step,step_time_sec": "1.25",
    "step,sec_per_batch": "1.25",
    "step,iteration_duration": "1.25",
    "step,walltime_per_step": "1.25",
    "step,time/iteration": "1.25",
    "Step,Time/Step (s)": "1.25",
    "step,iter_time(s)": "1.25",
    "iteration,iteration_time_us": "1250000",
    "Iteration,Elapsed Time (s)": "1.25",
    "step,steps_per_s": "0.8",
    "global_step,it_per_sec": "0.8",
    "steps,step_time": "1.25",
    "it,step_time": "1.25",
    "batch,step_time": "1.25",
    "batch_idx,batch_time": "1.25",
    "step,time,step_time_ms": "9,1250",
}


@pytest.mark.parametrize("header", NAMES)
def test_usual_names_of_columns_are_known_with_their_units(header: str) -> None:
    recording = of("\n".join([header, *(f"{i},{NAMES[header]}" for i in range(ROWS))]))
    assert {round(point.seconds, 9) for point in recording.runs[0].points} == {SECONDS}
    assert len(recording.runs[0].points) == ROWS


@pytest.mark.parametrize(
    "header",
    ["step,eval_step_time", "step,data_time", "step,val/step_time", "step,optimizer_step_time", "step,epoch_time"],
)
def test_times_of_something_else_than_an_iteration_are_not_taken(header: str) -> None:
    with pytest.raises(UsageError):
        of("\n".join([header, *(f"{i},1.25" for i in range(ROWS))]))


def test_a_clock_that_starts_again_when_the_job_does_is_still_a_clock() -> None:
    """Requeued in iteration 50, with iterations that go on: 12 s each were read as 12, 24, ... 600."""
    rows = [{"iter": i, "time": 12.0 * (i % 50 + 1)} for i in range(100)]
    (run,) = of("\n".join(map(json.dumps, rows))).runs
    assert [point.seconds for point in run.points] == [12.0] * 98


def test_times_that_are_slow_for_a_while_are_no_clock() -> None:
    rows = [{"iter": i, "time": 1.0 + 4.0 * (30 <= i < 60)} for i in range(100)]
    (run,) = of("\n".join(map(json.dumps, rows))).runs
    assert [point.seconds for point in run.points] == [row["time"] for row in rows]


def test_a_coarse_clock_that_starts_again_is_read_over_windows_of_either_part() -> None:
    passed_s = [int(SECONDS * (i % 200)) for i in range(400)]
    (run,) = of("\n".join(f"Epoch 0: 1%|# | {i}/500 [{passed(s)}<1:00, 1.25s/it]" for i, s in enumerate(passed_s))).runs
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, rel=0.08)] * len(run.points)
    assert len(run.points) > 20


def test_a_column_of_whole_seconds_is_read_over_windows() -> None:
    """As spreadsheets hold them, as text: of 1.25 s a second was 1 s, and the next one 2 s."""
    recording = of("\n".join(["step,_timestamp", *(f"{i},{1_718_570_000 + int(SECONDS * i)}" for i in range(400))]))
    (run,) = recording.runs
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, rel=0.06)] * len(run.points)
    assert "`_timestamp` has whole seconds only: times are means over at least 20 s" in recording.remarks


def evaluating(evaluation_s: float) -> str:
    """Progress bars of Hugging Face's Trainer: 300 steps of 2 s, every 50 an evaluation of 100 batches."""
    bars = []
    for i in range(1, 301):
        bars.append(f"{i // 3}%|# | {i}/300 [{passed(2 * i + evaluation_s * (i // 50))}<10:00,  2.00s/it]")
        if i % 50 == 0:
            bars += [f"{j}%|# | {j}/100 [{passed(evaluation_s * j / 100)}<00:10,  0.20s/it]" for j in range(1, 101)]
    return "\r".join(bars)


def test_of_several_progress_bars_that_of_training_is_read() -> None:
    """Not that of evaluation, though it has twice as many lines."""
    recording = of(evaluating(20.0))
    (run,) = recording.runs
    times = sorted(point.seconds for point in run.points)
    assert times[len(times) // 2] == pytest.approx(2.0, rel=0.06)
    assert run.points[-1].iteration > 280
    assert any("2 progress bars" in remark and "300 iterations" in remark for remark in recording.remarks)


def test_a_bar_of_epochs_around_that_of_training_is_not_read() -> None:
    bars = []
    for epoch in range(4):
        bars.append(f"Total: {25 * epoch}%|# | {epoch}/4 [{passed(250 * epoch)}<1:00, 250.00s/it]")
        bars += [f"Steps: {i}%|# | {i}/200 [{passed(SECONDS * i)}<1:00, 1.25s/it]" for i in range(1, 201)]
    (run,) = of("\r".join(bars)).runs
    assert run.points[-1].iteration > 180
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, rel=0.08)] * len(run.points)


@pytest.mark.parametrize("unit", ["it", "steps", "batches", " steps"])
@pytest.mark.parametrize("total", [True, False], ids=["with a total", "without"])
def test_progress_bars_of_any_unit(unit: str, total: bool) -> None:
    def bar(i: int) -> str:
        if total:
            return f"{i}%|# | {i}/500 [{passed(SECONDS * i)}<10:00, 1.25s/{unit}]"
        return f"{i}{unit} [{passed(SECONDS * i)}, 1.25s/{unit}]"

    (run,) = of("\r".join(map(bar, range(400)))).runs
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, rel=0.06)] * len(run.points)
    assert len(run.points) > 20


def test_a_progress_bar_is_read_over_windows_longer_than_its_clock_is_coarse() -> None:
    """Of Hugging Face's Trainer: its dicts have no times, a bar of loaded shards is not one of training."""
    shards = "\r".join(f"Loading checkpoint shards: {i}%|## | {i}/3 [00:0{i}<00:00,  1.67s/it]" for i in range(4))
    bars = "\r".join(
        f" {i // 5}%|#         | {i}/500 [{passed(SECONDS * i + (i > 200) * (i - 200))}<12:13,  1.67s/it]"
        for i in range(401)
    )
    recording = of(shards + "\n" + bars + "\n{'loss': 1.2, 'learning_rate': 1e-5, 'epoch': 0.1}\n")
    (run,) = recording.runs
    healthy = [point.seconds for point in run.points if point.iteration <= 200]
    slow = [point.seconds for point in run.points if point.iteration > 230]
    assert healthy == [pytest.approx(SECONDS, rel=0.06)] * len(healthy)
    assert slow == [pytest.approx(SECONDS + 1, rel=0.06)] * len(slow)
    assert run.interval == 12
    assert "`elapsed_time` has whole seconds only: times are means over at least 20 s" in " ".join(recording.remarks)


def test_a_line_of_json_before_a_log_does_not_make_it_json() -> None:
    (run,) = of('{"step": 0, "config": 1}\n' + lines(TEXT["torchtitan"])).runs
    assert len(run.points) == ROWS - 1


def test_a_long_line_of_anything_takes_no_time() -> None:
    began = time.process_time()
    for text in ("[a<" * 200_000, "|" * 400_000 + "[<", "{'a': [" * 50_000, "step " * 100_000 + "ms |"):
        with pytest.raises(UsageError):
            of("x\n" + text)
    assert time.process_time() - began < 10.0


def test_a_bar_that_begins_again_with_each_epoch_is_counted_on() -> None:
    bars = "\n".join(
        f"Epoch {epoch}:  1%|# | {i}/50 [{passed(30 * i)}<1:01:48, 0.03it/s, v_num=0]"
        for epoch in range(3)
        for i in range(1, 51)
    )
    (run,) = of(bars).runs
    assert run.points[-1].iteration == 150
    assert {point.seconds for point in run.points} == {30.0}
    assert [point.iteration for point in run.points] == sorted({point.iteration for point in run.points})


@pytest.mark.parametrize("counter", ["step", "iter"])
def test_a_line_each_50_iterations_counts_for_50_whichever_counter_begins_again(counter: str) -> None:
    """446 s lost were 9, and the epoch's counter made each epoch a run."""
    rows = []
    for epoch in range(8):
        for i in range(50, 501, 50):
            step = 500 * epoch + i
            seconds = 0.45 + 0.3 * (1500 < step <= 3000) + 0.001 * (step % 7)
            row = {"lr": 1e-4, "time": seconds, "epoch": epoch + 1, "iter": i, "step": step}
            rows.append(
                json.dumps({name: value for name, value in row.items() if counter in (name, "iter") or name != "step"})
            )
    recording = of("\n".join(rows))
    analysis = analyse("series", recording.runs, recording.remarks)
    assert (analysis.runs, analysis.iterations) == (1, 4000)
    (event,) = [event for event in analysis.events if event.verdict == "fail-slow"]
    assert event.cost_seconds == pytest.approx(450, rel=0.05)
    assert (event.iteration, event.end) == (1501, 3001)


def test_a_counter_that_falls_within_an_epoch_is_another_run() -> None:
    rows = [f'{{"iter": {i}, "epoch": 1, "seconds": {1 + i / 1000}}}' for i in range(60)]
    rows += [f'{{"iter": {i}, "epoch": 1, "seconds": {2 + i / 1000}}}' for i in range(40, 90)]
    assert [len(run.points) for run in of("\n".join(rows)).runs] == [60, 50]


def test_times_of_a_window_are_told_from_those_of_an_iteration_by_the_clock() -> None:
    rows = [f'{{"step": {50 * i}, "elapsed": 25.0, "timestamp": {1.7e9 + 25 * i}}}' for i in range(ROWS)]
    recording = of("\n".join(rows))
    assert {point.seconds for point in recording.runs[0].points} == {0.5}
    assert "`elapsed` is the time of all 50 iterations since the row before" in recording.remarks


def test_times_that_disagree_with_the_clock_for_no_known_reason_are_said() -> None:
    recording = of("\n".join(f'{{"step": {i}, "step_time": 0.1, "timestamp": {1.7e9 + 1.5 * i}}}' for i in range(ROWS)))
    assert {point.seconds for point in recording.runs[0].points} == {0.1}
    assert any("0.067 times the time that passed by `timestamp`" in remark for remark in recording.remarks)


def test_a_csv_of_several_jobs_has_a_run_for_each() -> None:
    """As a Parquet file has; of two jobs that began with the same iteration one was left out."""
    rows = [f"{job},{i},{1 + job + i / 1000}" for i in range(ROWS) for job in range(2)]
    recording = of("\n".join(["job,iteration,seconds", *rows]))
    assert [len(run.points) for run in recording.runs] == [ROWS, ROWS]


def test_seconds_that_may_be_milliseconds_are_said() -> None:
    recording = of("\n".join(f'{{"step": {i}, "step_time": 1250.0}}' for i in range(ROWS)))
    assert recording.runs[0].points[0].seconds == 1250.0
    assert any("`milliseconds`" in remark for remark in recording.remarks)


def test_what_we_print_counts_for_iterations_that_are_not_printed() -> None:
    """At most one line a second is printed, each with one iteration's time."""
    text = "\n".join(
        f"iteration {i}  loss 2.0000  18.2k tokens/s  {0.2 + 0.2 * (2000 < i <= 3000):.2f} s" for i in range(1, 5001, 5)
    )
    recording = of(text)
    (event,) = [event for event in analyse("resihp-log", recording.runs).events if event.verdict == "fail-slow"]
    assert event.cost_seconds == pytest.approx(200, rel=0.05)


def test_what_slow_iterations_cost_does_not_depend_on_how_many_fast_ones_are_printed() -> None:
    """Of fast ones one in ten is printed, of slow ones each: 440 s lost were 1,789, and 2,400 iterations were 591."""
    printed, waited_s = [], 1.0
    for i in range(1, 2401):
        seconds = 0.1 if i <= 2000 else 1.2
        waited_s += seconds
        if waited_s >= 1.0:
            waited_s = 0.0
            printed.append(f"iteration {i}  loss 4.0312  18.2k tokens/s  {seconds:.2f} s")
    recording = of("\n".join(printed))
    analysis = analyse("resihp-log", recording.runs, recording.remarks)
    (event,) = [event for event in analysis.events if event.verdict == "fail-slow"]
    assert event.cost_seconds == pytest.approx(440, rel=0.02)
    assert analysis.iterations == 2400


def test_a_row_for_each_of_uneven_numbers_of_iterations_counts_for_these() -> None:
    """Two rows, 10 and 30 iterations: a slow iteration costs the same whichever it is in."""
    labels = [20 * i - 10 * (i % 2) for i in range(1, 201)]
    rows = [f"{label},{1.0 + 0.01 * (label % 3) + 1.0 * (1000 < label <= 2000)}" for label in labels]
    recording = of("\n".join(["iteration,seconds", *rows]))
    analysis = analyse("series", recording.runs, recording.remarks)
    (event,) = [event for event in analysis.events if event.verdict == "fail-slow"]
    assert event.cost_seconds == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("form", ["log", "json"])
def test_of_more_ranks_than_a_rack_has_one_clock_is_read(form: str) -> None:
    """128 ranks, each late by its own while, in any order: 1.25 s were 1.30."""
    made = []
    for i in range(30):
        for rank in sorted(range(128), key=lambda rank: (rank * 7919 + i * 31) % 128):
            moment = SECONDS * i + 0.01 * rank
            if form == "log":
                made.append(f"[rank{rank}]:[titan] {clock(moment)} - root - INFO - step: {i}  loss:  6.1")
            else:
                made.append(f'{rank}: {{"step": {i}, "timestamp": {1.7e9 + moment}}}')
    recording = of("\n".join(made))
    assert f"{127 * 30} lines of other ranks left out" in recording.remarks
    (run,) = recording.runs
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS, abs=1e-4)] * 29


def test_lines_with_a_mark_of_their_own_each_are_all_read_in_time() -> None:
    """`cat -n` before a log, whose numbers look like those of ranks."""
    began = time.process_time()
    (run,) = of("\n".join(f"{i}: iter {i}: loss 2.1, time 1250.00ms, mfu 12%" for i in range(20_000))).runs
    assert len(run.points) == 20_000
    assert time.process_time() - began < 5.0


def test_another_rank_of_a_log_is_not_heard_twice() -> None:
    made = [
        f"[rank{rank}]:[titan] {clock(SECONDS * i + rank / 100)} - root - INFO - step: {i}  loss:  6.1"
        for i in range(ROWS)
        for rank in range(2)
    ]
    recording = of("\n".join(made))
    assert "60 lines of other ranks left out" in recording.remarks
    assert len(recording.runs[0].points) == ROWS - 1


@pytest.mark.parametrize(
    ("text", "named", "instead"),
    [
        (
            "{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 1e-05, 'epoch': 0.01}\n" * 3,
            "Hugging Face",
            "progress bars",
        ),
        ("{'loss': '1.2', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.1'}\n", "Hugging Face", "CSV"),
        (
            json.dumps(
                {"global_step": 9, "log_history": [{"loss": 2.0, "epoch": 0.1, "step": i} for i in range(9)]}, indent=1
            ),
            "trainer_state.json of Hugging Face's Trainer: its log_history has steps and losses, no times",
            "progress bars",
        ),
        ('"Step","run-1 - train/loss","run-1 - train/loss__MIN"\n"1","2","2"\n', "Weights & Biases", "_timestamp"),
        ('"Step","a - step_time","b - step_time"\n"1","2","2"\n', "`step_time` of 2 runs", "export one run"),
    ],
)
def test_what_has_no_times_is_refused_by_name_with_what_to_give_instead(text: str, named: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        of(text)
    assert named in str(refused.value)
    assert instead in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            gzip.compress(b"iter 1: loss 2.1, time 1250.00ms"),
            "compressed with gzip; type: zcat FILE | resihp analyze -",
        ),
        (lzma.compress(b"iter 1: loss 2.1"), "compressed with xz; type: xzcat FILE | resihp analyze -"),
        (bz2.compress(b"iter 1: loss 2.1"), "compressed with bzip2; type: bzcat FILE | resihp analyze -"),
        (b"\x28\xb5\x2f\xfd\x00\x00", "compressed with zstd; type: zstdcat FILE | resihp analyze -"),
        (
            b'\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK"\t\x00\x00\xc0\x1e\xb9\x9b\xd9A\x1a\rbrain.Event:2',
            "TensorBoard's event file: export the scalar as CSV",
        ),
        (b"SQLite format 3\x00", "resihp history iterations JOB --json | resihp analyze -"),
    ],
    ids=["gzip", "xz", "bzip2", "zstd", "tfevents", "sqlite"],
)
def test_a_file_that_is_no_text_is_named_with_what_to_type(content: bytes, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(content)
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


def test_a_trainer_state_whose_last_row_has_a_rate_of_the_whole_run_has_no_times() -> None:
    history: list[dict[str, object]] = [{"loss": 2.0, "learning_rate": 1e-5, "epoch": 0.1, "step": i} for i in range(9)]
    history.append({"epoch": 1.0, "step": 9, "train_runtime": 20.0, "train_steps_per_second": 0.45, "train_loss": 2.0})
    with pytest.raises(UsageError, match=r"trainer_state\.json of Hugging Face's Trainer"):
        of(json.dumps({"global_step": 9, "log_history": history}))


def test_the_log_history_of_a_trainer_state_is_read_where_times_are_in_it() -> None:
    history = [{"loss": 2.0, "epoch": 0.1, "step": 10 * i, "step_time": SECONDS} for i in range(ROWS)]
    (run,) = of(json.dumps({"global_step": 590, "log_history": history}, indent=1)).runs
    assert (len(run.points), run.interval) == (ROWS, 10)
