"""Iterations of scripts that do not use resihp, read from their output as it arrives."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import pytest

from resihp.detector.console.printed_progress import MAX_LINE, PrintedIteration, PrintedProgress
from tests.resihp.detector.offline.test_other_logs import SECONDS, TEXT

ROW_COUNT = 40
MEGATRON_LINE = (
    "[default7]: [2024-05-01 12:00:00] iteration {i:8}/  500000 | consumed samples: 640 | elapsed time per iteration "
    "(ms): 1250.0 | learning rate: 1.0E-04 | global batch size:    64 | lm loss: 2.345678E+00 | loss scale: 1.0 |"
)
TRAINER_LINES: dict[str, tuple[Callable[[int], str], float | None, float | None]] = {
    "Megatron-LM": (lambda i: MEGATRON_LINE.format(i=i), 2.345678, None),
    "torchtitan": (TEXT["torchtitan"], 6.1384, 5856.0),
    "nanotron": (TEXT["nanotron"], 10.6, 17.9e3),
    "DeepSpeed": (TEXT["deepspeed"], None, None),
    "DeepSpeed's pipelines": (TEXT["deepspeed pipeline"], 4.8123, None),
    "NeMo": (TEXT["nemo 2"], 1.2, None),
    "nanoGPT": (TEXT["nanogpt"], 2.1021, None),
    "nanochat": (TEXT["nanochat"], 8.213, 419430.0),
    "MaxText": (TEXT["maxtext"], 10.374, None),
    "timm": (TEXT["timm"], 6.9, None),
    "MLX": (TEXT["mlx"], 2.345, 123.4),
}
"""A line of each trainer, with its loss and its tokens per second."""


def fed(text: str, pieces: random.Random | None = None, per_line_s: float = SECONDS) -> list[PrintedIteration]:
    """The reports for a text that arrives line by line, or in pieces of any size."""
    progress, reports, at = PrintedProgress(), [], 0.0
    for line in text.splitlines(keepends=True):
        at += per_line_s
        parts = [line]
        if pieces is not None:
            place = pieces.randrange(len(line) + 1)
            parts = [line[:place], line[place:]]
        for part in parts:
            reports += progress.feed(part, at)
    return reports


@pytest.mark.parametrize("trainer", TRAINER_LINES)
@pytest.mark.parametrize("cut", [False, True])
def test_iterations_seconds_and_loss_of_each_trainer_are_read(trainer: str, cut: bool) -> None:
    line, loss, tokens = TRAINER_LINES[trainer]
    text = "Loading weights\n" + "".join(f"{line(i)}\nsaving: 3 of 7 files\n" for i in range(1, ROW_COUNT))
    reports = fed(text, random.Random(1) if cut else None, per_line_s=SECONDS / (2 + line(1).count("\n")))
    assert [report.iteration for report in reports] == list(range(1, ROW_COUNT))
    assert [report.seconds for report in reports[1:]] == [pytest.approx(SECONDS, rel=0.01)] * (len(reports) - 1)
    assert {report.loss for report in reports} == {loss}
    assert {report.tokens_per_second for report in reports} == {tokens}
    assert not any(report.goes_back for report in reports)


def test_the_goal_is_read_where_it_is_printed() -> None:
    assert fed("".join(MEGATRON_LINE.format(i=i) + "\n" for i in range(1, 5)))[-1].goal == 500000
    nanotron = TEXT["nanotron"]
    assert fed("".join(nanotron(i) + "\n" for i in range(1, 5)))[-1].goal == 1000


def bar(i: int, total: int = 500, label: str = "") -> str:
    passed = int(i * SECONDS)
    clock = f"{passed // 60:02}:{passed % 60:02}"
    return f"\r{label}{100 * i // total:3}%|#         | {i}/{total} [{clock}<12:13,  1.25s/it]"


def test_a_progress_bar_of_hugging_faces_trainer_is_read_with_the_loss_beside_it() -> None:
    loading = "".join(f"\rLoading checkpoint shards: {50 * i}%|##| {i}/2 [00:0{i}<00:01, 1.00s/it]" for i in range(3))
    progress, reports = PrintedProgress(), []
    reports += progress.feed(loading + "\n", 1.0)
    for i in range(1, ROW_COUNT):
        reports += progress.feed(bar(i), 5 + i * SECONDS)
        if i % 10 == 0:
            evaluation = "".join(f"\r{10 * k}%|#| {k}/10 [00:0{k // 5}<00:02, 5.00it/s]" for k in range(10))
            reports += progress.feed(f"\n{{'loss': {i / 10}, 'grad_norm': 1.0, 'epoch': 0.1}}\n{evaluation}\n", 6 + i)
    assert [report.iteration for report in reports] == list(range(reports[0].iteration, ROW_COUNT - 1))
    assert reports[0].iteration <= 6, "as soon as it has run for longer than any other"
    assert {report.goal for report in reports} == {500}
    assert [(report.iteration, report.loss) for report in reports if report.loss] == [(11, 1.0), (21, 2.0), (31, 3.0)]


def test_lightnings_bar_has_its_loss_within() -> None:
    def line(i: int) -> str:
        return f"\rEpoch 0: {i}%|#| {i}/100 [00:{i:02}<01:00, 1.00it/s, v_num=3, train_loss_step=2.{i:02}]"

    reports = fed("".join(line(i) + "\n" for i in range(1, 20)), per_line_s=1.0)
    assert [report.loss for report in reports] == [pytest.approx(2 + report.iteration / 100) for report in reports]
    assert reports[-1].iteration == 19


def test_a_bar_for_each_epoch_is_counted_on() -> None:
    bars = "".join(bar(i, total=20) for _ in range(3) for i in range(21))
    reports = fed(bars.replace("\r", "\n"))
    assert [report.iteration for report in reports][-50:] == list(range(10, 60))
    assert reports[-1].goal is None, "the number of epochs is not known"
    assert not any(report.goes_back for report in reports)


def test_a_counter_that_goes_back_is_a_restart_and_a_late_line_is_not() -> None:
    line = TEXT["nanogpt"]
    restarted = [*range(1, 21), *range(11, 31)]
    reports = fed("".join(f"{line(i)}\n" for i in restarted))
    assert [report.iteration for report in reports if report.goes_back] == [12]
    assert reports[-1].iteration == 30
    late = [1, 2, 3, 5, 4, 6, 7]
    assert [report.iteration for report in fed("".join(f"{line(i)}\n" for i in late))] == [1, 2, 3, 5, 6, 7]


def test_a_number_that_two_joined_lines_make_is_not_believed() -> None:
    line = TEXT["nanogpt"]
    text = "".join(f"{line(i)}\n" for i in (1, 2, 3, 4400, 5, 6))
    assert [report.iteration for report in fed(text)] == [1, 2, 3, 5, 6]
    cut_off = "".join(MEGATRON_LINE.format(i=i)[: -90 if i == 4 else None] + "\n" for i in range(1, 7))
    assert [report.iteration for report in fed(cut_off)] == [1, 2, 3, 4, 5, 6], "its time is behind the cut"
    halved = "".join(MEGATRON_LINE.format(i=i)[: 60 if i == 4 else None] + "\n" for i in range(1, 7))
    assert [report.iteration for report in fed(halved)] == [1, 2, 3, 5, 6]


def test_a_users_pattern_takes_precedence() -> None:
    pattern = re.compile(r"batch (?P<iteration>[\d,]+) of (?P<goal>\d+): ce=(?P<loss>\S+)")
    progress = PrintedProgress(pattern)
    reports = progress.feed("".join(f"batch 1,00{i} of 2000: ce=nan\n{TEXT['nanogpt'](i)}\n" for i in range(5)), 1.0)
    assert [(report.iteration, report.goal) for report in reports] == [(i, 2000) for i in range(1000, 1005)]
    assert all(math.isnan(report.loss or 0.0) for report in reports)
    nameless = PrintedProgress(re.compile(r"batch (?P<iteration>\w+)"))
    assert nameless.feed("batch one\nbatch two\n", 1.0) == []


def test_a_number_that_no_counter_reaches_is_no_iteration() -> None:
    progress = PrintedProgress(re.compile(r"batch (?P<iteration>\d+) of (?P<goal>\d+)"))
    huge = "9" * 30
    reports = progress.feed(f"batch {huge} of {huge}\nbatch 1 of {huge}\nbatch 2 of {huge}\nbatch {huge}0 of 3\n", 1.0)
    assert [(report.iteration, report.goal) for report in reports] == [(1, None), (2, None)]


@pytest.mark.parametrize(
    "text",
    [
        "Epoch 1 done\nEpoch 2 done\nEpoch 3 done\n",
        "step one\nstep two\nloss is falling\n" * 20,
        '{"a": 1}\n' * 50,
        "iteration 5 of the outer loop\niteration 6 of the outer loop\n",
        "\x1b[31m\x1b[0m\r\r\r\n",
    ],
)
def test_output_without_iterations_reports_none(text: str) -> None:
    assert fed(text) == []


def test_a_line_without_end_does_not_fill_memory() -> None:
    progress = PrintedProgress()
    for _ in range(100):
        progress.feed("x" * 100_000, 1.0)
    assert len(progress._rest) <= MAX_LINE  # the only place where output is kept


@pytest.mark.parametrize(
    ("line", "goal"),
    [
        ("step {}/150 loss 0.5", 150),
        ("iter {}: loss 0.5", None),
        ("[rank0] Step {} Loss=0.5 lr 1e-3", None),
        ("Epoch [1/3], Step [{}/938], Loss: 0.5", None),
        ("train loss 0.5 at iteration {}", None),
    ],
)
def test_lines_of_homemade_loops_are_read(line: str, goal: int | None) -> None:
    progress = PrintedProgress(None)
    printed = [entry for i in (10, 20, 30) for entry in progress.feed(line.format(i) + "\n", float(i))]
    assert [(entry.iteration, entry.loss, entry.goal) for entry in printed] == [(i, 0.5, goal) for i in (10, 20, 30)]


@pytest.mark.parametrize("line", ["val step {} loss 0.4", "validation loss at step {}: 3", "step {} of the setup"])
def test_lines_of_evaluations_and_of_other_steps_are_not(line: str) -> None:
    progress = PrintedProgress(None)
    assert not [entry for i in (10, 20, 30) for entry in progress.feed(line.format(i) + "\n", float(i))]
