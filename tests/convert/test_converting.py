"""Configurations of LLaMA-Factory and Axolotl as ours: what is set, what is listed, what ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.cli import main
from megatrain_ray.config.other_tools import RESOLVED_KEYS, SECTIONS, TABLES
from megatrain_ray.config.problem_lines import fields_by_key
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config, read_settings
from megatrain_ray.convert.convert_config import DATA_SETS, convert
from megatrain_ray.convert.key_tables import CONVERSIONS, load_table
from megatrain_ray.errors import ConfigError
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.tiny import build_tiny

LLAMA_FACTORY = """
### model
model_name_or_path: model
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_z3.json

### dataset
dataset: dialogues,facts
template: qwen
cutoff_len: 200
overwrite_cache: true
preprocessing_num_workers: 16

### output
output_dir: runs/full
logging_steps: 10
save_steps: 0.25
save_total_limit: 3
plot_loss: true
overwrite_output_dir: true

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""

AXOLOTL = """
base_model: model
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: false
strict: false

datasets:
  - path: chats
    type: chat_template
    field_messages: messages
    message_property_mappings: {role: role, content: content}
    roles_to_train: ["assistant"]
chat_template: tokenizer_default
val_set_size: 0
output_dir: ./out

sequence_len: 200
sample_packing: false
pad_to_sequence_len: true
adapter:
lora_r:
wandb_project: mine
wandb_entity:

gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 10
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-5
max_grad_norm: 0
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
saves_per_epoch: 1
weight_decay: 0.01
special_tokens:
  pad_token: <|endoftext|>
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a model, its tokenizer, and data sets of 7 and 3 chats."""
    monkeypatch.chdir(tmp_path)
    build(build_tiny(tmp_path / "model", vocab_size=320), FAMILIES["qwen2.5"])
    chats = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}]} for n in range(1, 8)
    ]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "data").mkdir()
    facts = [{"instruction": "q", "output": str(n)} for n in range(3)]
    (tmp_path / "data" / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "data" / "dialogues.json").write_text(json.dumps(chats))
    info = {
        "facts": {"file_name": "facts.json"},
        "dialogues": {"file_name": "dialogues.json", "formatting": "openai", "columns": {"messages": "messages"}},
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def write(folder: Path, text: str, **changes: Any) -> Path:
    """Write the file with these keys changed; a key that is None is left out."""
    tree = {key: value for key, value in (yaml.safe_load(text) | changes).items() if value is not None}
    (folder / "theirs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return folder / "theirs.yaml"


def converted(path: Path, *overrides: str, **options: Any) -> dict[str, Any]:
    found = convert(path, overrides, **options)
    tree = yaml.safe_load(found.text)
    TrainConfig.model_validate(tree)
    return dict(tree)


def test_a_file_of_llama_factory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "theirs.yaml").write_text(LLAMA_FACTORY)
    assert main(["convert-config", "theirs.yaml", "--out", "our run.yaml"]) == 0
    assert yaml.safe_load((folder / "our run.yaml").read_text()) == {
        "model": {"path": "model", "trust_remote_code": True},
        "data": {
            "kind": "sft", "path": "data/dataset_info.json", "dataset": ["dialogues", "facts"], "seq_len": 200,
            "packing": False, "seed": 42,
        },
        "train": {
            "epochs": 3.0, "micro_batch_size": 1, "accumulate": 2, "lr": 1e-5, "schedule": "cosine",
            "warmup_steps": 0.1, "warmup_from_zero": True, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8,
            "precision": "bf16", "seed": 42,
        },
        "run_dir": "runs/full",
        "log": {"every": 10},
        "save_every": "0.75 epochs",
        "save_keep": 3,
    }  # fmt: skip
    config = load_config(folder / "our run.yaml")
    assert (config.train.clip, config.data.shuffle) == (1.0, True)
    told = capsys.readouterr()
    assert told.out == "wrote our run.yaml; megatrain plan 'our run.yaml' says whether it fits\n"
    otherwise, _, meaningless = told.err.partition("without a meaning here:\n")
    assert "\ndone otherwise here:\n  template: the tokenizer's own is used where it has one" in f"\n{otherwise}"
    listed = [line.strip().partition(":")[0] for line in meaningless.splitlines()]
    assert listed == [
        "do_train", "deepspeed", "overwrite_cache, preprocessing_num_workers", "plot_loss", "overwrite_output_dir",
        "ddp_timeout",
    ]  # fmt: skip
    assert main(["plan", "our run.yaml", "hardware.device=cpu"]) == 0
    assert main(["convert-config", "theirs.yaml", "--out", "our run.yaml"]) == 2
    assert "--out: our run.yaml exists: nothing is overwritten" in capsys.readouterr().err


def test_a_file_of_axolotl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without another warm-up Axolotl takes 3 % of the steps."""
    (folder / "theirs.yaml").write_text(AXOLOTL)
    assert main(["convert-config", "theirs.yaml"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("# From theirs.yaml of Axolotl, by megatrain convert-config.\nmodel:\n")
    tree = yaml.safe_load(told.out)
    assert tree == {
        "model": {"path": "model"},
        "data": {
            "kind": "sft", "path": "chats", "seq_len": 200, "truncation": "drop", "packing": False, "seed": 42,
        },
        "train": {
            "epochs": 10.0, "micro_batch_size": 2, "accumulate": 2, "lr": 2e-5, "min_lr": pytest.approx(2e-6),
            "schedule": "cosine", "warmup_steps": 0.03, "warmup_from_zero": True, "weight_decay": 0.01,
            "betas": [0.9, 0.999], "eps": 1e-8, "clip": None, "precision": "bf16", "seed": 42,
        },
        "run_dir": "./out",
        "save_every": "1 epoch",
        "log": {"wandb": {"project": "mine"}},
    }  # fmt: skip
    assert "cannot be honoured" not in told.err
    TrainConfig.model_validate(tree)


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


def test_texts_of_both(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, stage="pt", dataset="texts", max_steps=50, template=None)
    assert converted(path)["data"] == {
        "kind": "pretrain", "path": "data/texts.jsonl", "text_field": "body", "seq_len": 200, "packing": True,
        "seed": 42,
    }  # fmt: skip
    texts = [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "text_column": "body"}]
    path = write(folder, AXOLOTL, datasets=None, pretraining_dataset=texts, max_steps=200)
    tree = converted(path)
    assert tree["data"] == {
        "kind": "pretrain", "path": ["a.jsonl", "b.jsonl"], "text_field": "body", "seq_len": 200, "packing": True,
        "seed": 42,
    }  # fmt: skip
    assert (tree["train"]["steps"], tree["train"]["warmup_steps"], tree["save_every"]) == (200, 6, "1 epoch")
    tokens = [{"path": "t.parquet", "type": "", "ds_type": "parquet"}]
    path = write(folder, AXOLOTL, datasets=tokens, max_steps=5)
    assert converted(path)["data"]["kind"] == "tokens"


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


def test_gpus_and_overrides(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, model_name_or_path="owner/model", model_revision="v2", dataset_dir="nowhere")
    tree = converted(path, "train.steps=20", "data.tokenizer=bytes", "save_every=null", num_gpus=4)
    assert tree["train"] | {"steps": 20, "accumulate": 8, "warmup_steps": 0.1} == tree["train"]
    assert tree["model"]["path"] == "owner/model@v2"
    assert (tree["data"]["tokenizer"], tree["save_every"]) == ("bytes", None)


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


def test_a_named_template_is_for_a_tokenizer_without_one(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, template="qwen3")
    assert "chat_template" not in converted(path)["data"]
    (folder / "model" / "tokenizer_config.json").unlink()
    assert converted(path)["data"]["chat_template"] == "qwen"
    assert "chat_template" not in converted(write(folder, LLAMA_FACTORY, template="falcon"))["data"]


def test_a_history_that_is_not_learned(folder: Path) -> None:
    for masked, learned in ((True, "last"), (False, None)):
        assert converted(write(folder, LLAMA_FACTORY, mask_history=masked))["data"].get("learn") == learned


def test_data_sets_of_the_hub(folder: Path) -> None:
    sets = [{"path": "a/b", "type": "alpaca", "split": "train"}, {"path": "c/d", "name": "en", "type": "alpaca"}]
    found = convert(write(folder, AXOLOTL, datasets=sets))
    data = yaml.safe_load(found.text)["data"]
    assert data["path"] == [{"hub": "a/b", "split": "train"}, {"hub": "c/d", "name": "en"}]
    assert data["chat_format"] == "alpaca"
    assert any("without Alpaca's headings" in line for line in found.report)
    data = converted(write(folder, LLAMA_FACTORY, dataset_dir="ONLINE", dataset="a/b"))["data"]
    assert (data["path"], data["chat_format"]) == ([{"hub": "a/b"}], "alpaca")
    first = [{"path": "a/b", "type": "alpaca", "split": "train[:1000]"}]
    data = converted(write(folder, AXOLOTL, datasets=first, val_set_size=None))["data"]
    assert (data["path"], data["max_records"]) == ([{"hub": "a/b", "split": "train"}], 1000)


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


@pytest.mark.parametrize("name", DATA_SETS)
def test_tables_name_keys_of_ours_and_each_of_theirs_once(name: str) -> None:
    table = load_table(name)
    assert {rule.target for rule in table.sets.values()} <= fields_by_key(TrainConfig).keys() | RESOLVED_KEYS.keys() | {
        None
    }
    conversions = {rule.conversion for rule in table.sets.values() if isinstance(rule.conversion, str)}
    assert conversions <= CONVERSIONS.keys()
    reasons = {**table.otherwise, **table.meaningless, **table.refused}
    listed = [
        key for section in SECTIONS for keys in read_settings(TABLES / f"{name}.yaml")[section].values() for key in keys
    ]
    assert len(reasons) == len(listed)
    assert reasons.keys() & table.sets.keys() <= table.otherwise.keys()
    assert all(" " in reason and reason == reason.strip() and "\n" not in reason for reason in reasons.values())
