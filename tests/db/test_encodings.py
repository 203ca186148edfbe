"""PostgreSQL databases of other encodings than UTF-8, as an initdb in locale C makes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resihp.db import migrate
from resihp.db.reading.queries import Reader
from resihp.db.writer import Ledger
from resihp.errors import LedgerError
from tests.db.conftest import Listener, everything, story, write_journal
from tests.db.postgres import Server

TITLE = "Präzision → ✓ 训练"


@pytest.fixture
def url_of(postgres_server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of that encoding."""
    url = postgres_server.new_database(encoding=request.param)
    yield url
    postgres_server.drop_database(url)


@pytest.mark.parametrize("url_of", ["SQL_ASCII"], indirect=True)
def test_a_database_of_locale_c_holds_every_text(url_of: str, tmp_path: Path) -> None:
    [(begin, began), *rest] = story()
    begin = msgspec.structs.replace(begin, user=TITLE)
    records = write_journal(tmp_path / "journal", iter([(begin, began), *rest]))
    said = Listener()
    ledger = Ledger.open(url_of, tmp_path, say=said, journal_path=tmp_path / "journal")
    for record in records:
        ledger.submit(record)
    assert ledger.close()
    assert said.heard == []
    found = everything(ledger)
    assert found["job"]["owner"] == TITLE
    assert len(found["iterations"]) == 20
    assert migrate.upgrade(url_of) == migrate.head() == migrate.current(url_of)
    with Reader.open(f"{url_of}&client_encoding=latin1") as reader:
        assert reader.job()["owner"] == TITLE, "whatever the URL says"


@pytest.mark.parametrize("url_of", ["LATIN1"], indirect=True)
def test_no_ledger_is_made_where_not_every_text_can_be_written(url_of: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="has encoding LATIN1; resihp needs UTF8"):
        Ledger.open(url_of, tmp_path)
