"""Finds structures of published shapes of any depth on few layers: a trial of all of them takes seconds."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.engine.layout.flat_layout import ParameterSpec
from megatrain_ray.engine.model.structure import LayerSpec, ModelStructure

FOUND_LAYERS = 2


@cache
def qwen(
    num_layers: int, seq_len: int, *, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int = 152064
) -> Any:
    """Return (structure, activations of one sequence) of Qwen2.5's architecture, untied, bf16."""
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=FOUND_LAYERS, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=False, max_position_embeddings=seq_len,
    )  # fmt: skip

    def factory(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return deepened(*discover(factory, torch.bfloat16, 1, seq_len), num_layers)


def deepened(
    structure: ModelStructure, activations: ActivationBytes, num_layers: int
) -> tuple[ModelStructure, ActivationBytes]:
    """Return a model in which `num_layers` copies of the last block replace the blocks."""
    embedding, *blocks, head = structure.layers
    copies = [_renamed(blocks[-1], len(blocks) - 1, i) for i in range(num_layers)]
    layers = (embedding, *copies, head)
    whole = replace(
        structure,
        layers=layers,
        parameter_order=tuple(p.name for layer in layers for p in layer.parameters),
        attention_widths=structure.attention_widths[-1:] * num_layers,
    )
    boundary, kept = ((v[0], *v[-2:-1] * num_layers, v[-1]) for v in (activations.boundary, activations.kept))
    private = (False, *(True,) * num_layers, False)
    replayable = (False, False, *(True,) * (num_layers - 1), False)
    return whole, replace(activations, boundary=boundary, kept=kept, private=private, replayable=replayable)


def _renamed(layer: LayerSpec, old: int, new: int) -> LayerSpec:
    def name(text: str) -> str:
        return re.sub(rf"\blayers\.{old}\b", f"layers.{new}", text)

    def renamed(parameter: ParameterSpec) -> ParameterSpec:
        return replace(parameter, name=name(parameter.name))

    parameters = tuple(map(renamed, layer.parameters))
    return replace(layer, name=name(layer.name), modules=tuple(map(name, layer.modules)), parameters=parameters)
