"""The tables in docs/configuration.md are today's."""

from __future__ import annotations

from tests.support.configuration_reference import PAGE, table, written


def test_the_page_has_todays_tables() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run python -m tests.support.configuration_reference"


def test_it_has_every_kind_of_key() -> None:
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table().splitlines() if row.startswith("| ")}
    assert "integer ≥ 1 (required)" in rows["data.seq_len"]
    assert "integer, number (0)" in rows["train.warmup_steps"]
    assert "number > 0, null (1.0)" in rows["train.clip"]
    assert "boolean (true)" in rows["log.tensorboard"]
    assert "size (null)" in rows["hardware.ram_limit"]
    assert "bf16, fp32, tf32 (bf16)" in rows["train.precision"]
    assert "(required)" in rows["run_dir"]
