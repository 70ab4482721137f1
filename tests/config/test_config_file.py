"""YAML in, YAML out, overrides, and what a resume may not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.config.resume_changes import resume_diff, train_changes
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_config, load_config
from megatrain_ray.errors import ConfigError
from tests.support.settings import MISSING, config, settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings()))
    return path


def load_text(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1E+2", 100.0), ("2.e1", 20.0), (".5e0", 0.5), ("3", 3.0), ("0.1", 0.1)]
)
def test_numbers_are_those_of_yaml_1_2(file: Path, text: str, value: float) -> None:
    assert load_config(file, [f"train.lr={text}"]).train.lr == value
    text_in_file = file.read_text().replace("train:\n", f"train:\n  lr: {text}\n")
    assert load_text(file.parent, text_in_file).train.lr == value


def test_overrides_are_yaml_and_win_in_order(file: Path) -> None:
    overrides = ["train.betas=[0.8, 0.9]", "train.clip=null", "hardware.ram_limit=1GiB", "run_dir=a=b"]
    changed = load_config(file, [*overrides, "train.lr=1", "train.lr=2"])
    assert (changed.train.betas, changed.train.clip, changed.train.lr) == ((0.8, 0.9), None, 2.0)
    assert (changed.hardware.ram_limit, changed.run_dir) == (1 << 30, "a=b")


def test_an_override_reaches_into_the_models_own_settings(file: Path) -> None:
    changed = load_config(file, ["model.path=null", "model.config={a: 1}", "model.config.b=2", "data.tokenizer=bytes"])
    assert changed.model.config == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "override 'train.lr': expected key=value, as in train.lr=1e-4"),
        ("train..lr=1", "override 'train..lr=1': expected key=value, as in train.lr=1e-4"),
        ("run_dir.x=1", "override 'run_dir.x=1': run_dir is run, expected a mapping to set a key in"),
        ("train.lr=[1", "override 'train.lr=[1', line 1, column 3: broken YAML: expected ',' or ']', but got "
                        "'<stream end>'"),
    ],
)  # fmt: skip
def test_a_broken_override_is_named(file: Path, override: str, message: str) -> None:
    assert refusal(file, override) == message


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({}, ["train.stepz=1"], "override 'train.stepz=1': train.stepz: unknown key; did you mean train.steps?"),
        ({}, ["train.lr=1", "train.lr=x"], "override 'train.lr=x': train.lr: expected a number, got 'x'"),
        ({}, ["data={seq_len: 8}"], "override 'data={seq_len: 8}': data.path: required."),
        ({"model__path": MISSING}, ["model.path.x=1"], "override 'model.path.x=1': model.path: expected text"),
        ({"train__warmup_steps": 4}, ["train.steps=3"], "override 'train.steps=3': train.warmup_steps: 4 is more than"),
        ({"train__min_lr": 1.0}, ["train.steps=3"], "FILE: train.min_lr: 1.0 is more than train.lr"),
        ({"train__stepz": 1}, ["train.steps=3"], "FILE: train.stepz: unknown key; did you mean train.steps?"),
        ({"train__stepz": 1}, [], "FILE: train.stepz: unknown key"),
        ({"train__batch_size": 8}, ["train.micro_batch_size=3"],
         "FILE with train.micro_batch_size=3: train.batch_size: 8 disagrees with micro_batch_size"),
        ({}, ["train.lr=x", "seed=1"], "override 'train.lr=x':\ntrain.lr: expected a number, got 'x'\n"
                                       "override 'seed=1':\nseed: unknown key"),
        ({"a": 1, "b": 1}, ["c=1"], "FILE:\na: unknown key"),
    ],
)  # fmt: skip
def test_wrong_settings_name_the_file_or_the_override(
    tmp_path: Path, changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(**changes)))
    assert refusal(file, *overrides).startswith(message.replace("FILE", str(file)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train:\n  steps: [1\nrun_dir: x\n", "line 3, column 8: broken YAML"),
        (b"run_dir: a\nrun_dir: b\n", "line 2, column 1: broken YAML: the key 'run_dir' stands twice"),
        (b"run_dir: !!python/name:os.system x\n", "line 1, column 10: broken YAML: could not determine a constructor"),
        (b"", "expected a mapping of settings, got nothing"),
        (b"- 1\n", "expected a mapping of settings, got a list"),
        (b"run_dir: \xff\n", "is not UTF-8"),
        (b"run_dir: \x00\n", "broken YAML"),
        (b"run_dir: 2026-02-31\n", "broken YAML"),
    ],
)
def test_a_broken_file_is_one_message_with_its_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert refusal(path).startswith(str(path))
    assert message in refusal(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert f"cannot read the configuration {tmp_path / 'none.yaml'}: No such file" in refusal(tmp_path / "none.yaml")
    (tmp_path / "config.yaml").touch()
    assert refusal(tmp_path).endswith(f"; that of the run there is {tmp_path / 'config.yaml'}")
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}")
    assert refusal(tmp_path / "chats.jsonl").endswith("a YAML that names it under data.path")


def test_an_override_of_steps_replaces_epochs_and_the_other_way_round(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings(train__steps=4)))
    for overrides, length in (
        (["train.epochs=2"], (None, 2.0)),
        (["train.epochs=null", "train.steps=9"], (9, None)),
        (["train.epochs=null"], (4, None)),
    ):
        train = load_config(file, overrides).train
        assert (train.steps, train.epochs) == length
    with pytest.raises(ConfigError, match=r"'train.steps=9' and 'train.epochs=2': both say how long to train"):
        load_config(file, ["train.epochs=2", "train.steps=9"])


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    awkward = config(
        run_dir="1e-4",
        train__lr=0.1 + 0.2,
        train__eps=1e-8,
        train__clip=None,
        hardware__ram_limit="1.5GiB",
        data__path=[{"path": "ä b.txt", "weight": 1}, {"path": "true", "weight": 0.7}],
        data__tokenizer="bytes",
        model__path=MISSING,
        model__config={"id2label": {0: "x"}, "rope": None, "sizes": [1, 2.5]},
        log__trace=[1, 2],
    )
    text = dump_config(awkward)
    assert load_text(tmp_path, text) == awkward
    assert dump_config(load_text(tmp_path, text)) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"train__steps": 9, "train__lr": 0.002, "train__min_lr": 0.001, "train__schedule": "linear"},
        {"train__steps": MISSING, "train__epochs": 2},
        {"train__warmup_steps": 1, "train__weight_decay": 0.0, "train__clip": None},
        {"train__betas": [0.9, 0.99], "train__eps": 1e-6},
        {"run_dir": "elsewhere"},
        {"resume": False},
        {"save_every": None},
        {"save_keep": 5},
        {"save_compress": "zstd"},
        {"save_every": 2, "save_keep_every": 4},
        {"eval_every": 7, "save_best": True, "eval_patience": 3, "data__eval_path": ["held", "out"]},
        {"hardware": {"device": "cpu", "hbm_limit": 1, "ram_limit": 2, "num_shards": 3}},
        {"spill": {"path": "nvme", "limit": 5}},
        {"log": {"trace": [1, 2]}},
    ],
)
def test_a_resume_may_change(changes: dict[str, Any]) -> None:
    assert resume_diff(config(), config(**changes)) == []


def test_a_resume_of_a_stream_may_change_its_limit_only() -> None:
    stream = config(data__stream="1GB")
    assert resume_diff(stream, config(data__stream="2GB")) == []
    assert resume_diff(stream, config()) == ["data.stream: 1000000000 -> null"]
    parts = config(data__stream="1GB", data__stream_portion="1MB")
    assert resume_diff(stream, parts) == ["data.stream_portion: null -> 1000000"]


@pytest.mark.parametrize(
    ("changes", "diff"),
    [
        ({"train__lr": 0.002, "train__seed": 2}, ["train.seed: 0 -> 2"]),
        ({"data__stream": "20GB"}, ["data.stream: null -> 20000000000"]),
        ({"train__z_loss": 1e-4, "data__seed": 1}, ["data.seed: 0 -> 1", "train.z_loss: 0.0 -> 0.0001"]),
        ({"data__path": ["a", "b"]}, ["data.path: text.txt -> [a, b]"]),
        ({"train__batch_size": 2}, ["train.batch_size: 1 -> 2"]),
        ({"train__accumulate": 2}, ["train.batch_size: 1 -> 2", "train.accumulate: 1 -> 2"]),
    ],
)
def test_a_resume_may_not_change(changes: dict[str, Any], diff: list[str]) -> None:
    assert resume_diff(config(), config(**changes)) == diff


@pytest.mark.parametrize("key", ["add_bos", "add_eos"])
def test_texts_of_a_run_begin_and_end_as_they_did(key: str) -> None:
    """A run of a release that never added these tokens goes on without them; a new one may have decided otherwise."""

    def added(config: TrainConfig) -> bool | None:
        return dict(config.data)[key]

    alone: dict[str, Any] = {"data__packing": False}
    given, old = config(**alone), config(**alone).as_begun()
    assert (added(given.resolve()), added(old), added(given.resolve(old))) == (None, False, False)
    assert resume_diff(old, given) == []
    new = config(**alone, **{f"data__{key}": True})
    assert resume_diff(old, new) == [f"data.{key}: false -> true"]
    assert added(given.resolve(new)) is True
    assert added(config(data__kind="sft").as_begun()) is None


def test_answers_of_bytes_end_as_they_did() -> None:
    """A run of a release that had no id for the end of an answer goes on without; others have a template for it."""
    given = config(data__kind="sft", data__tokenizer="bytes")
    old, new = given.as_begun(), config(data__kind="sft", data__tokenizer="bytes", data__add_eos=True)
    assert (old.data.add_bos, old.data.add_eos, given.resolve(old).data.add_eos) == (None, False, False)
    assert (resume_diff(old, given), resume_diff(old, new)) == ([], ["data.add_eos: false -> true"])
    assert given.resolve(new).data.add_eos is new.as_begun().data.add_eos is True
    assert TrainConfig.model_validate(old.model_dump()) == old
    with pytest.raises(ConfigError, match=r"^data\.add_eos: the chat template decides"):
        config(data__kind="sft", data__add_eos=False)


def test_rates_of_groups_may_change_on_a_resume_and_what_is_in_them_may_not() -> None:
    def of(*groups: dict[str, Any]) -> TrainConfig:
        return config(train__groups=list(groups))

    before = of({"match": "a", "lr": 1e-3}, {"match": "b", "weight_decay": 0.0})
    rates = of({"match": "a", "lr": 2e-3}, {"match": "b", "lr": 1.0})
    assert resume_diff(before, rates) == []
    assert train_changes(before, rates) == {
        "train.groups.0.lr": (1e-3, 2e-3),
        "train.groups.1.lr": (None, 1.0),
        "train.groups.1.weight_decay": (0.0, None),
    }
    assert resume_diff(before, of({"match": "a", "lr": 1e-3})) == ["train.groups.1.match: [b] -> null"]
    assert resume_diff(before, of({"match": "c", "lr": 1.0}, {"match": "b", "lr": 1.0})) == [
        "train.groups.0.match: [a] -> [c]"
    ]


def test_only_settings_of_train_are_named_as_changed() -> None:
    now = config(train__lr=0.002, train__clip=None, train__seed=2, save_keep=5, log__tensorboard=False)
    assert train_changes(config(), now) == {"train.lr": (1e-4, 0.002), "train.clip": (1.0, None)}


def test_the_models_own_settings_are_compared_one_by_one() -> None:
    def of(**shape: Any) -> TrainConfig:
        return config(model__path=MISSING, model__config=shape, data__tokenizer="bytes")

    assert resume_diff(of(a=1, b=[2]), of(b=[3], c=4)) == [
        "model.config.a: 1 -> null",
        "model.config.b: [2] -> [3]",
        "model.config.c: null -> 4",
    ]


def test_a_resume_compares_what_was_filled_in() -> None:
    earlier = config(train__micro_batch_size=2, train__accumulate=3).resolve()
    assert resume_diff(earlier, config(train__batch_size=6)) == []
    assert resume_diff(earlier, config(train__micro_batch_size=3, train__accumulate=2)) == [
        "train.micro_batch_size: 2 -> 3",
        "train.accumulate: 3 -> 2",
    ]


def test_a_resume_on_another_number_of_gpus_may_split_the_same_batch_otherwise() -> None:
    earlier = config(train__micro_batch_size=2, train__accumulate=2, hardware__num_gpus=3).resolve()
    assert resume_diff(earlier, config(train__micro_batch_size=4, train__accumulate=3)) == []
    assert resume_diff(earlier, config(train__batch_size=12, hardware__num_gpus=2)) == []
    with_another_batch = config(train__micro_batch_size=2, train__accumulate=2, hardware__num_gpus=2)
    assert resume_diff(earlier, with_another_batch) == ["train.batch_size: 12 -> 8"]
