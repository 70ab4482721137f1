"""A Trainer that is given TrainingArguments: the same table as convert-config, fields that say something alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from megatrain_ray import Trainer, trainer
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.convert.key_tables import load_table
from megatrain_ray.convert.training_arguments import _table
from megatrain_ray.errors import ConfigError

pytest.importorskip("accelerate")  # which TrainingArguments asks for

RECORDS = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 10


def arguments(folder: Path, **fields: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder / "run"), use_cpu=True, **fields)


def config_of(args: TrainingArguments, settings: dict[str, Any] | None = None, **objects: Any) -> TrainConfig:
    tree = {"data": {"seq_len": 16}, **(settings or {})}
    return Trainer("model", args, overrides=tree, **{"train_dataset": RECORDS} | objects).config


def test_a_script_for_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10 records, 4 an update: 2.5 updates an epoch, 7.5 in all, once the rows are counted."""
    args = arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=3, learning_rate=1e-5,
        bf16=True, logging_steps=5, lr_scheduler_type="cosine", warmup_steps=2, save_strategy="epoch",
        eval_strategy="epoch", data_seed=7, save_total_limit=1,
    )  # fmt: skip
    config = config_of(args, eval_dataset=RECORDS[:2])
    expected = {
        "model": {"path": "model"},
        "data": {
            "kind": "tokens", "path": f"{tmp_path}/run/inputs/train.jsonl",
            "eval_path": f"{tmp_path}/run/inputs/eval.jsonl", "seq_len": 16, "packing": False, "seed": 7,
        },
        "train": {
            "epochs": 3.0, "micro_batch_size": 2, "accumulate": 2, "lr": 1e-5, "schedule": "cosine", "warmup_steps": 2,
            "warmup_from_zero": True, "weight_decay": 0.0, "betas": [0.9, 0.999], "precision": "bf16", "seed": 42,
        },
        "hardware": {"device": "cpu"}, "run_dir": f"{tmp_path}/run", "save_every": "1 epoch", "save_keep": 1,
        "eval_every": "1 epoch", "log": {"every": 5},
    }  # fmt: skip
    assert config == TrainConfig.model_validate(expected)
    counted = config.resolve().with_steps(10)
    assert (counted.train.steps, counted.save_every, counted.eval_every) == (8, 2, 2)
    assert (counted.save_steps, counted.eval_steps, counted.counts_epochs) == (2, 2, False)


def test_fields_that_say_nothing_are_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(arguments(tmp_path))
    assert (config.train.epochs, config.train.micro_batch_size, config.train.precision) == (3.0, 8, "fp32")
    assert (config.save_every, config.eval_every, config.log.every) == (500, 0, None)
    told = capsys.readouterr().err.splitlines()
    assert {line.strip().partition(":")[0] for line in told} <= {"args", "logging_dir"}  # the latter has the time in it


def test_settings_count_before_arguments(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, learning_rate=1e-5, seed=3)
    settings = {
        "train": {"batch_size": 5, "lr": 2e-5, "steps": 9},
        "data": {"seq_len": 8, "packing": True},
        "run_dir": str(tmp_path / "other"),
        "save_every": None,
    }
    config = config_of(args, settings)
    assert (config.train.batch_size, config.train.micro_batch_size, config.train.accumulate) == (5, None, None)
    assert (config.train.lr, config.train.steps, config.train.seed) == (2e-5, 9, 3)
    assert (config.data.packing, config.run_dir, config.save_every) == (True, str(tmp_path / "other"), None)


def test_the_best_save_is_taken_if_the_arguments_load_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(trainer, "export_by_name", lambda *_, step, **__: taken.append(step))
    for best in (True, False):
        args = arguments(tmp_path, load_best_model_at_end=best, eval_strategy="epoch", save_strategy="epoch")
        made = Trainer("model", args, overrides={"data.seq_len": 9}, train_dataset=RECORDS, eval_dataset=RECORDS)
        made.save_model(tmp_path / "out")
        made.save_model(tmp_path / "out", step=0)
    assert taken == ["best", 0, None, 0]


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="adafactor", neftune_noise_alpha=5.0, max_steps=1)
    with pytest.raises(ConfigError) as caught:
        config_of(args)
    assert str(caught.value).splitlines() == [
        "args: cannot be honoured; leave out, or set otherwise:",
        "  neftune_noise_alpha: no noise is added to embeddings",
        "  optim: adafactor: the optimizer is AdamW or Muon",
    ]


def test_rows_are_as_long_as_the_longest_record_unless_it_is_said(tmp_path: Path) -> None:
    """The last id is a target only. Texts have a length only once they are tokens."""
    args = arguments(tmp_path, max_steps=1)
    assert Trainer("model", args, train_dataset=[*RECORDS, {"input_ids": [1] * 9}]).config.data.seq_len == 8
    with pytest.raises(ConfigError, match=r"args: the length of rows is missing: give overrides=.*data\.seq_len"):
        Trainer("model", args, train_dataset=[{"text": "a"}], processing_class="bytes")


@dataclasses.dataclass
class SFTConfig(TrainingArguments):
    """The fields of TRL's class of this name that say something here, with its defaults."""

    learning_rate: float = 2e-5
    model_init_kwargs: dict[str, Any] | None = None
    chat_template_path: str | None = None
    dataset_text_field: str = "text"
    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    packing: bool = False
    packing_strategy: str = "bfd"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    loss_type: str | None = None


def test_arguments_of_trl(tmp_path: Path) -> None:
    """What a subclass has as its own default is no default of TrainingArguments."""
    chats = [{"messages": [{"role": "user", "content": "q"}]}]

    def config_of(records: Any = chats, **fields: Any) -> TrainConfig:
        args = SFTConfig(output_dir=str(tmp_path / "run"), use_cpu=True, max_steps=3, **fields)
        return Trainer("model", args, train_dataset=records).config

    plain = config_of()
    assert (plain.data.kind, plain.data.seq_len, plain.data.packing, plain.train.lr) == ("sft", 1024, False, 2e-5)
    other = config_of(max_length=64, packing=True, chat_template_path="t.jinja", loss_type="nll", learning_rate=1e-4)
    assert (other.data.seq_len, other.data.packing, other.data.chat_template) == (64, True, "t.jinja")
    assert other.train.lr == 1e-4
    texts = config_of([{"content": "a"}], dataset_text_field="content")
    assert (texts.data.kind, texts.data.text_field) == ("pretrain", "content")
    with pytest.raises(ConfigError) as caught:
        config_of(loss_type="dft", completion_only_loss=False, model_init_kwargs={"dtype": "bfloat16"})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "  completion_only_loss", "  loss_type", "  model_init_kwargs",
    ]  # fmt: skip


def test_every_field_is_known() -> None:
    """Every field of the installed version of Transformers is known."""
    from fnmatch import fnmatchcase

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    table = _table(fields)
    known = [*table.sets, *table.otherwise, *table.meaningless, *table.refused]
    assert [name for name in sorted(fields) if not any(fnmatchcase(name, key) for key in known)] == []
    assert load_table("llama_factory").sets.keys() & fields <= table.sets.keys()
