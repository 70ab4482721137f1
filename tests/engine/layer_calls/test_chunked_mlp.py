"""MLPs in chunks of tokens have the numbers of whole ones, in every way a step can run.

They take no more memory than the plan says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layer_calls.chunked_mlp import ChunkedMlp, installed
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.structure import Mlp, ModelStructure
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.memory.chunk_sizes import MAX_ELEMENTS, MLP_CHUNK_TOKENS, may_chunk, mlp_chunk_tokens
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Candidate, Request
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.model.architecture import Architecture
from tests.support.candidate_plans import build_plan
from tests.support.device_builders import MAKERS, Make
from tests.support.documents import packed
from tests.support.families import FAMILIES
from tests.support.family_models import build_family, family_batches
from tests.support.own_code import CODE, build_own_code
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import MACHINE, EngineResult, Mode, folder_source, train_engine
from tests.support.tiny import build_tiny, tiny_batches

STEPS = 3
KEEP, RECOMPUTE = ActivationPolicy.KEEP, ActivationPolicy.RECOMPUTE
INNER, LAYERS = LoopOrder.MICRO_BATCHES_OUTER, LoopOrder.LAYERS_OUTER
UNEVEN = 24  # tokens: of the 32 or more of a micro-batch below the last chunk has fewer
# Losses and norms beside those of whole MLPs: gradients of weights are summed in another order.
BOUND = 1e-6

# Families whose language model has the blocks of another one.
TWINS = {name for name, family in FAMILIES.items() if "tied" in name or "vision_config" in family.config}


def discovered(name: str, **changes: object) -> tuple[ModelStructure, ActivationBytes]:
    return discover(Architecture(FAMILIES[name].config | changes), torch.float32, 1, 12, chunked=True)


@pytest.mark.spread(9)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TWINS])
def test_no_token_of_an_mlp_looks_at_another(name: str) -> None:
    """What is taken for an MLP computes the same for some tokens at a time, and so does its backward."""
    router_logits = {"output_router_logits": False} if "output_router_logits" in FAMILIES[name].config else {}
    structure, activations = discovered(name, **router_logits)
    layers = {layer.mlp: layer for layer in structure.layers if layer.mlp}
    assert (activations.in_chunks() is not None) is bool(layers)
    torch.manual_seed(0)
    model = Architecture(FAMILIES[name].config | router_logits)(torch.float32)
    model.apply(_fill)
    for mlp, layer in layers.items():
        block = model.get_submodule(layer.modules[0])
        module = block.get_submodule(mlp.path)
        whole = _values(module)
        with installed(block, mlp.path, 5):
            chunked = block.get_submodule(mlp.path)
            assert isinstance(chunked, ChunkedMlp)
            for mine, theirs in zip(_values(chunked), whole, strict=True):
                torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs)
        assert block.get_submodule(mlp.path) is module


@pytest.mark.spread(7)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TWINS])
def test_no_token_of_the_last_norm_looks_at_another(name: str) -> None:
    structure, activations = discovered(name)
    model = Architecture(FAMILIES[name].config)(torch.float32)
    torch.manual_seed(0)
    model.apply(_fill)
    assert structure.norms <= set(structure.layers[-1].modules) - structure.loss_modules
    for path in structure.norms:
        norm = model.get_submodule(path)
        for mine, theirs in zip(_values(ChunkedMlp(norm, 5)), _values(norm), strict=True):
            torch.testing.assert_close(mine, theirs)
    if chunked := activations.in_chunks():
        assert structure.norms, "where MLPs are computed in chunks the norm is, too"
        assert chunked.kept[-1] < activations.kept[-1] or not activations.kept[-1]


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.copy_(0.1 * torch.randn_like(parameter))


def _values(module: nn.Module) -> list[torch.Tensor]:
    """Output and gradients for fixed tokens, 3 chunks of 5 with one token less."""
    generator = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(2, 2, 7, 32, generator=generator)
    hidden.requires_grad_()
    output = module(hidden)
    parameters = [p for p in module.parameters() if p.is_floating_point()]
    return [output, *torch.autograd.grad((output * weights).sum(), [hidden, *parameters], allow_unused=True)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Llama", {"mlp_bias": True}), ("DeepSeek-V3", {}), ("Mixtral", {"output_router_logits": False})],
)
def test_dense_and_expert_mlps_are_found(name: str, changes: dict[str, object]) -> None:
    structure, _ = discovered(name, **changes)
    assert all(layer.mlp and layer.mlp.path == "mlp" for layer in structure.layers[1:-1])


@pytest.mark.parametrize("name", ["GPT-2", "Mixtral"], ids=["dropout", "router logits leave it"])
def test_what_chunks_would_change_is_not_offered(name: str) -> None:
    structure, activations = discovered(name)
    assert not any(layer.mlp for layer in structure.layers)
    assert activations.in_chunks() is None


MIXES_TOKENS = CODE.replace("class MixerBase", """class Mix(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.down = nn.Linear(size, size)

    def forward(self, hidden):
        return self.down(hidden.cumsum(1))


class MixerBase""").replace("self.norm = ", "self.mlp = Mix(size)\n        self.norm = ").replace(
    "return hidden +", "return hidden + self.mlp(hidden) +"
)  # fmt: skip


def test_what_a_models_own_code_calls_an_mlp_stays_whole(tmp_path: Path) -> None:
    """A token of it may look at others."""
    source = folder_source(build_own_code(tmp_path, code=MIXES_TOKENS), trust_remote_code=True)
    structure, activations = discover(source.factory, torch.float32, 1, 12, chunked=True)
    assert any("mlp.down" in parameter.name for layer in structure.layers for parameter in layer.parameters)
    assert not any(layer.mlp for layer in structure.layers)
    assert activations.in_chunks() is None


def run(folder: Path, recipe: Recipe, mode: Mode, **how: object) -> tuple[EngineResult, Result]:
    build_tiny(folder)
    batches = tiny_batches(STEPS)
    return train_engine(folder, batches, recipe, mode, **how), train_reference(folder, batches, recipe)  # type: ignore[arg-type]


def assert_close(ours: EngineResult, theirs: Result | EngineResult, bound: float = BOUND) -> None:
    """Assert that losses, gradient norms and masters are close; masters by their norms.

    AdamW makes a whole step even of an element whose gradient is next to nothing. Such a gradient may differ in its
    first digits, from one kind of CPU to the next too.
    """
    assert ours.losses == pytest.approx(theirs.losses, rel=bound)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=bound)
    for name, master in theirs.masters.items():
        assert (ours.masters[name] - master).norm() <= 1e-4 * master.norm(), name


MODES = {
    "kept": Mode(),
    "recomputed": Mode(activations=RECOMPUTE, num_shards=2, num_fragments=3),
    "layers outer": Mode(LAYERS, RECOMPUTE),
    "boundaries on the host": Mode(activations=RECOMPUTE, boundaries=Tier.HOST),
    "in HBM": Mode(hbm_layers=frozenset({0, 1, 2})),
    "sums on the host": Mode(sums=Tier.HOST),
    "captured": Mode(hbm_layers=frozenset(range(5)), captured=True),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_steps_are_those_of_plain_pytorch(tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []  # tokens of the chunks of each sweep
    chunks = ChunkedMlp._chunks

    def spy(self: ChunkedMlp, hidden: torch.Tensor) -> list[tuple[torch.Tensor, slice]]:
        found = [*chunks(self, hidden)]
        seen.append(tuple(chunk.shape[1] for chunk, _ in found))
        return found

    monkeypatch.setattr(ChunkedMlp, "_chunks", spy)
    ours, theirs = run(tmp_path, Recipe(STEPS, micro_batch_size=1), replace(mode, mlp_chunk_tokens=UNEVEN))
    assert (ours.plan.compute.mlp_chunk_tokens, ours.plan.num_mlp_chunks) == (UNEVEN, 2)
    of_block = 3 if mode.activations is RECOMPUTE else 2
    assert set(seen) == {(UNEVEN, 32 - UNEVEN)}
    assert len(seen) >= STEPS * 4 * (3 * of_block + 2), "in every step and micro-batch each block, and the norm"
    assert_close(ours, theirs)


@pytest.mark.parametrize("chunk_tokens", [16, 40, 64])
def test_any_number_of_chunks(tmp_path: Path, chunk_tokens: int) -> None:
    """128 tokens in several rows are bit-equal, except for gradients of weights, whose sums have another order."""
    ours, theirs = run(tmp_path, Recipe(STEPS, micro_batch_size=4), Mode(mlp_chunk_tokens=chunk_tokens))
    assert ours.plan.num_mlp_chunks == {16: 8, 40: 4, 64: 2}[chunk_tokens]
    assert ours.losses[0] == theirs.losses[0]
    assert_close(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_chunk_is_bit_equal(tmp_path: Path, precision: str) -> None:
    ours, theirs = run(tmp_path, Recipe(STEPS, micro_batch_size=4, precision=precision), Mode(mlp_chunk_tokens=128))
    assert ours.losses == theirs.losses
    assert ours.grad_norms == theirs.grad_norms
    assert all(torch.equal(ours.masters[name], master) for name, master in theirs.masters.items())


def test_bf16_gradients_are_summed_in_fp32() -> None:
    """Sixteen chunks are as near to exact gradients as one is: a bf16 sum of them would be some times further."""
    torch.manual_seed(0)
    block = nn.Module()
    block.mlp = nn.Linear(32, 32, bias=False)
    hidden, weights = torch.randn(2, 1, 512, 32)

    def error() -> float:
        output = block.mlp(hidden.bfloat16())
        (found,) = torch.autograd.grad((output * weights.bfloat16()).sum(), list(block.mlp.parameters()))
        exact = weights.bfloat16().double()[0].T @ hidden.bfloat16().double()[0]
        return float((found.double() - exact).norm() / exact.norm())

    block.bfloat16()
    whole = error()
    with installed(block, "mlp", 32):
        assert error() < 1.5 * whole  # 1.34: each chunk is rounded once, as a whole gradient is


def test_what_is_frozen_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one computed for it."""
    seen: list[list[bool]] = []
    gradients = ChunkedMlp.gradients

    def spy(self: ChunkedMlp, *args: Any) -> list[torch.Tensor]:
        seen.append([*args[-1]])
        return gradients(self, *args)

    monkeypatch.setattr(ChunkedMlp, "gradients", spy)
    block, hidden = nn.Module(), torch.randn(1, 8, 4, requires_grad=True)
    block.mlp = nn.Linear(4, 4)
    block.mlp.weight.requires_grad_(False)
    with installed(block, "mlp", 3):
        block.mlp(hidden).sum().backward()
    assert seen == [[True, False, True]]
    torch.testing.assert_close(hidden.grad, block.mlp.weight.sum(0).expand(1, 8, 4))
    torch.testing.assert_close(block.mlp.bias.grad, torch.full((4,), 8.0))


def test_pairs_and_what_is_frozen(tmp_path: Path) -> None:
    build_tiny(tmp_path)
    lora = LoraConfig(match=(r"mlp\.",), rank=4, alpha=8)
    batches, recipe = tiny_batches(STEPS), Recipe(STEPS, micro_batch_size=2)
    ours, theirs = (
        train_engine(tmp_path, batches, recipe, Mode(mlp_chunk_tokens=tokens), lora=lora) for tokens in (UNEVEN, 0)
    )
    assert sum("lora_B" in name and bool(master.any()) for name, master in ours.masters.items()) == 9
    assert_close(ours, theirs)


def test_experts_and_packed_documents(tmp_path: Path) -> None:
    build_family("DeepSeek-V3", tmp_path)
    held_out, recipe = family_batches(1), Recipe(2, seed=3)
    batches = [packed(step) for step in range(2)]
    ours, theirs = (
        train_engine(tmp_path, batches, recipe, Mode(mlp_chunk_tokens=tokens), held_out=held_out) for tokens in (8, 0)
    )
    assert_close(ours, theirs)
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=BOUND)


