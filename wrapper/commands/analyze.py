"""`resihp analyze FILE`: find slow-downs in a log, a table of iteration times, or a per-operation trace.

Reads the file or stdin, recognises the format by content, has the times analysed (`resihp.detector.offline.recordings`,
`series`, `operations`), and shows the result: JSON for programs, a table and two sentences for people, a plot on
request. Data goes to stdout, messages to stderr. Slow imports are inside the functions.
"""

from __future__ import annotations

import io
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resihp.errors import ResihpError, UsageError
from resihp.words import count_of

if TYPE_CHECKING:
    from rich.console import Console

    from resihp.detector.offline.analysis import Analysis, SpeedChange
    from resihp.detector.offline.recordings.recording import Recording

MAX_FILE_BYTES = 2 << 30
SHORTEN_ADVICE = "shorten it first: grep 'elapsed time per iteration' FILE > smaller.log"
MAX_EVENTS_SHOWN = 40
"""Most rows of a table on a terminal; `--json` has all rows."""
MAX_RANKS_SHOWN = 5
MAX_RANKS_NAMED = 8


def register(app: typer.Typer) -> None:
    """Add `resihp analyze` to the command line."""
    app.command()(analyze)


def analyze(
    file: Annotated[Path, typer.Argument(help="Log, CSV, JSON lines or Parquet file; - is stdin.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this file.", show_default=False)] = None,
) -> None:
    """Find slow-downs in the log, timings or trace of a training run.

    FILE may be a log of Megatron-LM, NeMo, DeepSpeed, torchtitan, nanotron or
    MaxText, or one with progress bars; the output of resihp run, for example a
    Slurm job's; a CSV with columns iteration and seconds or milliseconds (and
    rank, tokens, sum_squared_lengths), or exported from TensorBoard or Weights &
    Biases; JSON lines with an iteration and a time; a Parquet file of resihp
    history or db export, or of single operations.

    Example: resihp analyze train.log --plot times.png

    Example: resihp history iterations local-3 --json | resihp analyze -
    """
    analysis, recording = judge(file)
    if as_json:
        from resihp.detector.offline.analysis import as_json as analysis_as_json

        print(json.dumps(_finite(analysis_as_json(analysis)), allow_nan=False))
    else:
        _show(file, analysis)
    if plot is not None:
        _plot(plot, file, analysis, recording)


def judge(file: Path) -> tuple[Analysis, Recording | None]:
    """Return the analysis of a file, and its iteration times; None for a file without iteration times. Raises
    UsageError."""
    try:
        return _judged(file)
    except MemoryError:
        raise UsageError(f"{_named(file)}: too large for the memory of this process; {SHORTEN_ADVICE}") from None


def _judged(file: Path) -> tuple[Analysis, Recording | None]:
    from resihp.detector.offline.recordings import formats
    from resihp.detector.offline.series import analyse

    content = _content(file)
    try:
        if not content.startswith(formats.PARQUET_MAGIC):
            recording = formats.read(content)
        elif (table := _table(content)) is None:
            return _operations(content), None
        else:
            recording = formats.usable(table)
        return analyse(recording.kind, recording.runs, recording.remarks), recording
    except ResihpError as error:
        raise type(error)(f"{_named(file)}: {error}") from None


def _named(file: Path) -> str:
    return "stdin" if str(file) == "-" else str(file)


def _content(file: Path) -> bytes:
    try:
        if str(file) == "-":
            if sys.stdin is None:
                raise UsageError("stdin: is closed; name a file")
            content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
            size = len(content)
        else:
            size = file.stat().st_size
            content = file.read_bytes() if size <= MAX_FILE_BYTES else b""
    except IsADirectoryError:
        raise UsageError(f"{file}: is a folder; name a file in it{_of_export(file)}") from None
    except OSError as error:
        raise UsageError(
            f"{_named(file)}: cannot be read: {error.strerror or error}; name a log, CSV, JSON or parquet file"
        ) from None
    if size > MAX_FILE_BYTES:
        raise UsageError(
            f"{_named(file)}: {'more than ' if str(file) == '-' else f'{size / 2**30:.1f} GiB, more than '}"
            f"{MAX_FILE_BYTES >> 30} GiB; {SHORTEN_ADVICE}"
        )
    return content


