"""Random initial values: complete, of the right distribution, and a function of (configuration, seed, name) only."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatrain_ray.engine.weights import initial_values as initial
from megatrain_ray.engine.weights.initial_values import (
    Constant,
    Normal,
    fills_of,
    fills_up_to,
    initial_values,
    module_seed,
)
from megatrain_ray.engine.weights.weight_source import RandomSource
from megatrain_ray.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "initializer_range": 0.05,
    "pad_token_id": 7,
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def on_meta(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    with init_empty_weights(include_buffers=False):
        return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_complete_fp32_and_of_its_shape(dtype: torch.dtype) -> None:
    model = on_meta(dtype, attention_bias=True)
    for name, parameter in model.named_parameters():
        values = initial_values(model, name, 0)
        assert (values.dtype, values.shape) == (torch.float32, parameter.shape), name
        assert values.isfinite().all(), name
    assert all(p.is_meta for p in model.parameters())


def test_values_are_distributed_as_the_model_initialises_them() -> None:
    model = on_meta(attention_bias=True)
    for name in (Q_PROJ, "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
        values = initial_values(model, name, 3)
        assert abs(values.mean()) < 4 * 0.05 / math.sqrt(values.numel()), name
        assert values.std().item() == pytest.approx(0.05, rel=0.05), name
    embedding = initial_values(model, "model.embed_tokens.weight", 3)
    assert embedding[7].eq(0).all(), "the padding row"
    assert embedding[8:].std().item() == pytest.approx(0.05, rel=0.05)
    assert initial_values(model, "model.norm.weight", 3).eq(1).all()
    assert initial_values(model, "model.layers.0.self_attn.k_proj.bias", 3).eq(0).all()


def test_a_parent_may_initialise_parameters_of_its_children() -> None:
    """GPT-2 scales the projections back into the residual stream by their number."""
    config = GPT2Config(n_embd=64, n_layer=8, n_head=4, vocab_size=300, initializer_range=0.05)
    with init_empty_weights(include_buffers=False):
        model = GPT2LMHeadModel(config)
    for part in ("attn", "mlp"):
        projection = initial_values(model, f"transformer.h.3.{part}.c_proj.weight", 0)
        assert projection.std().item() == pytest.approx(0.05 / math.sqrt(2 * 8), rel=0.05)
    assert initial_values(model, "transformer.h.3.mlp.c_fc.weight", 0).std().item() == pytest.approx(0.05, rel=0.05)


def test_fused_experts() -> None:
    config = MixtralConfig(**SIZES, num_local_experts=2)
    with init_empty_weights(include_buffers=False):
        model = MixtralForCausalLM(config)
    for name, _ in model.model.layers[0].named_parameters(prefix="model.layers.0"):
        assert initial_values(model, name, 0).isfinite().all(), name


def test_values_depend_on_seed_and_name_only() -> None:
    first = initial_values(on_meta(), Q_PROJ, 5)
    model = on_meta(torch.bfloat16, num_hidden_layers=3)
    torch.manual_seed(99)
    initial_values(model, "lm_head.weight", 5)
    assert torch.equal(initial_values(model, Q_PROJ, 5), first)
    assert not torch.equal(initial_values(model, Q_PROJ, 6), first)
    assert not torch.equal(initial_values(model, Q_PROJ.replace("layers.1", "layers.0"), 5), first)


def test_values_are_pinned() -> None:
    """A run started from a seed must be repeatable by a later version: compared to values written down here."""
    values = initial_values(on_meta(), Q_PROJ, 0).flatten()[:3]
    torch.testing.assert_close(values, torch.tensor([0.03024735, -0.01078998, -0.03431558]), rtol=1e-4, atol=0)


def test_global_random_state_stays() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    initial_values(on_meta(), Q_PROJ, 5)
    assert torch.equal(torch.rand(3), expected)


class _Forgetful(LlamaForCausalLM):
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            super()._init_weights(module)


def test_a_parameter_that_nobody_initialises_is_refused_by_name() -> None:
    with init_empty_weights(include_buffers=False):
        model = _Forgetful(LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match=r"does not initialise lm_head\.weight"):
        initial_values(model, "lm_head.weight", 0)  # inner models initialise their own parts, as in Transformers


def test_source_reads_ranges_of_the_flattened_parameter() -> None:
    source = RandomSource(on_meta(), 4)
    q_proj = initial_values(on_meta(), Q_PROJ, 4).flatten()
    norm = "model.norm.weight"
    reads = [(Q_PROJ, 0, 100), (Q_PROJ, 100, 4096), (norm, 3, 5), (Q_PROJ, 50, 60)]
    got = [source.read(*read) for read in reads]
    assert torch.equal(torch.cat(got[:2]), q_proj)
    assert got[2].tolist() == [1.0, 1.0]
    assert torch.equal(got[3], q_proj[50:60])


def test_threads_draw_what_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", 1024)
    model = on_meta(attention_bias=True)  # with a padding row, which is set after the embedding's numbers
    alone = {name: initial_values(model, name, 3).flatten() for name, _ in model.named_parameters()}
    source = RandomSource(model, 3)

    def read(name: str) -> torch.Tensor:
        numel = alone[name].numel()
        return torch.cat([source.read(name, k, min(k + 700, numel)).clone() for k in range(0, numel, 700)])

    with ThreadPoolExecutor(4) as pool:
        for (name, values), got in zip(alone.items(), pool.map(read, alone), strict=True):
            assert torch.equal(got, values), name


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 79, 80, 81, 250])
def test_normal_numbers_in_blocks_are_those_of_one_draw(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", 32)
    whole, generator = (torch.Generator().manual_seed(7) for _ in range(2))
    parts = [(start, part.clone()) for start, part in Normal(numel, 0.5, 2.0).blocks(generator)]
    assert [start for start, _ in parts] == list(range(0, max(1, numel - 15), 32))
    assert torch.equal(torch.cat([part for _, part in parts]), torch.empty(numel).normal_(0.5, 2.0, generator=whole))
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=whole))


def test_what_is_drawn_in_blocks_and_what_is_not() -> None:
    model = on_meta(attention_bias=True)
    assert fills_up_to(model, Q_PROJ.replace("weight", "bias")) == (Constant(64, 0.0),), "nothing is drawn for it"
    assert fills_up_to(model, Q_PROJ) == (Normal(64 * 64, 0.0, 0.05),)
    assert fills_up_to(model, "model.embed_tokens.weight") is None, "a row of it is set to zero afterwards"
    assert fills_of(model) == {}, "its source makes the model anyway"
    assert len(fills_of(on_meta(pad_token_id=None))) == 21
    assert fills_up_to(model, "model.norm.weight") == (Constant(64, 1.0),)
    config = MixtralConfig(**SIZES, num_local_experts=2)
    with init_empty_weights(include_buffers=False):
        experts = MixtralForCausalLM(config)
    of_both = fills_up_to(experts, "model.layers.0.mlp.experts.down_proj")
    assert of_both == (Normal(2 * 320 * 64, 0.0, 0.05), Normal(2 * 64 * 160, 0.0, 0.05))


class Sets(nn.Module):
    """Initialised as `how` says, on weights of 20 elements."""

    def __init__(self, how: Callable[[Sets], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(20, device="meta"))
        self.other = nn.Parameter(torch.empty(5, device="meta"))
        self._how = how

    def _init_weights(self, module: Sets) -> None:
        self._how(module)


def _assign(module: Sets) -> None:
    module.weight.normal_()
    module.weight.data = torch.zeros(20)


@pytest.mark.parametrize(
    "how",
    [
        lambda m: m.weight.uniform_(),
        lambda m: m.weight.copy_(torch.randn(20)),
        lambda m: (torch.rand(3), m.weight.normal_()),
        lambda m: (m.other.uniform_(), m.weight.normal_()),
        lambda m: (m.weight.normal_(), m.weight.mul_(2.0)),
        lambda m: (m.weight.normal_(), m.weight[3:4].zero_()),
        lambda m: (m.weight.normal_(), m.weight.normal_(std=3.0)),
        lambda m: (m.weight.zero_(), m.weight[3:4].fill_(2.0)),
        lambda m: (m.weight[:10].zero_(), m.weight[10:].zero_()),
        lambda m: (m.weight[:10].normal_(), m.weight[10:].normal_()),
        lambda m: m.weight.view(4, 5).T.normal_(),
        lambda m: m.weight.fill_(torch.randn(1).item() if m.weight.sum().item() else 1.0),
        _assign,
    ],
)
def test_anything_else_than_normal_numbers_or_one_constant_is_drawn_whole(how: Callable[[Sets], object]) -> None:
    before = torch.random.get_rng_state()
    assert fills_up_to(Sets(how), "weight") is None
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    "how",
    [
        lambda m: m.weight.normal_(1.0, 2.0),
        lambda m: (m.other.normal_(3.0), m.weight.view(4, 5).normal_(std=0.1), m.other.uniform_()),
        lambda m: (m.other.zero_(), nn.init.normal_(m.weight, 0.5, 0.1)),
        lambda m: (m.other.normal_(), m.weight.fill_(0.3)),
    ],
)
def test_what_is_filled_after_others_is_the_model_s_own(how: Callable[[Sets], object]) -> None:
    fills = fills_up_to(Sets(how), "weight")
    assert fills is not None
    values = initial_values(Sets(how), "weight", 3)
    assert torch.equal(RandomSource(Sets(how), 3).read("weight", 0, 20), values)
    assert torch.equal(RandomSource({"weight": fills}, 3).read("weight", 0, 20), values)


def test_a_source_holds_a_block_of_normal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "BLOCK_ELEMENTS", 1024)
    source = RandomSource(on_meta(), 3)
    held = source.read("lm_head.weight", 5000, 5100)
    assert held.untyped_storage().nbytes() == 4 * (1024 + 16)


class Draws(nn.Module):
    """Initialised by a function of torch that makes a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(20, device="meta"))

    def _init_weights(self, module: nn.Module) -> None:
        module.weight.copy_(torch.rand(20) + torch.randint(5, (20,)))


def test_what_makes_a_tensor_draws_from_the_same_numbers() -> None:
    before = torch.random.get_rng_state()
    values = initial_values(Draws(), "weight", 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(module_seed("", 3))
        assert torch.equal(values, torch.rand(20) + torch.randint(5, (20,)))
