"""Hints for keys of other tools: each that sets something here is a key of ours."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatrain_ray.config.other_tools import OTHER_NAMES, RESOLVED_KEYS, TOOLS, key_for, reason_for
from megatrain_ray.config.problem_lines import fields_by_key
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.convert.key_tables import load_table
from megatrain_ray.errors import ConfigError

KEYS = list(fields_by_key(TrainConfig))


def test_every_name_that_is_resolved_has_a_key() -> None:
    assert {*RESOLVED_KEYS.values(), *OTHER_NAMES.values()} <= set(KEYS)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_key_of_a_table_has_a_hint(tool: str) -> None:
    table = load_table(tool)
    for name, rule in table.sets.items():
        assert rule.target is None or key_for(name, KEYS) in KEYS, name
    for section in (table.otherwise, table.meaningless, table.refused):
        for name in section:
            assert reason_for(name.replace("*", "x")), name


@pytest.mark.parametrize(
    ("tree", "tool"),
    [({"model_name_or_path": "x", "learning_rate": 1e-4}, "LLaMA-Factory"), ({"base_model": "x"}, "Axolotl")],
)
def test_a_file_of_another_tool_is_named(tmp_path: Any, tree: dict[str, Any], tool: str) -> None:
    file = tmp_path / "their file.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["train.steps=3"])
    assert str(caught.value) == (
        f"{file}: is a configuration of {tool}; megatrain convert-config '{file}' --out OURS.yaml makes one of it"
    )
