"""From a configuration to a plan: lengths that the model has no positions for, how layers attend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain_ray import trainer, training_run
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.discovery.discover import Trials, discover
from megatrain_ray.engine.model.attention import Attention
from megatrain_ray.engine.model.parameter_rules import ParameterRules
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.errors import ConfigError
from megatrain_ray.model import discover_model
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.positions import positions_of, written_positions
from megatrain_ray.planning.run_spec import RunSpec, prepare
from tests.support.runs import config

MACHINE = Machine(device="cpu", num_cpus=2, num_nodes=1, ram_bytes=64 << 30, hbm_bytes=None)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB, POSITIONS = 48, 112, 3, 4, 2, 264, 40
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
}


def run_spec(folder: Path, shape: dict[str, Any], **changes: Any) -> RunSpec:
    tree = config(folder, LLAMA | shape, **changes)
    return prepare(TrainConfig.model_validate(tree).resolve(), MACHINE)


def test_no_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    assert run_spec(tmp_path, {}, data__seq_len=POSITIONS).plan.step.seq_len == POSITIONS
    with pytest.raises(ConfigError, match=r"data\.seq_len: 41 is more than the model's 40 positions"):
        run_spec(tmp_path, {}, data__seq_len=POSITIONS + 1)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": POSITIONS}, 4 * POSITIONS),
        ({"rope_type": "yarn", "factor": 2.5}, 100),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}, POSITIONS),
        ({"rope_type": "linear", "factor": 4.0}, POSITIONS),
        ({"full_attention": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, 2 * POSITIONS),
        (None, POSITIONS),
    ],
)
def test_yarn_stretches_the_positions_of_a_configuration_as_pages_of_models_say(
    rope: dict[str, Any] | None, positions: int
) -> None:
    """They leave max_position_embeddings as it was."""
    settings = {**LLAMA, "rope_scaling": rope}
    assert written_positions(settings) == written_positions({"text_config": settings}) == positions
    if rope is None or "full_attention" not in rope:
        assert positions_of(Architecture(settings).config) == positions


@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_are_too_long_are_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    monkeypatch.setattr(training_run, "ray_processes", None)
    shape = {"model_type": "gemma3", "text_config": LLAMA} if nested else LLAMA
    tree = config(tmp_path / "run", shape, data__seq_len=POSITIONS + 1)
    with pytest.raises(ConfigError, match=r"data\.seq_len: 41 is more than the model's 40 positions"):
        trainer.Trainer(args=tree).train()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("device", "packing", "seq_len", "num_trials"),
    [
        ("cpu", False, 128, 1),
        ("cpu", True, 128, 1),
        ("cuda", False, 128, 1),
        ("cuda", True, 128, 2),
        ("cuda", True, 127, 1),
    ],
)
def test_a_model_is_tried_as_often_as_its_attention_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, packing: bool, seq_len: int, num_trials: int
) -> None:
    """A second trial is made only where rows of one document and rows of several have different attention.

    Rows of one document have flex attention where their masks would be whole ones; rows of several have it always, if
    they are long enough for its kernels. A trial of 180 layers takes 3 s.
    """
    trials = []
    monkeypatch.setattr(
        discover_model, "discover", lambda *args, **kwargs: trials.append(kwargs) or discover(*args, **kwargs)
    )
    tree = config(
        tmp_path,
        LLAMA | {"head_dim": 16, "max_position_embeddings": 128},
        data__packing=packing,
        data__seq_len=seq_len,
        hardware__compile=False,
    )
    machine = replace(MACHINE, device=device, hbm_bytes=None if device == "cpu" else 8 << 30)
    plan = prepare(TrainConfig.model_validate(tree).resolve(), machine).plan
    assert len(trials) == num_trials
    assert plan.compute.attention is Attention.SDPA
    assert plan.compute.packed_attention is (Attention.FLEX if num_trials == 2 else Attention.SDPA)


@pytest.mark.parametrize("rules", [ParameterRules(), ParameterRules(freeze=("embed_tokens",))])
def test_a_forward_is_tried_once_for_all_numbers_of_parts(rules: ParameterRules) -> None:
    """What is found is what a trial of each would find."""
    factory, shape = Architecture(LLAMA, None, None), (torch.bfloat16, 1, 16)
    trials: Trials = {}
    for block_parts in (1, 2, 4):
        shared = discover(factory, *shape, rules, block_parts=block_parts, trials=trials)
        assert shared == discover(factory, *shape, rules, block_parts=block_parts)
    assert len(trials) == 1 + bool(rules.freeze)
