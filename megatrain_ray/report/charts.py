"""Draws the charts of a report as SVG text that a page of HTML can contain."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

MAX_BUCKETS = 300  # buckets of steps of a line; the extremes of each are drawn
MAX_BARS = 120
MAX_MARKED = 50  # points of a line that has a dot at each
# Bars beyond this multiple of this quantile are cut off: the step that compiles would flatten the others.
FRAME_FACTOR = 3.0
FRAME_QUANTILE = 0.95
SIZE = 5.6, 2.7  # inches
# The page replaces these colours by its own, which depend on the reader's light or dark mode.
COLORS = {
    "#2563c9": "var(--c0)", "#d9730d": "var(--c1)", "#2a8f5b": "var(--c2)", "#b3338a": "var(--c3)",
    "#7a5cc4": "var(--c4)", "#a88a00": "var(--c5)", "#128c9c": "var(--c6)", "#8b8f96": "var(--c7)",
    "#f6f7f9": "var(--panel)", "#d7dbe0": "var(--line)", "#5b626b": "var(--soft)", "#1c1e21": "var(--text)",
}  # fmt: skip
*CYCLE, PANEL, LINE, SOFT, TEXT = COLORS
WITHOUT = {"Creator": None, "Date": None, "Format": None, "Type": None}  # metadata that is left out

Point = tuple[int, float]  # step and value


class Chart(NamedTuple):
    title: str
    svg: str
    note: str = ""


def line_chart(
    title: str, lines: Mapping[str, Sequence[Point]], steps: tuple[int, int], *, from_zero: bool = True,
    resumes: Sequence[int] = (),
) -> Chart | None:  # fmt: skip
    """Return a chart of lines over steps; None if there are no points.

    lines: points by name; values are finite.
    steps: first and last step of the axis.
    from_zero: include 0 in the frame.
    resumes: steps after which the run was started again; each is marked by a dotted line.
    """
    if not any(lines.values()):
        return None
    figure, axes = _frame(steps)
    for (name, points), color in zip(lines.items(), CYCLE, strict=False):
        if points:
            kept = decimate(points)
            marker = "o" if len(kept) <= MAX_MARKED else None
            axes.plot(
                *zip(*kept, strict=True), color=color, marker=marker, ms=3, label=name, gid=_id(name), clip_on=False
            )
    for step in resumes:
        axes.axvline(step, color=SOFT, linestyle=":", linewidth=1, gid=f"resume-{step}")
    if from_zero:
        axes.set_ylim(min(0.0, axes.get_ylim()[0]), max(0.0, axes.get_ylim()[1]))
    return Chart(title, _svg(figure, axes))


def stacked_chart(title: str, rows: Sequence[tuple[int, Mapping[str, float]]], unit: str) -> Chart | None:
    """Return a chart of bars over steps, with parts stacked in their order; None if there are no rows.

    Each bar shows the mean of several steps if there are many.

    rows: steps with their parts; all have the same parts, each 0 or more.
    unit: unit of the parts, for the note.
    """
    if not rows:
        return None
    steps, parts = np.array([step for step, _ in rows]), np.array([list(part.values()) for _, part in rows])
    starts = _bucket_edges(len(rows), MAX_BARS)[:-1]
    means = np.add.reduceat(parts, starts) / np.diff([*starts, len(rows)])[:, None]
    totals = means.sum(axis=1)
    top = min(totals.max(), FRAME_FACTOR * np.quantile(totals, FRAME_QUANTILE, method="lower")) or 1.0
    levels = np.minimum(np.cumsum(means, axis=1), top).T
    edges = [*steps[starts], steps[-1] + 1]
    figure, axes = _frame((edges[0], edges[-1]))
    axes.set_ylim(0.0, top)
    for name, base, level, color in zip(rows[0][1], [np.zeros(len(starts)), *levels], levels, CYCLE * 2, strict=False):
        if (level > base).any():
            axes.stairs(level, edges, baseline=base, fill=True, color=color, label=name, gid=_id(name), clip_on=False)
    largest = parts.sum(axis=1).max()
    note = f"The longest takes {largest:.3g} {unit}, beyond this frame." if largest > 1.01 * top else ""
    return Chart(title, _svg(figure, axes), note)


def decimate(points: Sequence[Point]) -> list[Point]:
    """Return at most 2 * MAX_BUCKETS + 2 of the points, in their order.

    These are the lowest and the highest of each bucket, and the first and the last of all.
    """
    if len(points) <= 2 * MAX_BUCKETS:
        return list(points)
    values = np.array([value for _, value in points])
    kept = {0, len(points) - 1}
    for start, stop in pairwise(_bucket_edges(len(points), MAX_BUCKETS)):
        kept |= {start + int(values[start:stop].argmin()), start + int(values[start:stop].argmax())}
    return [points[k] for k in sorted(kept)]


def _bucket_edges(count: int, most: int) -> list[int]:
    """Return the edges of at most `most` consecutive ranges of nearly equal size that cover range(count)."""
    number = min(count, most)
    return [k * count // number for k in range(number + 1)]


def _frame(steps: tuple[int, int]) -> tuple[Figure, Axes]:
    figure = Figure(SIZE, layout="constrained")
    axes = figure.add_subplot(facecolor=PANEL)
    axes.set_xlim(steps[0], max(steps[1], steps[0] + 1))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=LINE)
    axes.tick_params(length=0, labelcolor=SOFT)
    return figure, axes


def _svg(figure: Figure, axes: Axes) -> str:
    """Return the figure for a page, without what only a file of its own needs, and with the page's colours."""
    if len(axes.get_legend_handles_labels()[0]) > 1:
        figure.legend(loc="outside upper left", ncols=4, frameon=False, labelcolor=TEXT)
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):  # letters stay text
        figure.savefig(file, format="svg", metadata=WITHOUT, facecolor="none")
    svg = file.getvalue()
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| font-family: [^;]*;', "", svg[svg.index("<svg") :])
    return re.sub("|".join(COLORS), lambda found: COLORS[found[0]], svg)


def _id(name: str) -> str:
    return f"curve-{name.replace(' ', '-')}"
