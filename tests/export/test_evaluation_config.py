"""The configuration of a run that only evaluates, and what is refused before it starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain_ray import training_run
from megatrain_ray.commands import evaluate
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.evaluation_config import evaluation_config, pass_config, tower_of
from megatrain_ray.planning.run_spec import planning_problem
from tests.support.runs import cli_here, config, write_config
from tests.support.tiny import build_tiny


def test_nothing_is_updated_saved_or_left_behind(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model", tied=True)
    tree = config(
        tmp_path / "run", {"model_type": "gpt2"}, train__optimizer="muon", train__freeze=["embed"], save_best=True,
        train__groups=[{"match": "norm", "lr": 1.0}], eval_every=5, eval_patience=2, data__eval_path="held",
        log={"wandb": "mine", "trace": [1, 2]}, lora={"match": "q_proj"}, train__warmup_steps=3,
        data__stream="1GB", data__stream_portion="1MB",
    )  # fmt: skip
    with evaluation_config(str(model), TrainConfig.model_validate(tree | {"lora": None})) as settings:
        assert settings.train.trainable == (r"^model\.norm\.weight$",)
        assert (settings.train.steps, settings.save_every, settings.eval_every) == (0, None, 1)
        assert (settings.data.path, settings.log.wandb, settings.lora) == ("held", None, None)
        assert planning_problem(settings).plan().num_trained == 64
        folder = Path(settings.run_dir).parent
        assert folder.is_dir()
    assert not folder.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}"], "{model} is no run directory: give --config FILE, a configuration with data.eval_path or"),
        (["{model}", "--config", "{file}"], "data.eval_path is required: files to evaluate on"),
        (["{model}", "--config", "{file}", "data.eval_path={file}", "--step", "3"], "{model} is no run directory"),
        (["{model}", "--config", "{file}", "data.eval_path=gone.txt"], "error: data.eval_path: no such file: gone.txt"),
        (["{here}/gone", "--config", "{file}", "data.eval_path={file}"], "{here}/gone is no folder, nor can it be a"),
        (["{run}", "--step", "3"], "{run} holds no save yet: train until one is made"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    model, run = build_tiny(tmp_path / "model"), tmp_path / "run"
    tree: dict[str, Any] = config(run, model)
    file = write_config(tmp_path / "config.yaml", tree)
    run.mkdir()
    write_config(run / "config.yaml", tree)
    names = {"model": model, "file": file, "here": tmp_path, "run": run}
    done = cli_here("eval", *(text.format(**names) for text in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message.format(**names) in done.stderr


@pytest.mark.parametrize("adapters", [None, {"match": "q_proj"}])
def test_a_run_of_another_kind_is_refused_by_its_name_before_its_export(tmp_path: Path, adapters: Any) -> None:
    tree = config(tmp_path, {"model_type": "gpt2"}, lora=adapters, data__kind="pairs", data__eval_path="held")
    for of_run, other, message in (
        ("reward", "simpo", f"^model.path: {tmp_path} is a reward model, which predicts no tokens"),
        ("simpo", "reward", f"^{tmp_path} is no reward model, so its scores would be random"),
    ):
        tree["train"]["objective"] = of_run
        write_config(tmp_path / "config.yaml", tree)
        tree["train"]["objective"] = other
        with pytest.raises(ConfigError, match=message):
            evaluation_config(str(tmp_path), TrainConfig.model_validate(tree)).__enter__()


def test_features_of_images_are_made_by_the_model_that_a_run_began_with(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tree = config(tmp_path, model)
    tree["data"] |= {"kind": "sft", "images": True, "tokenizer": str(model)}
    for tree["train"]["vision"], path in (("frozen", str(model)), ("all", None)):
        write_config(tmp_path / "config.yaml", tree)
        assert getattr(tower_of(str(tmp_path)), "path", None) == path
    assert tower_of(str(model)) is tower_of(None) is None


def test_an_evaluation_needs_features_of_held_out_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(
        config: TrainConfig, source: Any, identity: Any, folders: tuple[Path, ...], *rest: Any
    ) -> dict[Path, Path]:
        return {folder: folder / "features" for folder in folders}

    monkeypatch.setattr(training_run, "find_features", find)
    monkeypatch.setattr(training_run, "identity_of", lambda name, settings: None)
    training, held_out = tmp_path / "training", tmp_path / "held_out"
    data, machine = SimpleNamespace(training=(training,), held_out=(held_out,)), SimpleNamespace(device="cpu")
    tree = config(tmp_path, {"model_type": "gpt2"}, data__eval_path="held", eval_every=1)
    tree["data"] |= {"kind": "sft", "images": True, "tokenizer": "t"}
    for tree["train"]["steps"], expected in ((0, ()), (1, (training / "features",))):
        made = training_run.TrainingRun(TrainConfig.model_validate(tree))
        run: Any = SimpleNamespace(config=made.config, path=tmp_path)
        found = made._features(run, None, data, machine, None)  # type: ignore[arg-type]
        assert found == (expected, (held_out / "features",))


def test_adapters_in_a_vision_tower_stay_there_whatever_the_configuration_trains(tmp_path: Path) -> None:
    images = {"kind": "sft", "images": True, "tokenizer": "t"}
    for of_run, other in (("all", "frozen"), ("frozen", "all")):
        tree = config(tmp_path, {"model_type": "gpt2"}, train__vision=of_run, lora={"match": "q_proj"})
        tree["data"] |= images
        write_config(tmp_path / "config.yaml", tree)
        tree["train"]["vision"] = other
        with pass_config(str(tmp_path), TrainConfig.model_validate(tree), imagined=True) as settings:
            assert settings.train.vision == of_run
        tree["train"]["vision"], tree["data"]["images"] = "frozen", False
        refused = pytest.raises(ConfigError, match=r"adapters are in the vision tower .* set data\.images: true")
        without = TrainConfig.model_validate(tree)
        with refused if of_run == "all" else nullcontext(), pass_config(str(tmp_path), without, imagined=True):
            pass


def test_other_data_stand_in_for_a_share_of_the_training_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainConfig] = []

    def evaluated(source: str, config: TrainConfig, step: int | None) -> dict[str, Any]:
        seen.append(config)
        return {}

    monkeypatch.setattr(evaluate, "evaluate_model", evaluated)
    tree = config(tmp_path / "run", {"model_type": "gpt2"}, data__eval_fraction=0.1)
    file = write_config(tmp_path / "config.yaml", tree)
    done = cli_here("eval", "model", "--config", str(file), "data.eval_path=other.jsonl", "--json")
    assert done.returncode == 0, done.stderr
    assert (seen[0].data.eval_path, seen[0].data.eval_fraction) == ("other.jsonl", None)