def _of_export(folder: Path) -> str:
    """Return advice that names the newest file of iterations in a folder written by `db export`, if there is one."""
    iteration_files = sorted([*folder.glob("iterations.parquet"), *folder.glob("iterations/*.parquet")])
    return f": resihp analyze {iteration_files[-1]}" if iteration_files else ""


_UNREADABLE = "begins like a parquet file but cannot be read as one: {}; is it complete?"


def _table(content: bytes) -> Recording | None:
    """Return the iteration times of a Parquet file with the columns of `history --parquet` or `db export`, or with
    similar names. None for a file of single operations. Raises UsageError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from resihp.detector.offline.recordings.fields import NamedRow, read_rows
    from resihp.detector.offline.recordings.names import has_iteration, is_known, usual_name
    from resihp.detector.offline.traces import COLUMNS

    try:
        file = pq.ParquetFile(io.BytesIO(content))
        names = {name.lower(): name for name in file.schema_arrow.names}
        wanted = {usual: names[name] for name in reversed(names) if is_known(usual := usual_name(name))}
        if "optype" in names or len(set(COLUMNS) & set(names)) > 3 or not has_iteration(wanted):
            return None
        columns = file.read(columns=list(wanted.values())).to_pydict()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(_UNREADABLE.format(str(error).splitlines()[0])) from None
    rows = zip(*(columns[name] for name in wanted.values()), strict=True)
    return read_rows([NamedRow(number, dict(zip(wanted, row, strict=True))) for number, row in enumerate(rows, 1)])


def _operations(content: bytes) -> Analysis:
    import pandas as pd
    import pyarrow as pa

    from resihp.detector.offline import operations

    try:
        frame = pd.read_parquet(io.BytesIO(content))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UsageError(_UNREADABLE.format(str(error).splitlines()[0])) from None
    return operations.analyse(frame)


def _finite(value: Any) -> Any:
    """Return the value with NaN and infinities replaced by None, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- terminal -------------------------------------------------------------------------------------------------------


def _show(file: Path, analysis: Analysis) -> None:
    from resihp.wrapper.output.answers import console, tell
    from resihp.wrapper.output.render import literal

    screen = console()
    if analysis.events:
        _show_events(screen, analysis)
        if len(analysis.events) > MAX_EVENTS_SHOWN:
            screen.print(f"{len(analysis.events) - MAX_EVENTS_SHOWN} more: --json has them all")
    if analysis.ranks:
        _show_ranks(screen, analysis)
    for sentence in sentences(file, analysis):
        tell(screen, sentence)
    for remark in analysis.remarks:
        print(f"resihp: {literal(remark)}", file=sys.stderr)


def sentences(file: Path, analysis: Analysis) -> tuple[str, str]:
    """Return one sentence on the data that were read, and one on the slow-downs found."""
    from resihp.wrapper.output.render import duration

    runs = "one run" if analysis.runs == 1 else f"{analysis.runs} runs"
    read = (
        f"{'stdin' if str(file) == '-' else file.name}: {count_of(analysis.iterations, 'iteration')} of {runs}, "
        f"{duration(analysis.healthy_seconds)} each when healthy, judged from {analysis.known}."
    )
    slow = [event for event in analysis.events if event.verdict == "fail-slow"]
    if not slow:
        findings = "No fail-slow event was found"
    else:
        worst = max(slow, key=lambda event: (event.cost_seconds or 0.0, event.change))
        going_on = sum(event.end is None for event in slow)
        findings = f"{len(slow)} fail-slow {'event' if len(slow) == 1 else 'events'}, "
        findings += f"the worst {_change(worst)} from iteration {worst.iteration}"
        if worst.where is not None or worst.ranks:
            findings += f" ({_where(worst)})"
        if worst.cost_seconds is not None:
            findings += f", {duration(worst.cost_seconds)} lost by it"
        findings += f"; {going_on} not over at the end" if going_on else "; all over before the end"
    if analysis.slowdown is not None:
        findings += f"; without stragglers a step would be {(1 - 1 / analysis.slowdown) * 100:.1f} % shorter"
    return read, findings + "."


