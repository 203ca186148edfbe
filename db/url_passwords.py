"""Passwords in database URLs: finds them, masks or removes them, and hides them from the process list.

All code that shows, stores or passes on a ledger's URL uses this module. It needs only the standard library, so that
`resihp` can hide its arguments before it imports anything slow.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_HOST = r"(?:[^:/@?#\[]*|\[[0-9a-fA-F:.]+\])"
_NO_PASSWORD = rf"(?:\[|{_HOST}:[0-9]+(?:/[^?@]*)?\?\w+=)"
"""Matches text after `://` that has no password: a host with its port, and a query that may contain an @, as in a
Kerberos principal (`host:5432/ledger?user=alice@SITE.ORG`)."""
_IN_AUTHORITY = re.compile(rf"(?<=://)(?!{_NO_PASSWORD})([^:/@]*):(.*)@", re.DOTALL)
"""Matches `user:password@` up to the last @, so that a password with an unquoted @ is masked completely."""
_WITH_PORT = re.compile(rf"[\w+]+://{_HOST}:[0-9]+(?:/[^?@]*)?\?\w+=")
_IN_QUERY = re.compile(r"([?&])(password|passwd|sslpassword)=([^&]*)", re.IGNORECASE)
_ONE_AT = re.compile(r"[^@]*@[^@]*", re.DOTALL)


def masked(url: str) -> str:
    """Return `url` for messages: with `***` in place of its password, wherever in the URL the password is."""
    url = _IN_AUTHORITY.sub(r"\1:***@", url)
    return _IN_QUERY.sub(r"\1\2=***", url)


def without_password(url: str) -> str:
    """Return `url` without its password, so that the user can type it again. If the end of the password is ambiguous,
    the password is masked instead."""
    if not _ONE_AT.fullmatch(url) and _IN_AUTHORITY.search(url):
        return masked(url)
    url = _IN_AUTHORITY.sub(r"\1@", url)
    while match := _IN_QUERY.search(url):
        rest = url[match.end() :]
        url = url[: match.start()] + (match[1] + rest[1:] if rest else "")
    return url


def with_quoted_query(url: str) -> str:
    """Return `url` with each unquoted @ of its query quoted, if only a host and its port precede the query.

    SQLAlchemy would otherwise read the text before the @ as a user and a password, and the rest as the host.
    """
    if not _WITH_PORT.match(url):
        return url
    before, mark, query = url.partition("?")
    return before + mark + query.replace("@", "%40")


def has_password(url: str) -> bool:
    return bool(_spans(url))


def hide_own() -> None:
    """Overwrite passwords in this process's command line, which every user of the machine can read.

    Only the kernel's copy changes; `sys.argv` stays unchanged. Words after `--` belong to the user's program and are
    not changed. Never raises: on a kernel without /proc other users cannot read the command line either.
    """
    if not any(has_password(word) for word in _own_words(sys.argv[1:])):
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        address = int(fields[45])  # arg_start of proc(5)
        # As bytes: reading text would turn \r\n into \n and shift everything after it.
        words = Path("/proc/self/cmdline").read_bytes().decode("latin-1").split("\0")
        for word in _own_words(words) if address else ():
            for start, end in _spans(word):
                ctypes.memset(address + start, ord("*"), end - start)
            address += len(word) + 1


def _own_words(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _spans(url: str) -> list[tuple[int, int]]:
    """Return the start and end of each password in `url`."""
    spans = [match.span(2) for match in _IN_AUTHORITY.finditer(url)]
    spans += [match.span(3) for match in _IN_QUERY.finditer(url)]
    return [(start, end) for start, end in spans if end > start]