@pytest.mark.long
@pytest.mark.timeout(900)  # a C++ compiler at work, several minutes where other processes have the cores
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_compiled_layers_and_their_chunks(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Make) -> None:
    """Released slots are NaN, and what a layer keeps of its weights is found where they are when its backward comes."""
    caplog.set_level(logging.INFO, "megatrain_ray.engine")
    build_tiny(tmp_path)
    batches, recipe = tiny_batches(2), Recipe(2, micro_batch_size=2)
    torch._dynamo.utils.counters.clear()
    mode = Mode(activation_budget=0.4, num_fragments=3, mlp_chunk_tokens=32)
    ours = train_engine(tmp_path, batches, recipe, mode, held_out=batches[:1], make_device=make)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    theirs = train_engine(tmp_path, batches, recipe, Mode(), held_out=batches[:1], make_device=make)
    assert all(layer.compiled for layer in ours.plan.layers[1:-1])
    assert not [record.message for record in caplog.records if "uncompiled" in record.message]
    assert graphs == 2 + 2 + 2 + 1, "two for the plan; a layer to train and to evaluate; a chunk of each; the loss"
    bound = BOUND if make is MAKERS["cpu"] else 10 * BOUND  # a GPU's kernels differ more; a guess
    assert_close(ours, theirs, bound)
    assert ours.evaluations == pytest.approx(theirs.evaluations, rel=bound)


