"""Images and streams of data in configurations of LLaMA-Factory and Axolotl: data.images, train.vision, data.stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.convert.convert_config import convert
from megatrain_ray.convert.images import PROJECTOR

LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "pictured", "template": "qwen2_vl",
    "finetuning_type": "full", "media_dir": "elsewhere", "output_dir": "out", "max_steps": 9, "bf16": True,
}  # fmt: skip
AXOLOTL: dict[str, Any] = {
    "base_model": "Qwen/Qwen2-VL-7B-Instruct", "processor_type": "AutoProcessor", "chat_template": "qwen2_vl",
    "datasets": [{"path": "owner/pictured", "type": "chat_template"}], "learning_rate": 1e-5,
}  # fmt: skip
EXPRESSION = r"model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj"
UNFROZEN = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
LORA = {"finetuning_type": "lora"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a dataset_info.json: `pictured` has a column of images, `texts` has none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    texts = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "messages"}}
    pictured = {**texts, "columns": {"messages": "messages", "images": "images"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"pictured": pictured, "texts": texts}))
    return tmp_path


def converted(tree: dict[str, Any]) -> tuple[TrainConfig, str]:
    """Return our configuration, and the report about keys that set nothing."""
    Path("theirs.yaml").write_text(yaml.safe_dump(tree))
    found = convert(Path("theirs.yaml"))
    assert not found.refused, found.report
    return TrainConfig.model_validate(yaml.safe_load(found.text)), "\n".join(found.report)


@pytest.mark.parametrize(
    ("tree", "images", "vision", "freeze"),
    [
        (LLAMA_FACTORY, True, "frozen", ()),
        (LLAMA_FACTORY | {"freeze_multi_modal_projector": False}, True, "projector", ()),
        (LLAMA_FACTORY | UNFROZEN, True, "all", ()),
        (LLAMA_FACTORY | {"freeze_vision_tower": False}, True, "all", (PROJECTOR,)),
        (LLAMA_FACTORY | LORA | {"freeze_multi_modal_projector": False}, True, "frozen", ()),
        (LLAMA_FACTORY | LORA | {"freeze_vision_tower": False}, True, "all", ()),
        (LLAMA_FACTORY | UNFROZEN | {"dataset": "texts"}, False, "frozen", ()),
        (LLAMA_FACTORY | {"dataset_dir": "away"}, True, "frozen", ()),
        (LLAMA_FACTORY | {"dataset_dir": "away", "template": "qwen"}, False, "frozen", ()),
        (AXOLOTL, True, "all", ()),
        (AXOLOTL | {"freeze_mm_modules": True}, True, "frozen", ()),
        (AXOLOTL | {"adapter": "lora", "lora_target_linear": True}, True, "all", ()),
        (AXOLOTL | {"adapter": "lora", "lora_target_modules": EXPRESSION}, True, "frozen", ()),
        (AXOLOTL | {"datasets": [{"path": "owner/texts", "type": "completion"}]}, False, "frozen", ()),
    ],
)
def test_what_is_trained_of_images(tree: dict[str, Any], images: bool, vision: str, freeze: tuple[str, ...]) -> None:
    config, report = converted(tree)
    assert (config.data.images, config.train.vision, tuple(config.train.freeze)) == (images, vision, freeze)
    freezing = [key for key in tree if key in UNFROZEN]
    assert (f"{', '.join(sorted(freezing, reverse=True))}: of data with images" in report) == (
        not images and bool(freezing)
    )
    if "media_dir" in tree:
        assert "media_dir: relative paths of images start at the folder of the records' file" in report
        assert ("reduces them to image_max_pixels before, 589,824 unless set" in report) == images


def test_the_projector_is_what_no_tower_is() -> None:
    of_projectors = ("visual.merger.mlp.0", "visual.deepstack_merger_list.0.norm", "multi_modal_projector.linear_1")
    assert all(re.search(PROJECTOR, f"model.{name}.weight") for name in of_projectors)
    assert not re.search(PROJECTOR, "model.visual.blocks.0.attn.qkv.weight")


def test_freeze_tuning_of_a_tower_is_set_by_hand() -> None:
    Path("theirs.yaml").write_text(yaml.safe_dump(LLAMA_FACTORY | UNFROZEN | {"finetuning_type": "freeze"}))
    found = convert(Path("theirs.yaml"))
    assert found.refused
    assert any("set train.vision and train.trainable by hand" in line for line in found.report)


@pytest.mark.parametrize(
    ("changes", "stream", "line"),
    [
        ({"save_steps": 50}, 20 * 10**9, "at most 20GB of the data lie on disk"),
        ({}, None, "whole before training, since data.stream: the rows of a stream are not counted before it ends"),
        ({"save_steps": 50, "val_set_size": 0.1}, None, "data.eval_fraction: does not go with data.stream"),
    ],
)
def test_streams(changes: dict[str, Any], stream: int | None, line: str) -> None:
    texts = [{"path": "owner/texts", "type": "completion"}]
    given = AXOLOTL | {"streaming": True, "max_steps": 90, "datasets": texts, "processor_type": None} | changes
    config, report = converted(given)
    assert config.data.stream == stream
    assert line in next(part for part in report.splitlines() if part.startswith("  streaming: "))
