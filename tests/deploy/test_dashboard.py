"""deploy/grafana/megatrain.json and docs/monitoring.md name the series that a run exports, and all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.metrics import ray_sink

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bray_megatrain_\w+")
LABELS = {"run", "cause", "tier", "kind", "le"}
SUFFIXES = {"Gauge": ("",), "Counter": ("_total",), "Histogram": ("_bucket", "_count", "_sum")}  # as Ray names samples
COLUMNS = 24  # of Grafana's grid


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Kind by the name of each sample."""
    found: dict[str, str] = {}

    class Metric:
        def __init__(self, name: str, text: str, tag_keys: tuple[str, ...], **options: Any) -> None:
            assert text
            assert set(tag_keys) <= LABELS
            found.update({f"ray_{name}{suffix}": type(self).__name__ for suffix in SUFFIXES[type(self).__name__]})

        def set_default_tags(self, tags: dict[str, str]) -> None:
            assert tags.keys() == {"run"}

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            pass

    for kind in SUFFIXES:
        monkeypatch.setattr(ray_sink, kind, type(kind, (Metric,), {}))
    ray_sink.RaySink("run", 1, None)
    return found


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "megatrain.json").read_text())
    return tree


def queries(dashboard: dict[str, Any]) -> Iterator[str]:
    yield from (target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_every_series_that_is_asked_for_is_exported(dashboard: dict[str, Any], exported: dict[str, str]) -> None:
    asked = [*queries(dashboard), *(v["definition"] for v in dashboard["templating"]["list"] if "definition" in v)]
    for query in asked:
        names = NAME.findall(query)
        assert names
        assert set(names) <= exported.keys(), query


def test_counters_are_asked_for_their_rate_or_their_sum(dashboard: dict[str, Any], exported: dict[str, str]) -> None:
    """A gauge's rate means nothing."""
    for query in queries(dashboard):
        for name in re.findall(r"rate\((\w+)", query):
            assert exported[name] != "Gauge", query


def test_every_series_is_shown(dashboard: dict[str, Any], exported: dict[str, str]) -> None:
    shown = {name for query in queries(dashboard) for name in NAME.findall(query)}
    estimates = {name for name, kind in exported.items() if kind == "Histogram" and not name.endswith("_bucket")}
    assert shown == exported.keys() - estimates


def test_every_query_is_of_the_runs_that_are_chosen(dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        assert query.count("(") == query.count(")"), query
        assert len(NAME.findall(query)) == query.count('{run=~"$run"}'), query
        for labels in re.findall(r"(?:by|on) \(([^)]*)\)", query):
            assert set(labels.split(", ")) <= LABELS, query


def test_it_is_a_dashboard(dashboard: dict[str, Any]) -> None:
    """What Grafana wants of one: a title, variables, panels with ids of their own that do not overlap."""
    assert (dashboard["title"], dashboard["uid"], dashboard["schemaVersion"]) == ("megatrain", "megatrain-runs", 39)
    assert {v["name"]: v["type"] for v in dashboard["templating"]["list"]} == {
        "datasource": "datasource",
        "run": "query",
    }
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + k) for i in range(at["w"]) for k in range(at["h"])}
        assert at["x"] + at["w"] <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_the_page_lists_what_is_exported(exported: dict[str, str]) -> None:
    table = (ROOT / "docs" / "monitoring.md").read_text().split("| series |")[1].split("\n\n")[0]
    listed = set(NAME.findall(table))
    histograms = {name.removesuffix("_bucket") for name, kind in exported.items() if kind == "Histogram"} & listed
    others = {name for name, kind in exported.items() if kind != "Histogram"}
    assert listed == others | histograms
    assert histograms == {"ray_megatrain_step_seconds"}
    assert all(tier.value in table for tier in Tier)
