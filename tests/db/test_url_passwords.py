from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resihp.db.engine import resolve
from resihp.db.url_passwords import has_password, masked, without_password


@pytest.mark.parametrize(
    ("url", "shown", "typed"),
    [
        ("postgresql://me:s3cret@host/x", "postgresql://me:***@host/x", "postgresql://me@host/x"),
        ("postgresql://me:s3/c?ret@host/x", "postgresql://me:***@host/x", "postgresql://me@host/x"),
        ("postgresql://me:1234/5@host/x", "postgresql://me:***@host/x", "postgresql://me@host/x"),
        ("postgresql://me:1234?5@host/x", "postgresql://me:***@host/x", "postgresql://me@host/x"),
        ("postgresql://me:s3c@ret@host/x", "postgresql://me:***@host/x", "postgresql://me:***@host/x"),
        (
            "postgresql://me@host/x?a=1&password=s3cret&sslpassword=s3cret&b=2",
            "postgresql://me@host/x?a=1&password=***&sslpassword=***&b=2",
            "postgresql://me@host/x?a=1&b=2",
        ),
        ("postgresql://host/x?password=s3cret", "postgresql://host/x?password=***", "postgresql://host/x"),
    ],
)
def test_a_password_is_masked_and_left_out_wherever_it_stands(url: str, shown: str, typed: str) -> None:
    assert has_password(url)
    assert masked(url) == shown
    assert without_password(url) == typed


@pytest.mark.parametrize(
    "url",
    [
        "sqlite",
        "sqlite:////home/me@work/a:b.db",
        "postgresql://me@host:5432/x?a=b",
        "postgresql://db:5432/ledger?user=alice@SITE.ORG",
        "postgresql://db:5432?user=alice@SITE.ORG",
        "postgresql://[::1]:5432/ledger?user=alice@SITE.ORG",
    ],
)
def test_what_has_no_password_stays_as_it_is(url: str) -> None:
    assert not has_password(url)
    assert masked(url) == without_password(url) == url


def test_a_principal_in_the_query_leads_to_no_other_host() -> None:
    url = resolve("postgresql://db:5432/ledger?user=alice@SITE.ORG")
    assert (url.host, url.port, url.password) == ("db", 5432, None)
    assert url.query["user"] == "alice@SITE.ORG"


@pytest.mark.parametrize("option", ["--ledger {}", "--ledger={}"])
def test_other_users_do_not_find_the_password_in_the_process_list(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"postgresql://me:s3cret@127.0.0.1:{server.getsockname()[1]}/x?sslmode=disable&password=t0p"
        command = [sys.executable, "-m", "resihp", "history", "jobs", "--user", "a\r\nb", *option.format(url).split()]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            connection, _ = server.accept()  # it waits for an answer now
            with connection:
                seen = Path(f"/proc/{process.pid}/cmdline").read_text()
        finally:
            process.kill()
            process.wait()
    assert "postgresql://me:******@127.0.0.1" in seen
    assert "password=***" in seen
    assert "s3cret" not in seen
    assert "t0p" not in seen
