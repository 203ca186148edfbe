"""An exception is read out of a traceback in whatever form it was printed, and out of nothing else."""

from __future__ import annotations

import io
import json
import time
import traceback
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.traceback import Traceback

from resihp.detector.diagnosis.clues import read_log
from resihp.detector.diagnosis.diagnosis import diagnose
from resihp.detector.diagnosis.reports import Report


class DataError(Exception):
    pass


def raised(act: Callable[[], object]) -> Exception:
    with pytest.raises(Exception, match=r".*") as caught:
        act()
    return caught.value


def throw(error: Exception) -> None:
    raise error


def chained() -> None:
    try:
        throw(DataError("shard 17 is empty"))
    except DataError as error:
        raise RuntimeError("step 3 failed") from error


def of_a_local_class() -> None:
    class LoaderError(Exception):
        pass

    raise LoaderError("shard 17 is empty")


def in_a_group() -> None:
    inner = ExceptionGroup("of a loader", [raised(lambda: throw(KeyError("three")))])  # type: ignore[list-item]
    raise ExceptionGroup("unhandled errors", [ValueError("one"), raised(lambda: throw(TypeError("two"))), inner])  # type: ignore[list-item]


def noted() -> None:
    error = ValueError("shard 17 is empty")
    error.add_note("seen by loader 3\nTypeError: not this one")
    raise error


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def in_a_box(error: BaseException, width: int = 80, **options: object) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=False, legacy_windows=False).print(
        Traceback.from_exception(type(error), error, error.__traceback__, width=min(width, 100), **options)  # type: ignore[arg-type]
    )
    return file.getvalue()


def behind(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def errors(text: str) -> list[str]:
    return [clue.named["error"] for clue in read_log(text) if clue.raised]


CHAIN = [f"{__name__}.DataError: shard 17 is empty", "RuntimeError: step 3 failed"]
GROUP = ["ValueError: one", "TypeError: two", "KeyError: 'three'"]
PREFIXES = ("", "[rank3]: ", "3: ", "[default3]:", "    ")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_pythons_own(prefix: str) -> None:
    of_a_class = f"{__name__}.of_a_local_class.<locals>.LoaderError: shard 17 is empty"
    assert errors(behind(prefix, printed(raised(of_a_local_class)))) == [of_a_class]
    assert errors(behind(prefix, printed(raised(chained)))) == CHAIN
    assert errors(behind(prefix, printed(raised(noted)))) == ["ValueError: shard 17 is empty"]
    assert errors(behind(prefix, printed(raised(in_a_group)))) == GROUP


def test_a_class_of_the_script_in_a_function() -> None:
    text = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 8, in <module>\n    main()\n'
    error = "__main__.main.<locals>.DataError: shard 17 is empty"
    assert errors(f"{text}{error}\n") == [error]
    assert diagnose([Report(rank=3, node="n0", exit=1, log=text + error)]).cause == f"rank 3 raised {error}"


def test_of_a_group_its_last_exception_counts() -> None:
    verdict = diagnose([Report(rank=3, node="n0", exit=1, log=printed(raised(in_a_group)))])
    assert verdict.cause == "rank 3 raised KeyError: 'three'"


def test_lines_of_other_ranks_between() -> None:
    one = behind("[rank0]: ", printed(raised(noted))).splitlines()
    other = behind("[rank1]: ", printed(raised(of_a_local_class))).splitlines()
    mixed = "\n".join(line for pair in zip(one, other, strict=False) for line in pair)
    assert len(errors(mixed)) == 2


def test_times_before_each_line() -> None:
    lines = printed(raised(chained)).splitlines()
    stamped = "".join(f"2025-03-03T09:26:51.{i:06d}Z [rank3]: {line}\n" for i, line in enumerate(lines))
    assert errors(stamped) == CHAIN


def test_a_head_that_a_logger_wrote_before_the_first_line_alone() -> None:
    assert errors(f"2025-03-03 09:26:51,123 - train - ERROR - {printed(raised(noted))}") == [
        "ValueError: shard 17 is empty"
    ]


LOGURU = """\
2025-03-03 09:26:51.123 | ERROR    | __main__:<module>:12 - An error has been caught in function '<module>':
Traceback (most recent call last):

> File "/home/me/train.py", line 12, in <module>
    main()
    └ <function main at 0x7f0a5c>

  File "/home/me/train.py", line 8, in main
    raise DataError("shard 17 is empty")
          └ <class '__main__.DataError'>

__main__.DataError: shard 17 is empty
2025-03-03 09:26:52.001 | INFO     | __main__:<module>:13 - leaving
"""


def test_logurus() -> None:
    assert errors(LOGURU) == ["__main__.DataError: shard 17 is empty"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu memory"),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "cuda ecc"),
        ("ValueError: bad sample", "exception"),
    ],
)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_rays_of_a_task(prefix: str, error: str, code: str) -> None:
    kind = error.partition(":")[0].rpartition(".")[2]
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 8, in <module>\n    ray.get(tasks)\n'
        f"ray.exceptions.RayTaskError({kind}): ray::Worker.step() (pid=2217, ip=10.0.0.2)\n"
        f'  File "/home/me/worker.py", line 5, in step\n    loss.backward()\n{error}\nbye\n'
    )
    assert errors(behind(prefix, text))[-1] == error
    assert diagnose([Report(rank=3, node="n0", device=3, exit=1, log=behind(prefix, text))]).code == code


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("show_locals", [False, True])
def test_richs_boxes(width: int, show_locals: bool) -> None:
    ascii_box = str.maketrans("╭╮╰╯─│❱", "++++-|>")
    for prefix in PREFIXES:
        box = behind(prefix, in_a_box(raised(chained), width, show_locals=show_locals))
        expected = ["DataError: shard 17 is empty", "RuntimeError: step 3 failed"]
        assert errors(box) == errors(box.translate(ascii_box)) == expected
    assert errors(in_a_box(raised(in_a_group), width))[-1] == "KeyError: 'three'"
    syntax = raised(lambda: compile("a = (\n", "x.py", "exec"))
    assert errors(in_a_box(syntax, width))[-1].startswith("SyntaxError: ")