WIDE = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=65536,
)  # fmt: skip


def wide(seq_len: int) -> tuple[ModelStructure, ActivationBytes]:
    def factory(dtype: torch.dtype) -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(WIDE, dtype=dtype)
        return model

    return discover(factory, torch.float32, 1, seq_len, chunked=True)


def request_of(seq_len: int, **changes: object) -> Request:
    request = Request(
        precision=Precision.FP32, round_gradients=False, clip=True, micro_batch_size=1, num_micro_batches=1,
        seq_len=seq_len, saves=False,
    )  # fmt: skip
    return replace(request, **changes)  # type: ignore[arg-type]


def plan_in_chunks(seq_len: int, chunk_tokens: int) -> Plan:
    structure, activations = wide(seq_len)
    candidate = Candidate(INNER, RECOMPUTE, num_block_slots=2, num_edge_slots=2)
    chunks = activations.in_chunks() if chunk_tokens else activations
    assert chunks is not None
    return build_plan(structure, chunks, MACHINE, request_of(seq_len, mlp_chunk_tokens=chunk_tokens), candidate)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11, at every profile
def test_a_backward_takes_what_the_plan_says() -> None:
    """Bytes at most of one block's forward and backward, whole and in chunks, beside the plan's rows for them."""
    seq_len, chunk_tokens = 1024, 128
    model = AutoModelForCausalLM.from_config(WIDE, dtype=torch.float32).model
    block, hidden = model.layers[0], torch.randn(1, seq_len, 32, requires_grad=True)
    rotary = model.rotary_emb(hidden, torch.arange(seq_len)[None])

    def most() -> int:
        def step() -> None:
            output = block(hidden, position_embeddings=rotary)
            torch.autograd.grad(output.square().sum(), [hidden, *block.parameters()])

        step()
        return _peak_bytes(step)

    whole = most()
    with installed(block, "mlp", chunk_tokens):
        chunked = most()
    for measured, tokens in ((whole, 0), (chunked, chunk_tokens)):
        rows = {row.name: row.num_bytes for row in plan_in_chunks(seq_len, tokens).memory_items}
        assert 0.5 * rows["work"] < measured < 1.05 * rows["work"]
    assert chunked < whole / 4


