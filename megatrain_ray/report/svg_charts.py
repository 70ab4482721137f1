"""Computes the geometry of a report's charts: SVG paths in a frame that the page stretches, and positions of labels.

Labels are text of the page, not of the SVG, so that they keep their size whatever the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatrain_ray.units import format_count

WIDTH, HEIGHT = 1000.0, 300.0  # size of the frame, in units of its viewBox
MOST_BUCKETS = 300  # buckets of steps; the extremes of each are drawn
MOST_BARS = 120
MOST_X_TICKS, MOST_Y_TICKS = 5, 4
SMALLEST_RANGE = 1e-4  # relative range below which all labels would look alike
BEYOND = 3.0  # frame end as a multiple of the NEARLY_ALL quantile: the step that compiles would flatten the others
NEARLY_ALL = 0.95

Point = tuple[float, float]  # step and value


class Tick(NamedTuple):
    """Describes a tick of an axis.

    at: position in percent of the frame, from its left or its top.
    """

    at: float
    label: str


class Curve(NamedTuple):
    """Describes a curve of a chart.

    color: number of a colour of the page.
    path: SVG path; a single point is drawn as a dot.
    is_area: whether it is filled; otherwise it is a line.
    """

    name: str
    color: int
    path: str
    is_area: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """Maps numbers to units of the frame. Numbers out of range are mapped to its edge."""

    low: float
    high: float
    length: float
    is_upward: bool = False

    def __call__(self, value: float) -> float:
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return round((1.0 - share if self.is_upward else share) * self.length, 1)

    def ticks(self, most: int, *, whole: bool = False) -> tuple[Tick, ...]:
        values = nice_numbers(self.low, self.high, most, whole=whole)
        labels = labels_of(values)
        return tuple(Tick(100 * self(v) / self.length, label) for v, label in zip(values, labels, strict=True))


def decimate(points: Sequence[Point], most_buckets: int = MOST_BUCKETS) -> list[Point]:
    """Return at most 2 * `most_buckets` + 2 of the points, in their order.

    These are the lowest and the highest of each bucket, and the first and the last of all.
    """
    if len(points) <= 2 * most_buckets:
        return list(points)
    kept = {0, len(points) - 1}
    for bucket in _buckets(len(points), most_buckets):
        kept.add(min(bucket, key=lambda k: points[k][1]))
        kept.add(max(bucket, key=lambda k: points[k][1]))
    return [points[k] for k in sorted(kept)]


def line_chart(
    title: str, lines: Mapping[str, Sequence[Point]], steps: tuple[int, int], *, from_zero: bool = True
) -> Chart | None:
    """Return a chart of curves over steps; None if there are no points.

    lines: points by name; values are finite.
    steps: first and last step of the axis.
    from_zero: include 0 in the frame.
    """
    drawn = {name: decimate(points) for name, points in lines.items() if points}
    if not drawn:
        return None
    values = [value for points in drawn.values() for _, value in points] + [0.0] * from_zero
    x, y = _steps_scale(steps), _value_scale(min(values), max(values))
    curves = (
        Curve(name, color, _line((x(step), y(value)) for step, value in drawn[name]))
        for color, name in enumerate(lines)
        if name in drawn
    )
    return Chart(title, tuple(curves), x.ticks(MOST_X_TICKS, whole=True), y.ticks(MOST_Y_TICKS))


def stacked_chart(title: str, rows: Sequence[tuple[int, Mapping[str, float]]], unit: str) -> Chart | None:
    """Return a chart of bars over steps, with parts stacked in their order; None if there are no rows.

    Each bar shows the mean of several steps if there are many.

    rows: steps with their parts; all have the same parts, each 0 or more.
    unit: unit of the parts, for the note.
    """
    if not rows:
        return None
    names = list(rows[0][1])
    buckets = list(_buckets(len(rows), MOST_BARS))
    means = [{name: sum(rows[k][1][name] for k in b) / len(b) for name in names} for b in buckets]
    totals = sorted(sum(mean.values()) for mean in means)
    top = min(totals[-1], BEYOND * totals[int(NEARLY_ALL * (len(totals) - 1))]) or 1.0
    x, y = _steps_scale((rows[0][0], rows[-1][0] + 1)), Scale(0.0, top, HEIGHT, is_upward=True)
    spans = [(x(rows[b[0]][0]), x(rows[b[-1]][0] + 1)) for b in buckets]
    bars: dict[str, list[str]] = {name: [] for name in names}
    for (left, right), mean in zip(spans, means, strict=True):
        base = 0.0
        for name, part in mean.items():
            if (upper := y(base + part)) < (lower := y(base)):
                bars[name].append(f"M{left:g} {lower:g}H{right:g}V{upper:g}H{left:g}Z")
            base += part
    largest = max(sum(parts.values()) for _, parts in rows)
    note = f"The longest takes {largest:.3g} {unit}, beyond this frame." if largest > 1.01 * top else ""
    curves = (Curve(name, color, "".join(bars[name]), True) for color, name in enumerate(names) if bars[name])
    return Chart(title, tuple(curves), x.ticks(MOST_X_TICKS, whole=True), y.ticks(MOST_Y_TICKS), note)


def nice_numbers(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between `low` and `high`: at least one, at most `most` + 1.

    whole: use whole numbers only.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    distance = max(1.0, distance) if whole else distance
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [k * distance for k in range(first, last + 1)] or [low]


def labels_of(values: Sequence[float]) -> list[str]:
    """Return the values as text, with as many digits as tell them apart."""
    largest = max(map(abs, values))
    distance = abs(values[1] - values[0]) if len(values) > 1 else largest or 1.0
    if 0 < largest < 1e-2:
        return [f"{value:.{_digits(largest, distance)}e}" if value else "0" for value in values]
    if largest >= 1e4 and distance >= 100:
        return [format_count(value) if value else "0" for value in values]
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def _digits(largest: float, distance: float) -> int:
    return max(0, math.floor(math.log10(largest)) - math.floor(math.log10(distance) + 1e-9))


def _steps_scale(steps: tuple[int, int]) -> Scale:
    first, last = steps
    return Scale(first, last if last > first else first + 1, WIDTH)


def _value_scale(low: float, high: float) -> Scale:
    """Return the scale of the values. A flat line runs through the middle."""
    largest = max(abs(low), abs(high))
    margin = (high - low) / 20 if high - low > SMALLEST_RANGE * largest else largest / 2 or 1.0
    return Scale(low - margin, high + margin, HEIGHT, is_upward=True)


def _line(points: Iterable[Point]) -> str:
    placed = [f"{x:g} {y:g}" for x, y in points]
    return f"M{'L'.join(placed)}" if len(placed) > 1 else f"M{placed[0]}h0"


def _buckets(count: int, most: int) -> Iterator[range]:
    """Yield at most `most` consecutive ranges of nearly equal size that cover range(count)."""
    number = min(count, most)
    for k in range(number):
        yield range(k * count // number, (k + 1) * count // number)
