"""Which libraries are imported in advance for a script, as its text says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resihp.worker.script_imports import LibraryImport, imports_at_top

HEAVY = LibraryImport("heavy")
LAYERS = LibraryImport("heavy.layers", ("Linear", "Norm"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user, which comes before that of the libraries heavy and shadowed."""
    libraries = tmp_path / "site-packages"
    for name in ("heavy", "shadowed"):
        (libraries / name).mkdir(parents=True)
        (libraries / name / "__init__.py").write_text("raise RuntimeError('a library was run')")
    (libraries / "heavy" / "layers.py").write_text("")
    user = tmp_path / "user"
    (user / "package").mkdir(parents=True)
    ran = "raise RuntimeError('a module of the user was run')\n"
    (user / "shadowed.py").write_text(f"import heavy.layers\n{ran}")
    (user / "package" / "__init__.py").write_text("")
    (user / "package" / "model.py").write_text("from heavy.layers import Linear, Norm\nfrom . import other\n")
    (user / "package" / "other.py").write_text("import heavy\nclass Model:\n    width: int = 3\n")
    (user / "package" / "busy.py").write_text(f"from heavy.layers import Linear, Norm\n{ran}")
    monkeypatch.syspath_prepend(libraries)
    monkeypatch.syspath_prepend(user)
    return user


def libraries_of(project: Path, text: str) -> list[LibraryImport]:
    (project / "train.py").write_text(text)
    folders = (str(project.parent / "site-packages") + os.sep,)
    return imports_at_top("script", str(project / "train.py"), folders).libraries


@pytest.mark.parametrize(
    "text",
    [
        "import heavy\n",
        '"""A script."""\nfrom __future__ import annotations\nimport os, sys\nimport heavy\n',
        "import logging\nlogger = logging.getLogger(__name__)\nWIDTH, DEPTH = 3, 4\nimport heavy\n",
        "def width(): return heavy.width()\nclass Model:\n    size = 3\nimport heavy\n",
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: int = 3\nimport heavy\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent\nimport heavy\n",
        "try:\n    import heavy\nexcept ImportError:\n    heavy = None\n",
        "try:\n    import absent\nexcept ImportError:\n    absent = None\nimport heavy\n",
        "import heavy\nheavy.setup()\nimport heavy.layers\n",
        "from package import other\n",
        "import package.other\n",
    ],
)
def test_a_library_that_the_script_is_certain_to_import(project: Path, text: str) -> None:
    assert libraries_of(project, text) == [HEAVY]


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['HEAVY'] = '1'\nimport heavy\n",
        "import sys\nsys.path.insert(0, '/elsewhere')\nimport heavy\n",
        "from package.busy import Model\nimport heavy\n",
        "if True:\n    import heavy\n",
        "def later():\n    import heavy\n",
        "import absent\nimport heavy\n",
        "print('hello')\nimport heavy\n",
        "class Model:\n    size = print('hello')\nimport heavy\n",
        "import os, sys, json, package\n",
        "import heavy\nthis is no python\n",
    ],
)
def test_what_may_change_before_an_import_leaves_it_to_the_script(project: Path, text: str) -> None:
    assert HEAVY not in libraries_of(project, text)


def test_modules_of_the_user_are_read_and_never_imported(project: Path) -> None:
    assert libraries_of(project, "from package.model import Model\n") == [LAYERS, HEAVY]
    assert libraries_of(project, "import shadowed\n") == [LibraryImport("heavy.layers")]
    assert libraries_of(project, "from package.busy import Model\n") == [LAYERS]


def test_a_module_is_read_as_python_dash_m_would_run_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (str(project.parent / "site-packages") + os.sep,)
    assert imports_at_top("module", "package.model", folders).libraries == [LAYERS, HEAVY]
    assert imports_at_top("module", "package", folders).libraries == []
    (project / "package" / "__main__.py").write_text("import heavy\n")
    assert imports_at_top("module", "package", folders).libraries == [HEAVY]


def test_a_change_of_a_file_that_was_read_is_noticed(project: Path) -> None:
    (project / "train.py").write_text("from package import other\n")
    found = imports_at_top("script", str(project / "train.py"), ())
    assert found.is_current()
    (project / "package" / "other.py").write_text("import heavy.layers\n")
    assert not found.is_current()


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_a_script_that_cannot_be_read_has_no_imports(project: Path, name: str) -> None:
    assert imports_at_top("script", str(project / name), ()).libraries == []
