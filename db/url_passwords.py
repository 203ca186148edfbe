"""Finds passwords in URLs of databases, to mask them, to leave them out, and to take them out of the process list.

Everything that shows, keeps or passes on a ledger's URL goes through here. Needs nothing but the standard library, so
that `resihp` can hide what it was called with before it imports anything that takes time.
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
"""How what follows `://` begins where it is a host with its port, and any @ is in the query, as in a Kerberos
principal: `host:5432/ledger?user=alice@SITE.ORG`."""
_IN_AUTHORITY = re.compile(rf"(?<=://)(?!{_NO_PASSWORD})([^:/@]*):(.*)@", re.DOTALL)
"""`user:password@`. Up to the last @: a password with a raw @ in it is masked whole."""
_WITH_PORT = re.compile(rf"[\w+]+://{_HOST}:[0-9]+(?:/[^?@]*)?\?\w+=")
_IN_QUERY = re.compile(r"([?&])(password|passwd|sslpassword)=([^&]*)", re.IGNORECASE)
_ONE_AT = re.compile(r"[^@]*@[^@]*", re.DOTALL)


def masked(url: str) -> str:
    """Return `url` for messages: with `***` in place of its password, wherever that stands."""
    url = _IN_AUTHORITY.sub(r"\1:***@", url)
    return _IN_QUERY.sub(r"\1\2=***", url)


def without_password(url: str) -> str:
    """Return `url` as it can be typed again, its password left out. Where it cannot be told where that ends, the
    result is masked."""
    if not _ONE_AT.fullmatch(url) and _IN_AUTHORITY.search(url):
        return masked(url)
    url = _IN_AUTHORITY.sub(r"\1@", url)
    while match := _IN_QUERY.search(url):
        rest = url[match.end() :]
        url = url[: match.start()] + (match[1] + rest[1:] if rest else "")
    return url


def with_quoted_query(url: str) -> str:
    """Return `url` with each raw @ of its query quoted, where a host and its port are all that is before that.

    SQLAlchemy takes everything up to the @ for a name and a password otherwise, and what follows it for the host.
    """
    if not _WITH_PORT.match(url):
        return url
    before, mark, query = url.partition("?")
    return before + mark + query.replace("@", "%40")


def has_password(url: str) -> bool:
    return bool(_spans(url))


def hide_own() -> None:
    """Overwrite passwords in this process's command line, which every user of the machine can read.

    Only the copy that the kernel shows changes; `sys.argv` stays as it was. What follows `--` is the user's program's
    own command line. Never raises: on a kernel without /proc there is nothing to be read either.
    """
    if not any(has_password(word) for word in _of_ours(sys.argv[1:])):
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        address = int(fields[45])  # arg_start of proc(5)
        # As bytes: reading text would turn \r\n into \n, and all that follows would be elsewhere.
        words = Path("/proc/self/cmdline").read_bytes().decode("latin-1").split("\0")
        for word in _of_ours(words) if address else ():
            for start, end in _spans(word):
                ctypes.memset(address + start, ord("*"), end - start)
            address += len(word) + 1


def _of_ours(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _spans(url: str) -> list[tuple[int, int]]:
    """Return where passwords begin and end in `url`."""
    spans = [match.span(2) for match in _IN_AUTHORITY.finditer(url)]
    spans += [match.span(3) for match in _IN_QUERY.finditer(url)]
    return [(start, end) for start, end in spans if end > start]
