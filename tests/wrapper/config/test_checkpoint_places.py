"""How a command is read: the places for a checkpoint in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.errors import UsageError
from resihp.wrapper.config.program import resolve, takes_checkpoint
from resihp.wrapper.config.run_spec import Program


@pytest.mark.parametrize(
    ("words", "takes"),
    [
        (("--load", "ckpt", "--ckpt-step={checkpoint_iteration}"), True),
        (("--resume={checkpoint}",), True),
        (("--resume", "auto"), False),
    ],
)
def test_a_script_with_a_place_for_a_checkpoint_uses_what_it_is_told(words: tuple[str, ...], takes: bool) -> None:
    program = Program(kind="script", argv=("train.py", *words), interpreter="python")
    assert takes_checkpoint(program, "/") is takes


def test_a_shell_script_may_read_the_variable(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("exec python train.py --load $RESIHP_RESUME_FROM")
    assert takes_checkpoint(Program(kind="command", argv=("bash", "train.sh"), interpreter=""), str(tmp_path))
    assert not takes_checkpoint(Program(kind="command", argv=("bash", "other.sh"), interpreter=""), str(tmp_path))


def test_an_option_must_not_be_left_without_its_value() -> None:
    with pytest.raises(UsageError, match=r"write --resume=\{checkpoint\}"):
        resolve(["bash", "train.sh", "--resume", "{checkpoint}"], print)
    resolve(["bash", "train.sh", "--resume={checkpoint}", "{checkpoint}"], print)
