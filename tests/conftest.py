"""Tests leave nothing behind: hypothesis writes to a temporary folder, pytest keeps no cache (pyproject.toml)."""

from __future__ import annotations

import atexit
import shutil
import tempfile

from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

_home = tempfile.mkdtemp(prefix="resihp-hypothesis-")
atexit.register(shutil.rmtree, _home, ignore_errors=True)
set_hypothesis_home_dir(_home)
settings.register_profile("resihp", database=None, deadline=None)
settings.load_profile("resihp")