def _show_events(screen: Console, analysis: Analysis) -> None:
    from rich.text import Text

    from resihp.detector.offline.analysis import ranked
    from resihp.wrapper.output.tables import Column, show

    columns = (
        *(Column("run", right=True), Column("verdict", kept=True), Column("from", right=True, kept=True)),
        *(Column("noticed", right=True), Column("until", right=True), Column("change", right=True, wraps=True)),
        *(Column("seconds lost", right=True), Column("where", wraps=True, kept=True)),
    )
    colours = {"fail-slow": "bold red", "recovered": "green", "workload": "yellow"}
    rows = [
        (
            str(event.run),
            Text(event.verdict, style=colours[event.verdict]),
            str(event.iteration),
            str(event.detected_at),
            "-" if event.end is None else str(event.end),
            _change(event) + "".join(f", {size * 100:+.0f} % from {first}" for first, size in event.sizes[1:]),
            "-" if event.cost_seconds is None else f"{event.cost_seconds:.1f}",
            _where(event),
        )
        for event in ranked(analysis.events)[:MAX_EVENTS_SHOWN]
    ]
    show(screen, columns, rows)


def _show_ranks(screen: Console, analysis: Analysis) -> None:
    from resihp.wrapper.output.tables import Column, show

    columns = [Column(heading, right=True, kept=True) for heading in ("dp", "stage", "slow-down by it")]
    worst = sorted(analysis.ranks, key=lambda score: -score.slowdown)[:MAX_RANKS_SHOWN]
    show(screen, columns, [(str(score.dp), str(score.stage), f"{score.slowdown:.3f}") for score in worst])


def _change(event: SpeedChange) -> str:
    return f"{event.change * 100:+.0f} %"


def _where(event: SpeedChange) -> str:
    if event.ranks:
        ranks_listed = ", ".join(map(str, event.ranks[:MAX_RANKS_NAMED]))
        return f"ranks {ranks_listed}" + (
            f" and {len(event.ranks) - MAX_RANKS_NAMED} more" * (len(event.ranks) > MAX_RANKS_NAMED)
        )
    if event.where is None:
        return "-"
    named = (("dp", event.where.dp), ("stage", event.where.stage), ("rank", event.where.rank))
    return ", ".join(f"{name} {number}" for name, number in named if number is not None) or "-"


# --- picture --------------------------------------------------------------------------------------------------------


def _plot(plot: Path, file: Path, analysis: Analysis, recording: Recording | None) -> None:
    """Plot iteration times with the slow-downs found in them; for a trace, the slow-down caused by each rank."""
    try:
        figures = import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; type: pip install matplotlib") from None
    figure = figures.Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    if recording is None:
        axes.bar(range(len(analysis.ranks)), [score.slowdown - 1 for score in analysis.ranks], color="tab:blue")
        axes.set(xlabel="rank, by dp and stage", ylabel="slow-down by it, less 1", title=file.name)
    else:
        _draw_times(axes, analysis, recording)
        axes.set(xlabel="iteration", ylabel="seconds", title=file.name)
    try:
        figure.savefig(plot, dpi=120)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{plot}: the plot cannot be written: {reason}; name another file") from None
    print(f"resihp: plot written to {plot}", file=sys.stderr)


def _draw_times(axes: Any, analysis: Analysis, recording: Recording) -> None:
    """Draw all runs one after the other on one axis; each run is shifted to begin where the previous one ended."""
    offset = 0
    colours = {"fail-slow": "tab:red", "workload": "tab:olive"}
    for number, run in enumerate(recording.runs):
        series = run.ranks or {0: run.points}
        first = min(point.iteration for points in series.values() for point in points)
        last = max(point.iteration for points in series.values() for point in points)
        shift = offset - first if number else 0
        for rank, points in series.items():
            x, y = [point.iteration + shift for point in points], [point.seconds for point in points]
            axes.plot(x, y, linewidth=0.8, label=f"rank {rank}" if run.ranks and len(series) <= 10 else None)
        for event in analysis.events:
            if event.run == number and event.verdict in colours:
                end = last if event.end is None else event.end
                axes.axvspan(event.iteration + shift, end + shift, color=colours[event.verdict], alpha=0.2, lw=0)
        if number:
            axes.axvline(first + shift, color="black", linewidth=0.8, linestyle=":")
        offset = last + shift + 1
    if math.isfinite(analysis.healthy_seconds):
        axes.axhline(analysis.healthy_seconds, color="tab:green", linewidth=0.8, linestyle="--", label="healthy")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize="small")
