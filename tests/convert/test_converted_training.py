"""What other tools set of the training itself: adapters, numbers, frozen layers, groups, saves and evaluations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.cli import main
from megatrain_ray.convert.convert_config import convert
from megatrain_ray.errors import ConfigError
from tests.support.other_tools import AXOLOTL, LLAMA_FACTORY, converted, write

LLAMA_FACTORY_LORA: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"finetuning_type": "lora"}, {"rank": 8, "alpha": 16, "match": [r"\.\d+\."]}, []),
    (
        {"finetuning_type": None, "lora_rank": 4, "lora_alpha": 4, "lora_dropout": 0.1, "lora_target": "q_proj,v_proj",
         "additional_target": "embed_tokens, norm"},
        {"rank": 4, "alpha": 4, "dropout": 0.1, "match": [r"(^|\.)q_proj$", r"(^|\.)v_proj$"]},
        [r"(^|\.)embed_tokens\.", r"(^|\.)norm\."],
    ),
]  # fmt: skip
AXOLOTL_LORA: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_mlp_kernel": True},
        {"rank": 4, "alpha": 8, "match": [r"\.\d+\."]}, [],
    ),
    (
        {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_modules_to_save": ["lm_head"],
         "lora_target_modules": r"model.layers.[\d]+.mlp.(up|down)_proj"},
        {"rank": 4, "alpha": 8, "match": [r"^(?:model.layers.[\d]+.mlp.(up|down)_proj)$"]}, [r"(^|\.)lm_head\."],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changes", "lora", "beside"),
    [
        *((LLAMA_FACTORY, *case) for case in LLAMA_FACTORY_LORA),
        *((AXOLOTL, *case) for case in AXOLOTL_LORA),
    ],
)
def test_adapters_of_both(
    folder: Path, text: str, changes: dict[str, Any], lora: dict[str, Any], beside: list[str]
) -> None:
    """What comes out can be planned: the patterns match modules of a model."""
    converted = convert(write(folder, text, max_steps=5, **changes))
    tree = yaml.safe_load(converted.text)
    assert tree["lora"] == lora
    assert tree["train"].get("trainable", []) == beside
    (folder / "ours.yaml").write_text(converted.text)
    assert main(["plan", "ours.yaml", "hardware.device=cpu"]) == 0


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (LLAMA_FACTORY, {"lr_scheduler_type": "constant", "warmup_steps": 9}, {"schedule": "constant"}),
        (LLAMA_FACTORY, {"lr_scheduler_type": "constant_with_warmup"}, {"schedule": "constant", "warmup_steps": 0.1}),
        (LLAMA_FACTORY, {"warmup_steps": 7}, {"warmup_steps": 7}),
        (LLAMA_FACTORY, {"warmup_steps": 0.02}, {"warmup_steps": 0.02}),
        (LLAMA_FACTORY, {"warmup_ratio": None}, {"warmup_steps": 0}),
        (LLAMA_FACTORY, {"bf16": None, "tf32": True}, {"precision": "tf32"}),
        (LLAMA_FACTORY, {"bf16": None}, {"precision": "fp32"}),
        (LLAMA_FACTORY, {"bf16": None, "fp16": True}, {"precision": "bf16"}),
        (LLAMA_FACTORY, {"use_muon": True}, {"optimizer": "muon"}),
        (AXOLOTL, {"optimizer": "muon"}, {"optimizer": "muon"}),
        (
            LLAMA_FACTORY,
            {"finetuning_type": "lora", "loraplus_lr_ratio": 16.0},
            {"groups": [{"match": ["lora_B"], "lr": pytest.approx(1.6e-4)}]},
        ),
        (LLAMA_FACTORY, {"adam_beta2": "0.95", "max_grad_norm": 0.3}, {"betas": [0.9, 0.95], "clip": 0.3}),
        (LLAMA_FACTORY, {"gradient_accumulation_steps": None, "learning_rate": None}, {"accumulate": 1, "lr": 5e-5}),
        (AXOLOTL, {"warmup_ratio": 0.05}, {"warmup_steps": 0.05}),
        (AXOLOTL, {"batch_size": 32, "gradient_accumulation_steps": None}, {"micro_batch_size": 2, "accumulate": 16}),
        (
            AXOLOTL,
            {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.2[0-9]+.mlp"]},
            {"trainable": [r"^(?:^lm_head\.weight$)", r"^(?:model\.layers\.2[0-9]+\.mlp)"]},
        ),
        (
            LLAMA_FACTORY,
            {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
            {"trainable": [r"\.(?:2)\."]},
        ),
        (
            LLAMA_FACTORY,
            {
                "finetuning_type": "freeze",
                "freeze_trainable_layers": -5,
                "freeze_trainable_modules": "mlp,self_attn.q_proj",
                "freeze_extra_modules": "lm_head",
            },
            {"trainable": [r"\.(?:0|1|2)\.mlp", r"\.(?:0|1|2)\.self_attn\.q_proj", "lm_head"]},
        ),
        (LLAMA_FACTORY, {"finetuning_type": "freeze"}, {"trainable": [r"\.(?:1|2)\."]}),
        (LLAMA_FACTORY, {"freeze_trainable_layers": 1}, {"trainable": None}),
        (
            AXOLOTL,
            {"embedding_lr_scale": 0.5, "embedding_lr": 1},
            {"groups": [{"match": ["embed_tokens", "lm_head"], "lr": 1e-5, "weight_decay": 0.0}]},
        ),
        (
            AXOLOTL,
            {"lr_groups": [{"name": "o", "modules": ["self_attn.o_proj", "mlp"], "lr": "1e-6"}]},
            {
                "groups": [
                    {"match": ["embed_tokens", "lm_head"], "weight_decay": 0.0},
                    {
                        "match": [r"^(?!.*(?:bias|norm)).*self_attn\.o_proj", "^(?!.*(?:bias|norm)).*mlp"],
                        "lr": 1e-6,
                    },
                ]
            },
        ),
        (AXOLOTL, {"seed": 7, "adam_epsilon": "1e-6"}, {"seed": 7, "eps": 1e-6}),
    ],
)
def test_numbers(folder: Path, text: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    path = write(folder, text, **{"max_steps": 100} | changes)
    train = converted(path)["train"]
    assert {key: train.get(key) for key in expected} == expected
    assert "warmup_steps" in train or train["schedule"] == "constant"


def test_axolotls_groups_match_what_they_match_there(folder: Path) -> None:
    groups = [{"name": "o", "modules": ["layers.1"], "lr": 1e-6}]
    path = write(folder, AXOLOTL, lr_groups=groups, max_steps=5)
    (pattern,) = converted(path)["train"]["groups"][1]["match"]
    there = ["model.layers.1.mlp.up_proj.weight", "model.layers.10.mlp.up_proj.weight"]
    others = [
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.2.x.weight",
    ]
    assert [name for name in there + others if re.search(pattern, name)] == there


def test_what_is_converted_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freeze = {"finetuning_type": "freeze", "freeze_trainable_modules": "mlp", "freeze_extra_modules": "lm_head,norm"}
    lr_groups = [{"name": "o", "modules": ["self_attn"], "lr": 1e-6}]
    for text, changes in ((LLAMA_FACTORY, freeze), (AXOLOTL, {"lr_groups": lr_groups, "embedding_lr": 1e-6})):
        path = write(folder, text, max_steps=5, **changes)
        (folder / "ours.yaml").write_text(convert(path).text)
        assert main(["plan", "ours.yaml", "hardware.device=cpu"]) == 0, capsys.readouterr()


def test_layers_of_a_model_that_is_not_here_cannot_be_counted(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, finetuning_type="freeze", model_name_or_path="./away", max_steps=5)
    with pytest.raises(ConfigError, match=r"layers cannot be counted: .*; or give train.trainable=\[PATTERN\] after"):
        convert(path)
    assert converted(path, "train.trainable=[mlp]")["train"]["trainable"] == ["mlp"]


def test_freezing_has_no_meaning_without_freeze_tuning(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, freeze_trainable_layers=1, max_steps=5)
    assert "  freeze_trainable_layers: of finetuning_type: freeze" in convert(path).report


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (LLAMA_FACTORY, {"save_strategy": "epoch"}, {"save_every": "1 epoch"}),
        (LLAMA_FACTORY, {"save_strategy": "no"}, {"save_every": 0}),
        (LLAMA_FACTORY, {"max_steps": 10, "save_steps": 0.25}, {"save_every": 3}),
        (LLAMA_FACTORY, {"val_size": 0.2}, {"eval_every": "1 epoch"}),
        (LLAMA_FACTORY, {"eval_dataset": "facts", "eval_steps": 7}, {"eval_every": 7}),
        (
            LLAMA_FACTORY,
            {"val_size": 0.2, "early_stopping_steps": 3, "load_best_model_at_end": True},
            {"eval_patience": 3, "save_best": True},
        ),
        (AXOLOTL, {"saves_per_epoch": 3}, {"save_every": "0.333333 epochs"}),
        (AXOLOTL, {"saves_per_epoch": None}, {"save_every": "1 epoch"}),
        (AXOLOTL, {"saves_per_epoch": None, "save_steps": 20}, {"save_every": 20}),
        (AXOLOTL, {"val_set_size": 0.05, "evals_per_epoch": 4}, {"eval_every": "0.25 epochs"}),
        (AXOLOTL, {"val_set_size": 0}, {"eval_every": None}),
        (
            AXOLOTL,
            {"wandb_entity": "us", "wandb_name": "first", "logging_steps": 5},
            {"log": {"every": 5, "wandb": {"project": "mine", "entity": "us", "name": "first"}}},
        ),
    ],
)
def test_what_is_done_how_often(folder: Path, text: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    tree = converted(write(folder, text, **changes))
    assert {key: tree.get(key) for key in expected} == expected
