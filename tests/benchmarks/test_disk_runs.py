"""What the comparison of runs on disk and in memory calls a difference, and which memory it gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.disk_runs import MODES, Found, limit_for, on_disk, problems
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU
from megatrain_ray.planning.run_spec import planning_problem
from tests.support.runs import config, write_config

# Limits are found to 4 MiB, which is little beside its state.
WIDE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip
FOUND = Found(("a=1",), None, {}, {"loss_chunk_tokens": 64}, [(2.0, 1.0), (1.5, 0.5)], 0.1, 1.0)


def test_a_limit_is_memory_with_which_something_is_on_disk(tmp_path: Path) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(replace(TYPICAL_CPU, disk_bytes_per_s=1e9).to_json())
    machine = {"hardware__ram_limit": 1 << 36, "hardware__profile": str(rates), "spill__path": str(tmp_path)}
    tree = config(tmp_path / "run", WIDE, **machine)
    question = planning_problem(load_config(write_config(tmp_path / "config.yaml", tree)))
    state = MODES["state"].has
    assert state is not None
    limit = limit_for(question, state)
    within, beyond = (
        replace(question, machine=replace(question.machine, ram_bytes=num_bytes)).plan()
        for num_bytes in (limit, 1 << 36)
    )
    assert on_disk(within)["state"] > 0
    assert on_disk(beyond)["state"] == 0


def test_other_numbers_and_other_plans_are_told() -> None:
    assert problems(FOUND, FOUND) == []
    assert problems(replace(FOUND, problems=("not on disk",)), FOUND) == ["not on disk"]
    assert problems(replace(FOUND, numbers=[(2.0, 1.0), (1.5, 0.6)]), FOUND) == ["other losses or norms"]
    (told,) = problems(replace(FOUND, numerics={"loss_chunk_tokens": 32}), FOUND)
    assert told.startswith("another plan: {'loss_chunk_tokens': 32}")
