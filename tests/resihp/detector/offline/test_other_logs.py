"""Logs, exports and rows of other trainers than Megatron-LM, in the forms that their versions print."""

from __future__ import annotations

import json
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
    "lightning": ("epoch,step,train_loss,train_step_timing", lambda i: f"0,{10 * i + 9},2.0,1.25"),
}


@pytest.mark.parametrize("tool", TABLES)
def test_each_tools_table_is_read(tool: str) -> None:
    header, row = TABLES[tool]
    (run,) = of("\n".join([header, *map(row, range(ROWS))])).runs
    assert len(run.points) >= ROWS - 1
    assert [point.seconds for point in run.points] == [pytest.approx(SECONDS)] * len(run.points)
    assert run.interval == 10


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
    assert "at least 20 s apart" in " ".join(recording.remarks)


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


def test_the_log_history_of_a_trainer_state_is_read_where_times_are_in_it() -> None:
    history = [{"loss": 2.0, "epoch": 0.1, "step": 10 * i, "step_time": SECONDS} for i in range(ROWS)]
    (run,) = of(json.dumps({"global_step": 590, "log_history": history}, indent=1)).runs
    assert (len(run.points), run.interval) == (ROWS, 10)
