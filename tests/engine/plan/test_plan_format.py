"""The pages about plan.json and about a hardware profile's file have every field that there is."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import ValidationError

from megatrain_ray.engine.device.hardware_profile import HardwareProfile
from megatrain_ray.engine.plan.plan import LayerPlan, Plan
from tests.support.plan_versions import version_1
from tests.support.planned_steps import PROFILE, planned
from tests.support.runs import ROOT

PLAN_PAGE = ROOT / "docs" / "plan_format.md"


OF_GROUP = {name: hint for name, hint in get_type_hints(Plan).items() if is_dataclass(hint)}


def keys_of(text: str) -> set[str]:
    """Return the keys in the first column of the tables."""
    rows = re.finditer(r"^\| ([^|]+) \|", text, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"\w+", row.group(1))}


def test_every_field_of_a_layer_is_in_its_table() -> None:
    [section] = re.findall(r"^## layers\[\]\n(.*?)^## ", PLAN_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert keys_of(section) - {"key"} == {field.name for field in fields(LayerPlan)}


@pytest.mark.parametrize("group", OF_GROUP)
def test_every_field_of_a_group_is_in_the_table_of_settings(group: str) -> None:
    """Its rows begin with the group's name."""
    [section] = re.findall(r"^## Settings\n(.*?)^## ", PLAN_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = "\n".join(re.findall(rf"^\| {group}\..*", section, re.MULTILINE)).replace(f"{group}.", "")
    assert keys_of(rows) == {field.name for field in fields(OF_GROUP[group])}


@pytest.mark.parametrize(("page", "of"), [(PLAN_PAGE, Plan), (ROOT / "docs" / "hardware_profile.md", HardwareProfile)])
def test_every_field_is_on_its_page(page: Path, of: type) -> None:
    assert {field.name for field in fields(of)} <= keys_of(page.read_text())


def test_version_1_says_the_same() -> None:
    plan = planned(PROFILE, spilled=True)
    assert Plan.from_json(json.dumps(version_1(plan))) == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 3}', "plan"])
def test_another_text_is_no_plan(text: str) -> None:
    with pytest.raises(ValidationError):
        Plan.from_json(text)
