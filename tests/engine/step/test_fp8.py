"""train.compute: fp8 in whole steps: the bits of plain PyTorch with the same products, however a step runs."""

from __future__ import annotations

import dataclasses
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from megatrain_ray.engine.activations import activation_store
from megatrain_ray.engine.layer_calls import compiled_call
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.fp8_products import fp8_problem
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.weights_stream.bound_weights import WeightBindings
from tests.support.adapters import build_adapter
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.tiny import build_tiny, text_batches, tiny_batches

STEPS = 3
# tests/engine/model/test_fp8_products.py asserts that CI's torch has the products.
pytestmark = pytest.mark.skipif(fp8_problem(torch.device("cpu")) is not None, reason="torch 2.11 has them on GPUs only")
RECIPE = Recipe(STEPS, precision="bf16", compute="fp8", micro_batch_size=2)
LAYERS = LoopOrder.LAYERS_OUTER
MODES = {
    "recomputed": Mode(LAYERS, ActivationPolicy.RECOMPUTE, num_shards=3, num_fragments=3),
    "divided blocks": Mode(block_parts=8),
    "some on the device": Mode(hbm_layers=frozenset({0, 2})),
}


def assert_equal(ours: EngineResult, theirs: Result) -> None:
    assert ours.plan.compute.fp8
    assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
    for name, master in theirs.masters.items():
        assert torch.equal(ours.masters[name], master), name


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_as_plain_pytorch_with_these_products(tmp_path: Path, mode: str) -> None:
    build_tiny(tmp_path)
    ours = train_engine(tmp_path, tiny_batches(STEPS), RECIPE, MODES[mode])
    assert_equal(ours, train_reference(tmp_path, tiny_batches(STEPS), RECIPE))


def test_with_pairs_of_lora_and_rows_that_no_kernel_takes(tmp_path: Path) -> None:
    """Micro-batches of 2 × 31 tokens, which are no multiple of 16; pairs multiply in bf16."""
    model = build_tiny(tmp_path / "model")
    adapter = build_adapter(tmp_path / "adapter", model, ("q_proj", "down_proj"))
    recipe = dataclasses.replace(RECIPE, adapter=adapter, trainable=("up_proj",))
    batches = text_batches(STEPS, 4, 31)
    assert_equal(train_engine(model, batches, recipe, MODES["recomputed"]), train_reference(model, batches, recipe))


def test_mlps_in_chunks_have_scales_of_their_own(tmp_path: Path) -> None:
    """The output of a token is the same; the gradients of weights are sums over chunks, rounded differently."""
    build_tiny(tmp_path)
    whole = train_engine(tmp_path, tiny_batches(1), RECIPE, Mode())
    chunked = train_engine(tmp_path, tiny_batches(1), RECIPE, Mode(mlp_chunk_tokens=20))
    assert chunked.losses == whole.losses
    assert chunked.grad_norms != whole.grad_norms
    assert chunked.grad_norms == pytest.approx(whole.grad_norms, rel=2e-3)


def test_fifty_losses_are_near_those_of_bf16(tmp_path: Path) -> None:
    build_tiny(tmp_path, num_layers=1)
    recipe, batches = dataclasses.replace(RECIPE, steps=50, lr=3e-3), text_batches(50, 2, 32)
    ours = train_engine(tmp_path, batches, recipe, Mode())
    plain = train_engine(tmp_path, batches, dataclasses.replace(recipe, compute=None), Mode())
    gaps = [a - b for a, b in zip(ours.losses, plain.losses, strict=True)]
    assert statistics.mean(plain.losses[-10:]) < plain.losses[0] - 2, "it has learned"
    assert 0 < max(map(abs, gaps)) < 0.03
    assert abs(statistics.mean(gaps[-10:])) < 0.005


class UngeneratedCode:
    """Stands for the module torch, with a compiler that partitions graphs and then runs them operation by operation.

    Generating code for these products takes minutes on a CPU, and rounds otherwise in the last bits.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def compile(self, function: Any, *, options: Any, **how: Any) -> Any:
        def run(graph: Any, inputs: Any) -> Any:
            return make_boxed_func(graph)

        partition = partial(options["custom_partitioner_fn"], compiler="inductor")
        backend = aot_autograd(
            fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table()
        )
        return torch.compile(function, backend=backend, **how)


@pytest.mark.long
def test_what_compiled_blocks_keep_is_planned_and_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps inputs of products in FP8 for the gradients of weights."""
    monkeypatch.setattr(compiled_call, "torch", UngeneratedCode())
    monkeypatch.setattr(activation_store, "SMALL_BYTES", 1)
    saved, pack = set[torch.dtype](), WeightBindings._pack_own

    def note(self: WeightBindings, kept: list[torch.Tensor], tensor: torch.Tensor) -> Any:
        saved.add(tensor.dtype)
        return pack(self, kept, tensor)

    monkeypatch.setattr(WeightBindings, "_pack_own", note)
    build_tiny(tmp_path)
    mode = Mode(LAYERS, ActivationPolicy.KEEP, boundaries=Tier.HOST, kept=Tier.HOST, activation_budget=1.0)
    ours = train_engine(tmp_path, tiny_batches(STEPS), RECIPE, mode)
    theirs = train_reference(tmp_path, tiny_batches(STEPS), RECIPE)
    assert torch.float8_e4m3fn in saved
    moved = [2 * 2 * STEPS * layer.kept_bytes for layer in ours.plan.layers if layer.compiled]  # both ways
    assert ours.moved("kept") == sum(moved) > 0
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6), "the loss's kernel adds otherwise"
    assert ours.grad_norms == theirs.grad_norms
