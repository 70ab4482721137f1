"""Parses and formats sizes, durations and counts as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE_UNITS = {"": 1, **DECIMAL_UNITS, **BINARY_UNITS}
SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)
RANGE_PATTERN = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
MAX_NUMBER = 1 << 16  # bound on the number of a CPU or node: a range beyond it is a mistake


def parse_size(text: str | int) -> int:
    """Return the bytes of `24GiB` (2^30), `24GB` (10^9), `1.5 TiB`, or of a plain number of bytes.

    With a unit, a fraction of a byte is dropped: 3.24GiB, as messages round it, is a size. Raises ValueError for
    anything else, including a fraction of a byte without a unit and negative numbers.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = SIZE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    scale = SIZE_UNITS.get(match[2]) if match else None
    if match and scale:
        size = Decimal(match[1]) * scale  # exact: 0.1 TB is 100000000000 bytes
        if match[2] or size == int(size):
            return int(size)
    raise ValueError(
        f"expected bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB, as in 24GiB; got {text!r}"
    )


def format_bytes(num_bytes: int) -> str:
    """Format bytes as `23.50 GiB`, with two decimals.

    The unit is the largest of KiB, MiB, GiB, TiB that leaves at least 1. Below 1 KiB the number of bytes is written.
    """
    for unit, scale in reversed(BINARY_UNITS.items()):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def format_duration(seconds: float) -> str:
    """Format seconds as `42s`, `3m 07s`, `5h 02m`, `2d 04h`: two units, rounded to whole seconds first."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours == 0:
        return f"{minutes}m {whole % 60:02}s"
    if days == 0:
        return f"{hours}h {minutes % 60:02}m"
    return f"{days}d {hours % 24:02}h"


def format_seconds(seconds: float) -> str:
    """Format seconds as `0.123`, `12.3`, `1,260`: three significant digits, from 1,000 on all digits."""
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def format_count(count: float) -> str:
    """Format a count as `950`, `12.3k`, `7.62B`: three significant digits with k, M, B or T (powers of 10^3)."""
    for power, suffix in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
        # A count that rounds up to the next unit is written in that unit: 999950 is 1.00M, never 1000k.
        if float(f"{count:.3g}") >= 10**power:
            return f"{count / 10**power:#.3g}".rstrip(".") + suffix
    return f"{count:.3g}"


def format_quantity(number: int, noun: str) -> str:
    """Format a number of things as `1 row`, `2 rows`, `2 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers of `0-3,8`, as the kernel writes CPUs and nodes, each once and in order.

    An empty text has none. Raises ValueError for anything else.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = RANGE_PATTERN.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_NUMBER:
            raise ValueError(f"expected numbers and ranges, as in 0-3,8; got {text!r}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as `0-3,8`, which `parse_ranges` reads."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
