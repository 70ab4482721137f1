"""Makes runs whose host memory has no room for all optimizer state, and checks what must hold of the disk."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning.run_spec import PlanningProblem, planning_problem
from megatrain_ray.report.measured_starts import compare_starts
from megatrain_ray.run.run_files import RunFiles
from tests.support.runs import config, write_config

DISK_BYTES_PER_S = 1e9
# Model of `spilling_settings`.
SHAPE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Gradients that are rounded when they leave never wait on the device.
ROUNDED = {"train__grad_dtype": "bf16", "train__micro_batch_size": 4, "train__accumulate": 1}

NUM_LAYERS = 8  # with weights on disk: of five or fewer, windows and slots would take as much as the working copies


def small_model(folder: Path, hidden_size: int = 64, num_layers: int = 6) -> Path:
    shape = LlamaConfig(
        vocab_size=320, hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    return folder / "model"


def long_model(folder: Path) -> Path:
    """Write a model of narrow layers, whose activations take more than their weights."""
    shape = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    return folder / "model"


def spilling_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings of two GPUs, with two sequences an update each."""
    split = {"train__batch_size": 4, "train__micro_batch_size": 2, "train__accumulate": 1}
    two = {"hardware__num_gpus": 2, "train__schedule": "constant", "data__seq_len": 256}
    return config(folder / "run", SHAPE, **split | two | changes)


def spilling(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a little less host memory than it needs, and a folder on disk."""
    too_little = _too_little_ram(planning_problem(load_config(write_config(folder / "question.yaml", tree))))
    return _limited(tree, too_little, folder / "spill")


def with_gradients_on_disk(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a folder on disk, and the most host memory with which gradients wait there, too."""
    enough = _too_little_ram(planning_problem(load_config(write_config(folder / "question.yaml", tree))))
    limited = _limited(tree, enough, folder / "spill")
    question = planning_problem(load_config(write_config(folder / "question.yaml", limited)))
    least = _too_little_ram(question) + 4096
    for ram_bytes in range(enough, least - 1, (least - enough) // 32):
        if _within(question, ram_bytes).plan().gradients_on_disk:
            return _limited(tree, ram_bytes, folder / "spill")
    raise AssertionError("no gradient ever waits on disk")


def with_all_on_disk(folder: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a folder on disk, and just as much host memory as it needs then."""
    limited = _limited(tree, 1 << 36, folder / "spill")
    question = planning_problem(load_config(write_config(folder / "question.yaml", limited)))
    return _limited(tree, _too_little_ram(question) + 4096, folder / "spill")


def least_ram(folder: Path, tree: Mapping[str, Any]) -> int:
    """Return a hardware.ram_limit with which the configuration just fits, with all on disk that may be there.

    tree: has a spill.path.
    """
    question = planning_problem(load_config(write_config(folder / "question.yaml", tree)))
    assert question.machine.spill is not None
    return _too_little_ram(question) + 4096


def _limited(tree: Mapping[str, Any], ram_bytes: int, on_disk: Path) -> dict[str, Any]:
    """Return the configuration with this host memory, this folder on disk, and fixed rates.

    What goes to the disk depends on how fast it is. Here it is slow, so nothing goes there that need not.
    """
    rates = on_disk.parent / "rates.json"
    rates.write_text(replace(TYPICAL_CPU, disk_bytes_per_s=DISK_BYTES_PER_S).to_json())
    hardware = {"profile": str(rates), **tree.get("hardware", {}), "ram_limit": ram_bytes}
    spill = {"path": str(on_disk), "compression": "none", **tree.get("spill", {})}
    return {**tree, "hardware": hardware, "spill": spill}


def _too_little_ram(question: PlanningProblem) -> int:
    """Return a hardware.ram_limit with which the plan just does not fit."""
    plenty = _within(question, 1 << 36).plan()
    low = next(row.num_bytes for row in plenty.memory_items if row.name == "processes")  # does not fit
    high = sum(row.num_bytes for row in plenty.memory_items if row.name != "copies for saves")  # fits
    while high - low > 4096:
        middle = (low + high) // 2
        try:
            _within(question, middle).plan()
        except CapacityError:
            low = middle
        else:
            high = middle
    return low


def _within(question: PlanningProblem, ram_bytes: int) -> PlanningProblem:
    return replace(question, machine=replace(question.machine, ram_bytes=ram_bytes))


def assert_traffic_is_as_planned(run_dir: Path, plan: Plan) -> None:
    """Assert that disk traffic is as planned: that of GPU workers byte for byte, that of shards within a factor of 2.

    Shards also read for saves, and write after an update.
    """
    (found,) = compare_starts(RunFiles(run_dir))
    activations, weights, all_of_it = (
        found.term(name) for name in ("activation traffic", "weights read", "disk traffic")
    )
    assert activations and activations.measured == activations.predicted
    assert activations.measured == 2 * plan.step.num_sweeps * plan.activation_disk_bytes
    assert bool(weights) == bool(plan.weights_on_disk)
    assert weights is None or weights.measured == weights.predicted == plan.disk.weight_read_bytes
    assert all_of_it and 0.5 < all_of_it.measured / all_of_it.predicted < 2
    disk, taken = found.term("disk"), found.term("on disk")
    assert disk and 0 < disk.measured < 2 * found.step.measured
    assert taken and 0 < taken.measured <= taken.predicted == plan.total_bytes(Tier.NVME)


def spill_file_of(folder: Path, name: str = "") -> Path:
    """Return the spill file in `folder` as one of the processes has it open. `name`: a part of its name."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            path = str(link.readlink())
            if path.startswith(f"{folder}/") and name in path:
                return link
    raise AssertionError(f"no process has a file of {folder}")
