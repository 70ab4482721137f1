"""Sizes read exactly; sizes, durations and counts written without surprises where they round."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain_ray.units import format_bytes, format_count, format_duration, format_quantity, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (1 << 40, 1 << 40),
        ("4096", 4096),
        ("1KB", 1000),
        ("3MB", 3 * 10**6),
        ("24GB", 24 * 10**9),
        ("2TB", 2 * 10**12),
        ("1KiB", 1024),
        ("3MiB", 3 << 20),
        ("24GiB", 24 << 30),
        ("1.5 TiB", 3 << 39),
        ("0.1TB", 10**11),  # in floating point 0.1 * 10**12 only happens to be whole; 1.1 is not
        ("1.1TB", 1_100_000_000_000),
        ("3.24GiB", 3_478_923_509),  # and 0.76 of a byte
    ],
)
def test_sizes_are_exact(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["24G", "24gib", "GiB", "", "-1GiB", "1e9", "1 000", " 1GB", "1.5", -1, 1e9, True, None]
)
def test_anything_else_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(ValueError, match="24GiB; got"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (24 << 30, "24.00 GiB"), (3 << 39, "1.50 TiB")],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (3599.6, "1h 00m"), (18120, "5h 02m"), (187200, "2d 04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.9, "1.00k"),
        (12345, "12.3k"),
        (999_950, "1.00M"),
        (494e6, "494M"),
        (7.616e9, "7.62B"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


def test_one_thing_has_no_plural_ending() -> None:
    assert [format_quantity(1, "row"), format_quantity(0, "row"), format_quantity(2, "micro-batch")] == [
        "1 row",
        "0 rows",
        "2 micro-batches",
    ]
