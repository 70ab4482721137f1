"""The pages about plan.json and about a hardware profile's file have every field that there is."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from tests.support.runs import ROOT


@pytest.mark.parametrize(
    ("page", "of"), [("plan_format.md", Plan), ("plan_format.md", LayerPlan), ("hardware_profile.md", HardwareProfile)]
)
def test_every_field_is_on_its_page(page: str, of: type) -> None:
    """Every field has a row on its page; those of layers are in the row of `layers[]`."""
    text = (ROOT / "docs" / page).read_text()
    keys = " ".join(row.group(1) for row in re.finditer(r"^\| ([^|]+) \|", text, re.MULTILINE))
    if of is LayerPlan:
        [keys] = [row for row in text.splitlines() if row.startswith("| layers[] |")]
    words = set(re.findall(r"\w+", keys))
    assert {field.name for field in fields(of)} <= words