def _peak_bytes(function: Callable[[], None]) -> int:
    """Return the most bytes that exist at once beyond those from before, of what torch allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes))


def test_less_memory_makes_chunks() -> None:
    """Not before it must: what fits whole stays whole."""
    seq_len = 4 * MLP_CHUNK_TOKENS
    structure, activations = wide(seq_len)
    whole = make_plan(structure, activations, MACHINE, request_of(seq_len))
    assert whole.compute.mlp_chunk_tokens == 0
    assert "chunks    " not in describe(whole)
    limited = replace(MACHINE, hbm_bytes=2 << 30)
    chunked = make_plan(structure, activations, limited, request_of(seq_len))
    assert (chunked.compute.mlp_chunk_tokens, chunked.num_mlp_chunks) == (MLP_CHUNK_TOKENS, 4)
    assert "MLPs compute 16384 tokens at a time, 4 chunks, and again in the backward" in describe(chunked)
    assert Plan.from_json(chunked.to_json()) == chunked
    assert whole.prediction is not None
    assert chunked.prediction is not None
    assert chunked.prediction.compute_s["backward"] > whole.prediction.compute_s["backward"]
    without = replace(activations, chunked=None)
    with pytest.raises(CapacityError, match="of device memory"):
        make_plan(structure, without, limited, request_of(seq_len))


@pytest.mark.parametrize("has_disk", [True, False])
def test_short_sequences_are_in_chunks_only_where_there_is_a_disk(has_disk: bool) -> None:
    """They fit in smaller micro-batches."""
    assert may_chunk(2 * MLP_CHUNK_TOKENS, MLP_CHUNK_TOKENS, has_disk=has_disk) == has_disk
    assert not may_chunk(2 * MLP_CHUNK_TOKENS - 1, MLP_CHUNK_TOKENS, has_disk=has_disk)
    assert may_chunk(2 * MLP_CHUNK_TOKENS, 2 * MLP_CHUNK_TOKENS, has_disk=has_disk)


@pytest.mark.parametrize("width", [18944, 131072, 1 << 20])
@pytest.mark.parametrize("num_tokens", [32768, 131072, 524288, 524289])
def test_no_tensor_of_a_chunk_has_more_elements_than_kernels_count(width: int, num_tokens: int) -> None:
    structure, _ = wide(64)
    layers = (replace(layer, mlp=layer.mlp and Mlp("mlp", width)) for layer in structure.layers)
    tokens = mlp_chunk_tokens(replace(structure, layers=tuple(layers)), num_tokens)
    assert 0 < tokens * width <= MAX_ELEMENTS
    assert -(-num_tokens // tokens) <= -(-num_tokens * width // MAX_ELEMENTS) + num_tokens // MLP_CHUNK_TOKENS + 1
