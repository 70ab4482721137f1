"""Keys of other tools that cannot be honoured end a conversion unless they are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.cli import main
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.convert.convert_config import convert
from megatrain_ray.errors import ConfigError
from tests.support.other_tools import AXOLOTL, LLAMA_FACTORY, write

REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "other adapters": (
        LLAMA_FACTORY,
        {"finetuning_type": "oft"},
        "finetuning_type: oft: only full, freeze and lora are here",
    ),
    "DoRA": (LLAMA_FACTORY, {"finetuning_type": "lora", "use_dora": True}, "use_dora: adapters are plain LoRA pairs"),
    "several": (
        LLAMA_FACTORY,
        {"adapter_name_or_path": "a,b"},
        "adapter_name_or_path: a,b: one adapter can be gone on",
    ),
    "quantised": (LLAMA_FACTORY, {"quantization_bit": 4}, "quantization_bit: a quantised base is not trained"),
    "preferences": (
        LLAMA_FACTORY,
        {"stage": "ppo", "pref_beta": 0.1},
        "stage: ppo: of preferences and rewards only what docs/convert.md lists is converted",
    ),
    "sampled answers": (AXOLOTL, {"rl": "grpo"}, "rl: grpo: of preferences and rewards only"),
    "answers as records without rl": (
        AXOLOTL,
        {"datasets": [{"path": "chats", "type": "chatml.intel"}]},
        "datasets: chats: type: chatml.intel: is not here",
    ),
    "a limit of each of several": (
        LLAMA_FACTORY,
        {"dataset_dir": "ONLINE", "dataset": "a/b,c/d", "max_samples": 9},
        "max_samples: is of each data set there, and data.max_records of all in data.path together",
    ),
    "split off": (LLAMA_FACTORY, {"val_size": 100}, "val_size: 100: expected a share below 1"),
    "media": (
        LLAMA_FACTORY,
        {"image_max_pixels": 262144},
        "image_max_pixels: the model's own processor sets the size of images",
    ),
    "best": (
        LLAMA_FACTORY,
        {"metric_for_best_model": "rouge"},
        "metric_for_best_model: rouge: the best save is the one",
    ),
    "plugin": (
        AXOLOTL,
        {"plugins": ["axolotl.integrations.kd.KDPlugin"]},
        "plugins: ['axolotl.integrations.kd.KDPlugin']:",
    ),
    "schedule": (
        LLAMA_FACTORY,
        {"lr_scheduler_type": "polynomial"},
        "lr_scheduler_type: polynomial: only",
    ),
    "optimizer": (AXOLOTL, {"optimizer": "lion_8bit"}, "optimizer: lion_8bit: the optimizer is AdamW or"),
    "qlora": (AXOLOTL, {"adapter": "qlora", "load_in_4bit": True}, "adapter: qlora: adapters are plain LoRA pairs"),
    "tokens": (
        AXOLOTL,
        {"special_tokens": {"eos_token": "</s>"}},
        "special_tokens: {'eos_token': '</s>'}: the",
    ),
    "hub data": (
        AXOLOTL,
        {"datasets": [{"path": "o/d", "type": "alpaca", "split": "train[:20%]"}]},
        "datasets: o/d: split: train[:20%]: give the split alone",
    ),
    "data type": (
        AXOLOTL,
        {"datasets": [{"path": "chats", "type": "oasst"}]},
        "datasets: chats: type: oasst: is",
    ),
    "data keys": (
        AXOLOTL,
        {"datasets": [{"path": "chats", "type": "chat_template", "roles_to_train": ["user"]}]},
        "datasets: chats: roles_to_train: ['user']: cannot be followed",
    ),
    "kinds": (
        AXOLOTL,
        {"datasets": [{"path": "chats", "type": "alpaca"}, {"path": "chats", "type": "completion"}]},
        "datasets: are of several types",
    ),
    "rows": (
        AXOLOTL,
        {"unfrozen_parameters": ["^lm_head.weight$[:32000]"]},
        "unfrozen_parameters: ['^lm_head.weight$[:32000]']: parameters are trained or frozen as a whole",
    ),
    "groups": (AXOLOTL, {"lr_groups": {"mlp": 1e-5}}, "lr_groups: {'mlp': 1e-05}: expected a list of {name, modules"),
    "doubles": (AXOLOTL, {"dataset_exact_deduplication": True}, "dataset_exact_deduplication: all records are read"),
    "unknown": (AXOLOTL, {"brand_new": 1}, "brand_new: is no key of Axolotl that is known here"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_honoured_ends_it_unless_it_is_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, changes, line = REFUSALS[name]
    path = write(folder, text, **{"max_steps": 100} | changes)
    assert main(["convert-config", str(path), "--out", "ours.yaml"]) == 2
    told = capsys.readouterr()
    assert f"\n  {line}" in told.err.partition("cannot be honoured:")[2]
    assert told.err.endswith("change them, or leave them out with --ignore-unsupported\n")
    assert not Path("ours.yaml").exists()
    options = [str(path), "data.path=chats", "data.kind=sft", "--ignore-unsupported"]
    assert main(["convert-config", *options]) == 0
    assert load_config(write(folder, capsys.readouterr().out)).train.steps == 100


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: x\n")
    with pytest.raises(ConfigError, match=r"one of the keys model_name_or_path \(LLaMA-Factory\), base_model \("):
        convert(tmp_path / "a.yaml")
