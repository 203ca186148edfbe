"""Tests leave nothing behind: hypothesis keeps no database, pytest no cache (pyproject.toml)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("resihp", database=None, deadline=None)
settings.load_profile("resihp")
