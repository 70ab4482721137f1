"""benchmarks/parity.py: its plain training is the reference, and a run in another mode than it says does not pass."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import parity
from benchmarks.parity import CONFIG, compare, what_is_given_up
from benchmarks.parity_modes import MODES, Common, DrawnSource, Mode
from benchmarks.plain_training import Grouping, Numbers, check_settings, train_plain
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.compiled_call import CompiledCall
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.machine.environment import versions
from megatrain_ray.model.open_model import open_model
from megatrain_ray.planning.run_spec import RunSpec
from tests.support.reference import Recipe, train_reference
from tests.support.runs import config, write_config
from tests.support.tiny import VOCAB_SIZE, build_tiny, tiny_batches

MODEL = {
    "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
CHANGES = {"train__batch_size": 4, "train__precision": "bf16", "data__packing": False}


def tiny(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(config(folder / "run", MODEL, **CHANGES | changes)).resolve()


@pytest.mark.parametrize("clip", [0.5, None])
def test_the_plain_training_is_the_reference(tmp_path: Path, clip: float | None) -> None:
    folder, batches = build_tiny(tmp_path / "model", tied=True), tiny_batches(3)
    recipe = Recipe(3, precision="bf16", micro_batch_size=2, clip=clip, warmup_steps=1)
    tree = config(
        tmp_path / "run", folder, **CHANGES, train__steps=3, train__lr=recipe.lr, train__clip=clip,
        train__warmup_steps=1,
    )  # fmt: skip
    common = Common.of(TrainConfig.model_validate(tree).resolve(), compiled=False)
    device = CpuDevice(num_threads=1)
    arguments = common.config, common.source, common.structure, common.source.drawn, batches, Grouping(2), device
    ours = train_plain(*arguments)
    device.close()
    theirs = train_reference(folder, batches, recipe)
    assert ours == Numbers(tuple(theirs.losses), tuple(theirs.grad_norms))


@pytest.mark.long
def test_every_mode_has_a_plan_and_another_plan_is_seen(tmp_path: Path) -> None:
    common = Common.of(tiny(tmp_path), compiled=True)

    def wrong(mode: Mode, plan: Plan) -> list[str]:
        return [problem.partition(":")[0] for problem in common.problems(mode, plan)]

    plans = {name: common.run_spec(mode).plan for name, mode in MODES.items()}
    assert [name for name, mode in MODES.items() if wrong(mode, plans[name])] == []
    mode = MODES["micro_batches_outer"]
    for change, seen in (
        ({"order": LoopOrder.LAYERS_OUTER}, ["order"]),
        ({"sums": Tier.HOST}, ["sums"]),
        ({"budget": 0.4}, ["activation_budgets"]),
        ({"budget": 1.0}, ["activation_budgets", "layers_that_keep_all"]),
        ({"budget": 0.0, "compiled": False}, ["compiled_layers", "compiled_loss", "activation_budgets"]),
        ({"tail_budget": 0.8}, ["activation_budgets"]),
        ({"hbm_share": 0.5}, ["hbm_layers"]),
        ({"gradients": Tier.HBM}, ["gradients_waiting_in_hbm"]),
        ({"boundaries": Tier.HOST, "order": LoopOrder.LAYERS_OUTER}, ["order", "boundaries_on_host"]),
        ({"tail_budget": 0.8, "kept": Tier.HOST}, ["kept_on_host", "activation_budgets"]),
        ({"num_micro_batches": 2}, ["num_micro_batches"]),
        ({"clips": False}, ["update_order"]),
    ):
        assert wrong(mode, common.run_spec(replace(mode, **change)).plan) == seen
    small = replace(plans["streamed"], limits=replace(plans["streamed"].limits, ram_bytes=1))
    assert wrong(MODES["streamed"], small) == ["fits"]
    assert wrong(MODES["limited"], plans["host_sums"]) == ["fills_hbm_limit"]


def test_modes_have_plans_on_a_gpu() -> None:
    """Logits of a micro-batch are whole with all of its memory, and in chunks, which need more, with the least."""
    settings = load_config(CONFIG, ["model.config.num_hidden_layers=2"]).resolve()
    source = open_model(settings.model)
    found = discover(source.factory, torch.bfloat16, 1, settings.data.seq_len, compiled=True)
    gpu = Machine(device="cuda", num_cpus=16, num_nodes=1, ram_bytes=120 << 30, hbm_bytes=139 << 30)
    common = Common(settings, DrawnSource(**vars(source)), *found, gpu)
    plans = {name: common.run_spec(mode).plan for name, mode in MODES.items()}
    assert [name for name, plan in plans.items() if [*common.problems(MODES[name], plan)]] == []
    assert (plans["host_sums"].compute.loss_chunk_tokens, plans["limited"].compute.loss_chunk_tokens) == (2048, 1024)


def test_what_is_given_up_is_heard() -> None:
    with what_is_given_up() as heard:
        CompiledCall("layers", abs).give_up(ValueError("no graph"))
    CompiledCall("others", abs).give_up(ValueError("no graph"))
    assert heard == ["layers run uncompiled: ValueError: no graph"]


def test_why_layers_run_uncompiled_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is a warning, because nobody sees less of an actor."""
    CompiledCall("layers", abs).give_up(ValueError("no graph"))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "layers run uncompiled: ValueError: no graph")
    ]


