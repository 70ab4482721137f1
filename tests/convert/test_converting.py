"""Configurations of LLaMA-Factory and Axolotl as ours: what is set, what is listed, what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatrain_ray.cli import main
from megatrain_ray.config.other_tools import RESOLVED_KEYS, SECTIONS, TABLES
from megatrain_ray.config.problem_lines import fields_by_key
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config, read_settings
from megatrain_ray.convert.conversions import CONVERSIONS
from megatrain_ray.convert.convert_config import DATA_SETS, convert
from megatrain_ray.convert.key_tables import load_table
from tests.support.other_tools import AXOLOTL, LLAMA_FACTORY, converted, write


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


def test_gpus_and_overrides(folder: Path) -> None:
    path = write(folder, LLAMA_FACTORY, model_name_or_path="owner/model", model_revision="v2", dataset_dir="nowhere")
    tree = converted(path, "train.steps=20", "data.tokenizer=bytes", "save_every=null", num_gpus=4)
    assert tree["train"] | {"steps": 20, "accumulate": 8, "warmup_steps": 0.1} == tree["train"]
    assert tree["model"]["path"] == "owner/model@v2"
    assert (tree["data"]["tokenizer"], tree["save_every"]) == ("bytes", None)


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
