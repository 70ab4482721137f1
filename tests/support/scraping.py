"""Reads what Prometheus would read of the metrics agent of a Ray node."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.request import urlopen

import pytest

Labels = Mapping[str, str]
SCRAPED_S = 90.0  # Ray's processes report every 10 s
POLL_S = 0.5
SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Series(dict[str, list[tuple[Labels, float]]]):
    """Holds samples by name."""

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the first sample that has these labels among others; None if there is none."""
        for found, value in self.get(name, []):
            if labels.items() <= found.items():
                return value
        return None


def await_series(expected: Mapping[str, float], keep: Callable[[], None] = lambda: None, **labels: str) -> Series:
    """Wait until these samples have these values on the node of this process's cluster, and return all series.

    A process reports some of its series before others.

    expected: values by `name` or `name,label=value`.
    keep: called while waiting, to set gauges again that Ray would drop.
    labels: every sample must have these, too.
    """
    wanted = [(name, labels | dict(pair.split("=") for pair in more), value)
              for name, *more, value in ((*key.split(","), value) for key, value in expected.items())]  # fmt: skip
    deadline_s = time.monotonic() + SCRAPED_S
    while True:
        keep()
        series = _scrape()
        found = [(name, of, value, series.value(name, **of)) for name, of, value in wanted]
        missed = [sample for sample in found if sample[3] != pytest.approx(sample[2])]
        if not missed:
            return series
        assert time.monotonic() < deadline_s, f"not seen within {SCRAPED_S:.0f} s: {missed}"
        time.sleep(POLL_S)


def _scrape() -> Series:
    import ray

    (node,) = ray.nodes()
    series = Series()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urlopen(address, timeout=SCRAPED_S) as answer:
        for name, sample in _samples(answer.read().decode()):
            series.setdefault(name, []).append(sample)
    return series


def _samples(text: str) -> Iterator[tuple[str, tuple[Labels, float]]]:
    for line in text.splitlines():
        if (found := SAMPLE.fullmatch(line)) is not None:
            yield found["name"], (dict(LABEL.findall(found["labels"] or "")), float(found["value"]))