def test_a_difference_counts_at_every_step() -> None:
    plain = Numbers((3.0, 2.0, 1.0), (1.0, 1.0, 2.0))
    found = compare(Numbers((3.0, 1.5, 1.0), (1.0, 1.0, 1.0)), plain, 0.5)
    assert (found["within"], found["greatest"], found["mean"]) == (True, 0.5, pytest.approx(1 / 6))
    assert (found["same_bits"], found["greatest_of_grad_norms"]) == (False, 0.5)
    assert not compare(Numbers((3.0, 1.4, 1.0), plain.grad_norms), plain, 0.5)["within"]
    assert not compare(Numbers((3.0, math.nan, 1.0), plain.grad_norms), plain, 0.5)["within"]


def test_uncompiled_modes_have_the_bits_of_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = config(tmp_path / "run", MODEL, **CHANGES, hardware__num_shards=2)
    file, out = write_config(tmp_path / "tiny.yaml", tree), tmp_path / "out.json"
    command = [str(out), "--config", str(file), "--steps", "3", "--commit", "c0ffee"]
    assert parity.main([*command, "--modes", "uncompiled,recomputed"]) == 0
    report = json.loads(out.read_text())
    assert [mode["same_bits"] for mode in report["modes"].values()] == [True, True]
    assert report["modes"]["uncompiled"]["losses"] == report["yardstick"]["plain"]["losses"]
    assert report["modes"]["recomputed"]["plan"]["order"] == "layers_outer"
    assert 0 < report["yardstick"]["micro_batches"]["greatest"] < report["tolerance"]
    assert (report["commit"], report["versions"]) == ("c0ffee", versions())
    assert "2 of 2 modes as they should be" in capsys.readouterr().out


def test_a_mode_that_fails_is_reported_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(run_spec: RunSpec, tokens: Sequence[Path]) -> list[dict[str, Any]]:
        if run_spec.plan.step.num_micro_batches > 1:
            raise MegatrainError("no memory")
        return [{"step": 1, "loss": 0.1, "grad_norm": 1.0, "skipped": True, "hbm_peak_bytes": 0, "step_s": 1.0}]

    monkeypatch.setattr(parity, "run_in_process", run)
    file, out = write_config(tmp_path / "tiny.yaml", config(tmp_path / "run", MODEL, **CHANGES)), tmp_path / "out.json"
    command = [str(out), "--config", str(file), "--steps", "1", "--modes", "uncompiled,recomputed"]
    assert parity.main(command) == 1
    modes = json.loads(out.read_text())["modes"]
    assert modes["uncompiled"]["problems"] == ["step 1 was skipped"]
    assert modes["recomputed"]["problems"] == ["failed: MegatrainError: no memory"]
    assert [mode["within"] for mode in modes.values()] == [False, False]


def test_a_failed_mode_leaves_no_thread_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, on a GPU, host memory that is the device's: at its addresses the next mode could not have any."""

    async def fail(engine: Engine, coming: object) -> None:
        raise MegatrainError("no memory")

    monkeypatch.setattr(Engine, "run_warm_up", fail)
    file, out = write_config(tmp_path / "tiny.yaml", config(tmp_path / "run", MODEL, **CHANGES)), tmp_path / "out.json"
    before = {thread.name for thread in threading.enumerate()}
    assert parity.main([str(out), "--config", str(file), "--steps", "1", "--modes", "uncompiled"]) == 1
    assert {thread.name for thread in threading.enumerate()} == before


def test_settings_that_the_plain_training_lacks_are_refused(tmp_path: Path) -> None:
    check_settings(tiny(tmp_path))
    for change in ({"train__z_loss": 0.1}, {"train__grad_dtype": "bf16"}, {"data__packing": True}):
        with pytest.raises(ConfigError):
            check_settings(tiny(tmp_path, **change))
    with pytest.raises(ConfigError, match="6 sequences are not 4 equal parts"):
        Common.of(tiny(tmp_path, train__batch_size=6), compiled=False)


def test_the_configuration_has_the_size_of_its_name() -> None:
    settings = load_config(CONFIG)
    check_settings(settings)
    model = build_empty(open_model(settings.model).factory, torch.bfloat16)
    model.tie_weights()  # type: ignore[operator]  # of every PreTrainedModel
    assert sum(parameter.numel() for parameter in model.parameters()) == 494_032_768
    assert settings.data.seq_len * (settings.train.batch_size or 0) == 8 * 1024