def test_an_error_that_rich_wrapped_is_read_whole() -> None:
    words = "CUDA error: the shard has been read and an illegal memory access was encountered in it"
    log = in_a_box(raised(lambda: throw(RuntimeError(words))))
    assert f"RuntimeError: {words}" not in log, "it was not wrapped"
    [clue] = [clue for clue in read_log(log) if clue.raised]
    assert (clue.kind, clue.named["error"]) == ("illegal access", f"RuntimeError: {words}")


def test_one_line_of_json() -> None:
    for key in ("exception", "exc_info"):
        text = json.dumps({"event": "failed", key: printed(raised(chained)), "level": "error"})
        assert errors(f'{{"event": "step 3"}}\n{text}\n') == [CHAIN[-1]]
    text = json.dumps({"exception": [{"exc_type": "DataError", "exc_value": 'shard "17" is empty', "frames": []}]})
    assert errors(text) == ['DataError: shard "17" is empty']


@pytest.mark.parametrize(
    "text",
    [
        "the words Traceback (most recent call last) stand in a sentence\nValueError: only talked about\n",
        '{"event": "saw Traceback (most recent call last) in the log of another"}\nValueError: only talked about\n',
        "╭─── Traceback (most recent call last) ───╮\n│ train.py:8 in main │\n╰───╯\niteration 17 of 100\n",
        "╭─── Traceback (most recent call last) ───╮\n│ ValueError: in the code shown │\n",
        '{"exc_type": null, "exc_value": null}',
        "  + Exception Group Traceback (most recent call last):\n  |   File",
    ],
)
def test_what_only_looks_like_one(text: str) -> None:
    assert errors(text) == []


HOSTILE = {
    "boxes": "╭─ Traceback (most recent call last) ─╮\n" + "│ a\n" * 300_000,
    "many boxes": "╭─ Traceback (most recent call last) ─╮\n" * 30_000,
    "groups": "  + Exception Group Traceback (most recent call last):\n"
    + "  | ExceptionGroup: a\n"
    + "  +---\n" * 200_000,
    "json": '{"e": "' + "Traceback (most recent call last):\\n" * 30_000,
    "types": '"exc_type": "A", "exc_value": "' + "\\" * 1_000_000,
    "prefix": "[rank0]: Traceback (most recent call last)\n" * 200 + "[rank1]: a\n" * 90_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_time_to_read_is_linear(name: str) -> None:
    began = time.process_time()
    read_log(HOSTILE[name])
    assert time.process_time() - began < 2.0
