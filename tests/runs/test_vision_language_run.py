"""A run of a whole vision-language model: its text half is trained, and the rest is carried along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray.cli import main
from tests.support.in_process import Train
from tests.support.model_types import settings_of
from tests.support.reference import load_model
from tests.support.runs import config, write_config
from tests.support.type_sweep import build

NUM_IDS = 400  # bytes, the end of a document, and above them the ids that mean images


def with_bytes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with ids for bytes below those that mean something else."""
    found = dict(settings)
    for number, (key, value) in enumerate(settings.items()):
        if key.endswith("_config") and value:
            found[key] = with_bytes(value)
        elif key.endswith("_token_id") and isinstance(value, int):
            found[key] = 300 + number
        elif key == "vocab_size":
            found[key] = NUM_IDS
    return found


def test_images_experts_and_tower_come_out_as_they_went_in(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """ERNIE-VL is published with its experts of texts and images in one list, and their biases in one tensor."""
    folder = tmp_path / "model"
    build(with_bytes(settings_of("ernie4_5_vl_moe")), folder)
    tree = config(tmp_path / "run", folder, train__steps=2, train__weight_decay=0.5)
    done = train(str(write_config(tmp_path / "run.yaml", tree)))
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("untouched")]
    assert "model.vision_tower" in line
    assert "model.language_model.layers.*.mlp.vision_moe.experts" in line
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (load_model(place, torch.float32) for place in (folder, tmp_path / "out"))
    trained = dict(after.named_parameters())
    same = {name for name, p in before.named_parameters() if torch.equal(p, trained[name])}
    of_images = {name for name in trained if "vision" in name or "resampler" in name}
    assert of_images <= same
    assert "model.language_model.layers.1.mlp.text_moe.experts.down_proj" in trained.keys() - same
    buffers = dict(after.named_buffers())
    assert [name for name, buffer in before.named_buffers() if not torch.equal(buffer, buffers[name])] == []
