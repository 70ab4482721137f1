"""Traces of compiled layers that are kept: used again where nothing has changed, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery import discover
from megatrain_ray.engine.discovery.backward_memory import Moment
from megatrain_ray.engine.discovery.compile_trial import BudgetCost, CompileTrial, try_compiling
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.model import discover_model
from megatrain_ray.model.discover_model import KEPT_FILES, TrialCache, sources
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import open_model
from megatrain_ray.planning.run_spec import RunSpec, prepare
from tests.support.runs import ROOT, config

MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
LLAMA = {
    "model_type": "llama", "vocab_size": 264, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
MOMENTS = Moment(400, 20), Moment(350, 60)
TRIALS = (None, CompileTrial((BudgetCost(1.0, 300, MOMENTS, 0.0), BudgetCost(0.0, 10, (), 5.5))), None)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain-ray" / "trials"


def source(**changes: Any) -> ModelSource:
    return open_model(ModelConfig(config=LLAMA | changes))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Models whose layers were traced."""
    models: list[object] = []

    def noting(model: Any, *rest: Any) -> Any:
        models.append(model)
        return try_compiling(model, *rest)

    monkeypatch.setattr(discover, "try_compiling", noting)
    return models


def run_spec(folder: Path, shape: dict[str, Any], **changes: Any) -> RunSpec:
    tree = config(folder, LLAMA | shape, hardware__compile=True, **changes)
    return prepare(TrainConfig.model_validate(tree).resolve(), MACHINE)


def test_layers_are_traced_once(tmp_path: Path, traced: list[object]) -> None:
    first, second = (run_spec(tmp_path, {}).plan for _ in range(2))
    assert len(traced) == 1
    assert first == second
    assert any(layer.compiled for layer in second.layers)
    run_spec(tmp_path, {"intermediate_size": 128})
    assert len(traced) == 2
    run_spec(tmp_path, {}, train__freeze=["embed_tokens"])
    assert len(traced) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"num_attention_heads": 8}, {}),
        ({}, {"data__seq_len": 24}),
        ({}, {"train__precision": "bf16"}),
    ],
    ids=["other heads", "another length", "another precision"],
)
def test_another_model_or_shape_is_traced(
    tmp_path: Path, traced: list[object], shape: dict[str, Any], changes: dict[str, Any]
) -> None:
    run_spec(tmp_path, {})
    run_spec(tmp_path, shape, **changes)
    assert len(traced) == 2


def test_what_is_kept_is_read_as_it_was() -> None:
    assert TrialCache(source(), {"seq_len": 8}).read() is None
    TrialCache(source(), {"seq_len": 8}).write(TRIALS)
    assert TrialCache(source(), {"seq_len": 8}).read() == TRIALS
    assert TrialCache(source(), {"seq_len": 9}).read() is None
    assert TrialCache(source(vocab_size=300), {"seq_len": 8}).read() is None


def test_a_failure_is_not_kept() -> None:
    TrialCache(source(), {}).write((CompileTrial(problem="out of luck"),))
    assert TrialCache(source(), {}).read() is None


def test_code_that_may_change_is_not_kept(tmp_path: Path) -> None:
    own = ModelSource(LLAMA, None, 0, code=tmp_path)
    TrialCache(own, {}).write(TRIALS)
    assert TrialCache(own, {}).read() is None


def test_sources_of_this_package_count(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [ROOT / name for name in ("megatrain_ray", "io", "engine")]
    assert sorted(file.resolve() for file in sources()) == sorted(
        file for each in folders for file in each.rglob("*.py")
    )
    TrialCache(source(), {}).write(TRIALS)
    monkeypatch.setattr(discover_model, "_versions", lambda: ["another"])
    assert TrialCache(source(), {}).read() is None


def test_a_damaged_file_is_replaced(own_cache: Path) -> None:
    TrialCache(source(), {}).write(TRIALS)
    (file,) = own_cache.iterdir()
    file.write_text(file.read_text()[:40])
    assert TrialCache(source(), {}).read() is None
    TrialCache(source(), {}).write(TRIALS)
    assert TrialCache(source(), {}).read() == TRIALS


def test_the_oldest_files_go(own_cache: Path) -> None:
    for k in range(KEPT_FILES + 3):
        TrialCache(source(), {"seq_len": k}).write(TRIALS)
        for file in own_cache.iterdir():  # each file older than the next
            stat = file.stat()
            os.utime(file, (stat.st_atime - 10, stat.st_mtime - 10))
    assert len(list(own_cache.iterdir())) == KEPT_FILES
    kept = [TrialCache(source(), {"seq_len": k}).read() is not None for k in range(KEPT_FILES + 3)]
    assert kept == [False] * 3 + [True] * KEPT_FILES
