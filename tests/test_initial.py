"""Random initial values: complete, of the right distribution, and a function of (configuration, seed, name) only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatrain_ray.engine import load
from megatrain_ray.engine.initial import initial_values, module_seed
from megatrain_ray.engine.load import RandomSource
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


def test_a_source_draws_in_several_threads_what_it_draws_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta(attention_bias=True)
    names = [name for name, _ in model.named_parameters()]
    alone = {name: initial_values(model, name, 3).flatten() for name in names}
    for ahead_bytes in (0, 1 << 16, 1 << 30):
        monkeypatch.setattr(load, "AHEAD_BYTES", ahead_bytes)
        source = RandomSource(model, 3)
        for name in [*names, *reversed(names)]:  # the second half is another order than the model's
            numel = alone[name].numel()
            parts = [source.read(name, 0, numel // 2), source.read(name, numel // 2, numel)]
            assert torch.equal(torch.cat(parts), alone[name]), name


def test_a_source_holds_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    monkeypatch.setattr(load, "AHEAD_BYTES", 4 * 64 * 160)
    source = RandomSource(model, 3)
    for name, parameter in model.named_parameters():
        source.read(name, 0, 1)
        held = sum(future.result().nbytes for future in source._drawn.values())
        assert held <= max(load.AHEAD_BYTES, 4 * parameter.numel())


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
