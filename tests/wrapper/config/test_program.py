"""Whether a script may train with resihp.Trainer, judged by its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp.wrapper.config.program import may_declare_model
from resihp.wrapper.config.run_spec import Program

PLAIN_TEXTS = {
    "no word of it": "import torch",
    "a comment and a docstring": '"""Run it with resihp run."""\n# resihp',
    "calls": "import resihp\nwith resihp.section('forward'):\n    pass\nresihp.iteration(1)",
    "calls under another name": "import resihp as r\nr.checkpointed('x')\nr.iteration()",
    "names": "from resihp import checkpointed, iteration as done",
    "a callback": "from resihp.reporting.transformers import ResihpCallback",
    "a callback's module": "import resihp.reporting.lightning\nresihp.reporting.lightning.ResihpCallback()",
    "imported where needed": "try:\n    import resihp\nexcept ImportError:\n    resihp_is_there = False",
}
TRAINING_TEXTS = {
    "the trainer": "import resihp\nresihp.Trainer()",
    "under another name": "import resihp as r\nr.iteration()\nr.Trainer()",
    "a name": "from resihp import iteration, Trainer",
    "all names": "from resihp import *",
    "another module": "import resihp.executor.trainer",
    "a name of another module": "from resihp.executor.trainer import Trainer",
    "the module as a value": "import resihp\ntrain(resihp)",
    "a name made at run time": "import resihp\ngetattr(resihp, 'Trainer')",
    "a module made at run time": "import importlib\nimportlib.import_module('resihp')",
    "a text that cannot be parsed": "import resihp\nif:",
}


def judged(folder: Path, text: str) -> bool:
    (folder / "train.py").write_text(text)
    return may_declare_model(Program(kind="script", argv=("train.py",), interpreter="python"), str(folder))


@pytest.mark.parametrize("case", sorted(PLAIN_TEXTS))
def test_a_script_with_a_loop_of_its_own_is_a_plain_one(tmp_path: Path, case: str) -> None:
    assert not judged(tmp_path, PLAIN_TEXTS[case])


@pytest.mark.parametrize("case", sorted(TRAINING_TEXTS))
def test_a_script_that_may_use_the_trainer_may_declare_a_model(tmp_path: Path, case: str) -> None:
    assert judged(tmp_path, TRAINING_TEXTS[case])


def test_a_module_is_read_and_nothing_is_executed(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import resihp\nraise SystemExit(resihp.Trainer)")
    assert may_declare_model(Program(kind="module", argv=("pkg.train",), interpreter="python"), str(tmp_path))
    assert not may_declare_model(Program(kind="module", argv=("other",), interpreter="python"), str(tmp_path))
