"""Which rank of a hang is its cause."""

from __future__ import annotations

import pytest

from resihp.detector.hangs.culprits import Look, judge, waits
from resihp.detector.hangs.stacks import StackFrame, main_thread, place_in_script

TORCH_FOLDER = "/venv/lib/python3.11/site-packages/torch"
IN_A_COLLECTIVE = f"""\
Thread 0x00007f10 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f20 (most recent call first):
  File "{TORCH_FOLDER}/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{TORCH_FOLDER}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 41 in step
  File "/home/me/train.py", line 60 in <module>
  File "/opt/resihp/worker/entry.py", line 100 in _run_script
"""
IN_BACKWARD = f"""\
Current thread 0x00007f20 (most recent call first):
  File "{TORCH_FOLDER}/autograd/graph.py", line 824 in _engine_run_backward
  File "{TORCH_FOLDER}/_tensor.py", line 648 in backward
  File "/home/me/train.py", line 40 in step
"""
IN_A_LOADER = f"""\
Current thread 0x00007f20 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 947 in wait
  File "{TORCH_FOLDER}/utils/data/dataloader.py", line 1295 in _try_get_data
  File "/home/me/train.py", line 35 in batches
  File "/home/me/train.py", line 60 in <module>
"""
IN_A_LOCK = """\
Current thread 0x00007f20 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/me/metrics.py", line 9 in flush
  File "/home/me/train.py", line 45 in step
"""
IN_A_SLEEP = """\
Current thread 0x00007f20 (most recent call first):
  File "/home/me/train.py", line 44 in step
"""


IN_WORK_WAIT = """\
Current thread 0x00007f20 (most recent call first):
  File "/home/me/train.py", line 42 in step
"""


def look(rank: int, printed: str = "", state: str = "S", source: str = "") -> Look:
    return Look(rank=rank, state=state, frames=main_thread(printed), source=source)


def verdict(*printed: str) -> tuple[int, ...]:
    return judge({rank: look(rank, text) for rank, text in enumerate(printed)}).ranks


def test_the_main_thread_is_read_with_its_innermost_frame_first() -> None:
    frames = main_thread(IN_A_COLLECTIVE)
    assert (frames[0].name, frames[0].line) == ("all_reduce", 3252)
    assert place_in_script(frames) == StackFrame("/home/me/train.py", 41, "step")
    assert str(place_in_script(frames)) == "/home/me/train.py:41 in step"
    assert main_thread("no stack") == ()
    assert main_thread("Current thread 0x00007f20 (most recent call first):\n  <no Python frame>\n") == ()


def test_ranks_in_collectives_and_in_their_results_wait() -> None:
    assert waits(look(0, IN_A_COLLECTIVE))
    assert waits(look(0, IN_BACKWARD))
    for printed in (IN_A_LOADER, IN_A_LOCK, IN_A_SLEEP):
        assert not waits(look(0, printed))


@pytest.mark.parametrize("source", ["work.wait()", "total = loss.item()  # of all ranks", "values = logits.cpu()"])
def test_a_line_that_waits_in_c_is_known_by_its_source(source: str) -> None:
    """Half of the ranks hang in a lock, the others wait for them: no place is usual."""
    looks = {rank: look(rank, IN_WORK_WAIT, source=source) for rank in range(2)}
    looks |= {rank: look(rank, IN_A_SLEEP, source="time.sleep(1)") for rank in (2, 3)}
    assert judge(looks).ranks == (2, 3)
    assert not waits(look(2, IN_A_LOCK, source="self._cond.wait(timeout)")), "a wait for a thread of this rank"


def test_a_script_in_a_folder_that_is_called_resihp_is_the_users() -> None:
    frames = main_thread(IN_A_COLLECTIVE.replace("/home/me/train.py", "/home/me/resihp/examples/train.py"))
    assert place_in_script(frames) == StackFrame("/home/me/resihp/examples/train.py", 41, "step")


def test_the_rank_that_does_not_wait_is_the_cause() -> None:
    for cause in (IN_A_LOADER, IN_A_LOCK, IN_A_SLEEP):
        assert verdict(IN_A_COLLECTIVE, IN_A_COLLECTIVE, cause, IN_BACKWARD) == (2,)
    assert verdict(IN_A_SLEEP, IN_A_SLEEP, IN_A_COLLECTIVE, IN_A_COLLECTIVE) == (0, 1)


def test_a_stopped_process_is_the_cause_wherever_it_is() -> None:
    looks = {rank: look(rank, IN_A_COLLECTIVE) for rank in range(4)}
    looks[3] = look(3, IN_A_COLLECTIVE, state="T")
    assert judge(looks).ranks == (3,)
    assert judge({rank: look(rank, IN_A_COLLECTIVE, state="T") for rank in range(4)}).ranks == (), "the job is stopped"


def test_a_rank_at_another_place_is_the_cause_where_all_wait() -> None:
    elsewhere = IN_A_COLLECTIVE.replace("line 41", "line 52")
    assert verdict(IN_A_COLLECTIVE, elsewhere, IN_A_COLLECTIVE, IN_A_COLLECTIVE) == (1,)


def test_without_a_difference_nobody_is_blamed() -> None:
    assert verdict(*[IN_A_COLLECTIVE] * 4) == ()
    assert verdict(*[IN_A_SLEEP] * 4) == ()
    assert verdict("", "", "") == ()
    elsewhere = IN_A_COLLECTIVE.replace("line 41", "line 52")
    assert verdict(IN_A_COLLECTIVE, elsewhere) == ()


def test_the_place_in_the_script_is_kept_below_many_frames_of_libraries() -> None:
    deep = "".join(f'  File "{TORCH_FOLDER}/nn/module.py", line {line} in forward\n' for line in range(100))
    printed = IN_A_COLLECTIVE.replace(
        '  File "/home/me/train.py", line 41', f'{deep}  File "/home/me/train.py", line 41'
    )
    frames = main_thread(printed)
    assert len(frames) == 14
    assert place_in_script(frames) == StackFrame("/home/me/train.py", 41, "step")
