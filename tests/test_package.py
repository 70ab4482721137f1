"""What `from megatrain_ray import …` gives, and what it does not load."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatrain_ray
from megatrain_ray import Trainer
from megatrain_ray.errors import ConfigError

RUN = """\
model: {path: model}
data: {path: text.txt, seq_len: 8}
train: {steps: 4, lr: 1e-3}
run_dir: runs/mine
"""


def test_settings_of_a_file_have_the_numbers_of_the_command_line(tmp_path: Path) -> None:
    """What PyYAML makes of 1e-3, a text, is a number here. Overrides may be nested or have dotted keys."""
    file = tmp_path / "mine.yaml"
    file.write_text(RUN)
    config = Trainer(args=str(file), overrides={"train.min_lr": 1e-5, "train": {"steps": 9}}).config
    assert (config.train.lr, config.train.min_lr, config.train.steps) == (1e-3, 1e-5, 9)
    assert Trainer(args=config).config == config
    with pytest.raises(ConfigError, match="args: with objects or overrides give a mapping or the path of a file"):
        Trainer(args=config, overrides={"train.steps": 3})


def test_settings_may_have_dotted_keys() -> None:
    tree = {"data.path": "t.txt", "data": {"seq_len": 8}, "train.steps": 2, "train.muon.momentum": 0.5}
    tree |= {"train.optimizer": "muon", "run_dir": "r"}
    config = Trainer("model", tree).config
    assert (config.model.path, config.data.path, config.data.seq_len) == ("model", "t.txt", 8)
    assert (config.train.steps, config.train.muon.momentum) == (2, 0.5)
    with pytest.raises(ConfigError, match=r"train\.steps\.x: train\.steps is 2, expected a mapping to set a key in"):
        Trainer("model", tree | {"train.steps.x": 3})
    with pytest.raises(ConfigError, match=r"args: expected settings, the path of a YAML file or .*, got a list"):
        Trainer("model", [tree])


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(megatrain_ray, name) for name in megatrain_ray.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        megatrain_ray.__getattr__("no_such_name")


def test_waiting_threads_sleep_soon_unless_the_user_says_how_they_wait() -> None:
    environments: list[dict[str, str]] = [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}]
    for environment in environments:
        megatrain_ray._share_cores(environment)
    assert environments == [{"GOMP_SPINCOUNT": "1000"}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}]
