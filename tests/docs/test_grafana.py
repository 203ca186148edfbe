"""The dashboard asks what the ledger's views answer, as a role that may only read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from benchmarks import fleet as made
from resihp.db.engine import make_engine, resolve
from tests.db.conftest import postgres_server, postgres_url  # noqa: F401 - fixtures

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())


def _filled_in(query: str, names: dict[str, list[str]]) -> str:
    """As Grafana does it: its macros, and variables of which all values are chosen."""
    query = re.sub(r"\$__timeFilter\((\w+)\)", r"\1 BETWEEN '2020-01-01' AND '2030-01-01'", query)
    for name, values in names.items():
        query = query.replace(f"${{{name}:sqlstring}}", ",".join(f"'{value}'" for value in values))
    assert "$" not in query, query
    return query


def test_every_panel_has_an_answer(postgres_url: str) -> None:  # noqa: F811
    truth = made.make(postgres_url, jobs=12, days=30.0, nodes=64, seed=4)
    engine = make_engine(resolve(postgres_url), write=False)
    names: dict[str, list[str]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    with engine.connect() as connection:
        for variable in BOARD["templating"]["list"]:
            if variable["type"] == "query":
                names[variable["name"]] = [row[0] for row in connection.execute(text(variable["query"]))]
        for panel in BOARD["panels"]:
            query = _filled_in(panel["targets"][0]["rawSql"], names)
            answers[panel["title"]] = [dict(row) for row in connection.execute(text(query)).mappings()]
    engine.dispose()
    assert set(names["owner"]) == set(truth.by_owner)
    assert answers["Failures of hardware"] == [{"failures": truth.hardware}]
    by_day = answers["Failures a day, by kind"]
    assert sum(row["failures"] for row in by_day) == truth.hardware + truth.injected + truth.slow + truth.program
    assert {name for name, rows in answers.items() if not rows} == set()


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_views_alone_are_asked(panel: dict[str, Any]) -> None:
    """Their columns stay; the tables' may not."""
    assert set(re.findall(r"FROM (\w+)", panel["targets"][0]["rawSql"])) <= {
        *("resihp_jobs", "resihp_failures", "resihp_node_failures", "resihp_iterations_hourly")
    }
