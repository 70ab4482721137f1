"""What `from megatrain_ray import …` gives, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatrain_ray
from megatrain_ray import Trainer, load_config
from megatrain_ray.errors import ConfigError

ROOT = Path(__file__).parent.parent
RUN = """\
model: {path: model}
data: {path: text.txt, seq_len: 8}
train: {steps: 4, lr: 1e-3}
run_dir: runs/mine
"""


def test_settings_of_a_file_have_the_numbers_of_the_command_line(tmp_path: Path) -> None:
    """What PyYAML makes of 1e-3, a text, is refused; load_config reads a number."""
    file = tmp_path / "mine.yaml"
    file.write_text(RUN)
    with pytest.raises(ConfigError, match=r"train\.lr"):
        Trainer(yaml.safe_load(RUN))
    config = load_config(file, ["train.min_lr=1e-5", "train.steps=9"])
    assert (config.train.lr, config.train.min_lr, config.train.steps) == (1e-3, 1e-5, 9)
    assert Trainer(config).config == config


def test_reading_settings_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RUN)
    code = (
        "import sys, pathlib, megatrain_ray\n"
        "assert 'pydantic' not in sys.modules\n"
        "assert megatrain_ray.load_config(pathlib.Path(sys.argv[1])).train.lr == 1e-3\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, file], check=True, cwd=ROOT)


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(megatrain_ray, name) for name in megatrain_ray.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        megatrain_ray.__getattr__("no_such_name")
