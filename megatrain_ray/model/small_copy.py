"""Makes a small copy of a model's configuration, of which a real forward takes a moment on any machine.

What a model's tokens see of each other does not depend on its sizes. So it is tried on such a copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

VOCAB = 131
LAYERS = 4
FIRST_SPECIAL = 110  # ids from here on may mean an image, a sound or the end
POSITIONS = 128
WIDTH, HEADS, HEAD_DIM = 32, 4, 8
WINDOW = 8

_NUM_LAYERS = r"(num_hidden|num|encoder|decoder|n)_layers?|num_blocks|depth"
_SPECIAL_ID = r".*_(id|ids|index|idx)"
# The first pattern that matches a setting's whole name decides its largest value in the copy. Others: WIDTH.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size(_per_layer_input)?|.*vocab_size_base|.*hash_byte_group_vocab", VOCAB),
    (
        r"(original_)?max_position_embeddings|max_seq_len|n_positions|n_ctx|context_length|model_max_length|mem_len",
        POSITIONS,
    ),
    (_NUM_LAYERS, LAYERS),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"num_kv_shared_layers|n_(in|out)put_layers|num_layers_per_stack", LAYERS // 2),
    (r"loop_layer_index_start|n_layers_per_attn_res_block", LAYERS // 2),
    (r"loop_layer_index_end", LAYERS),
    (r"(n_)?recurrent_layers|first_k_dense_replace|num_dense_layers|topk_group", 1),
    (r".*experts?_(per_tok(en)?|top_?k)|moe_(k|topk|top_k)|num_selected_experts|n_shared_experts", 2),
    (r"(num_)?(n_|expert_|num_expert_)?groups?|n_group|o_groups|.*ngroups|mamba_n_groups", 2),
    (r".*num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r".*(head_?dim|head_size|d_head|dim_head|kv_channels|scalar|state(_size)?)", HEAD_DIM),
    (r".*(kv_heads|key_value_heads).*|num_key_value_groups|linear_num_key_heads", HEADS // 2),
    (r".*(heads?|heads_per_layer)", HEADS),
    (r"mamba_d_ssm|attention_hidden_size", 2 * WIDTH),
    (r".*(rank|d_rel|rotary_dim|ple_embed_dim|hc_lowrank)", HEAD_DIM),
    # Documents begin anywhere in a chunk of attention, which in Llama 4 is longer than most rows.
    (r"attention_chunk_size", 1 << 62),
    (r".*(window|chunk)(_size|_length|_len)?|local_attention|block_size|.*topk(_blocks)?", WINDOW),
    (r".*attention|.*_rates?|index_block_size", WINDOW // 2),
    (r".*(intermediate|ffn|inner|feed_forward|dff|dim_ff|mlp)(_.*)?", 48),
    (r"image_size|crop_size", 28),
    (r"patch_size", 14),
    (r"top_k|.*floor(_scale)?", 1 << 62),  # of generation; of a scale that grows with a row
    (r".*(stride|kernel(_size)?|seed|period|offset|axis|iters|bins?|factor|decay|theta.*)", 1 << 62),
)
# Heads whose dimensions make up a width, which is twice the hidden one if it has no name.
_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"),
    ("n_mamba_heads", "mamba_headdim", ""),
    ("num_heads", "head_dim", ""),
    ("num_attention_heads", "attention_head_dim", "attention_hidden_size"),
)


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a complete configuration, as `to_dict` gives it, with few layers, experts and dimensions.

    It draws no random numbers: dropout and the jitter of routers are zero.
    """
    count = next((config[key] for key in config if re.fullmatch(_NUM_LAYERS, key)), 0) or 0
    layers = _Layers(count, _of_each_kind(config, count))
    small = {key: layers.shrunk(key, value) for key, value in config.items()}
    if "num_key_value_heads" in small and config["num_key_value_heads"] == config.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    for heads, head_dim, width in _HEADS:
        if small.get(head_dim) and small.get(heads) and (whole := small.get(width, 2 * WIDTH)):
            small[head_dim] = whole // small[heads]
    parts = "qk_nope_head_dim", "qk_rope_head_dim"
    for name in ("qk_head_dim", "head_dim"):
        if all(config.get(part) for part in parts) and config.get(name) == sum(config[part] for part in parts):
            small[name] = sum(small[part] for part in parts)
    return small


class _Layers:
    """Shrinks settings of a model of which the copy keeps some layers."""

    def __init__(self, count: int, kept: Sequence[int]) -> None:
        self._count = count
        self._kept = kept  # numbers of the layers that the copy has

    def shrunk(self, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self._mapping(key, value)
        if isinstance(value, list):
            return self._list(key, value)
        if isinstance(value, float):
            return 0.0 if "drop" in key or "jitter" in key else value
        return _number(key, value) if type(value) is int else value

    def _mapping(self, key: str, value: Mapping[Any, Any]) -> dict[Any, Any]:
        if key.startswith("rope"):
            return _of_rope(value)
        if all(isinstance(inner, str) and not inner.isdigit() for inner in value):
            return shrink(value)
        if not all(isinstance(v, Mapping) for v in value.values()):
            return dict(value)  # names of classes, for example
        return {type(i)(self._kept.index(int(i))): shrink(v) for i, v in value.items() if int(i) in self._kept}

    def _list(self, key: str, value: list[Any]) -> list[Any]:
        if self._count and len(value) == self._count:  # a value for each layer
            return [self.shrunk(key, value[i]) for i in self._kept]
        if value and all(type(v) is int for v in value) and max(value) < self._count:  # numbers of layers
            return [self._kept.index(v) for v in value if v in self._kept]
        return [self.shrunk(key, v) for v in value]


def _number(key: str, value: int) -> int:
    if re.fullmatch(_SPECIAL_ID, key):
        return value if value < FIRST_SPECIAL else FIRST_SPECIAL + value % (VOCAB - FIRST_SPECIAL)
    return min(value, next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), WIDTH))


def _of_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of rotary embeddings for HEAD_DIM dimensions; some models have one for each type of layer."""
    num_angles = int(HEAD_DIM // 2 * (rope.get("partial_rotary_factor") or 1))
    quarter = num_angles // 4

    def shrunk(key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _of_rope(value)
        if key == "mrope_section":  # angles of time and two axes of an image, which have as many as each other
            axes = [num_angles - 2 * quarter, quarter, quarter]
            return axes if value[1] == value[2] else axes[::-1]
        return value[: HEAD_DIM // 2] if isinstance(value, list) else value

    return {key: shrunk(key, value) for key, value in rope.items()}


def _of_each_kind(config: Mapping[str, Any], count: int) -> list[int]:
    """Return the numbers of LAYERS layers, in order, so that a layer of every kind is among them if there is room."""
    kinds: list[list[object]] = [[] for _ in range(count)]
    for value in config.values():
        for i, kind in enumerate(kinds):
            if isinstance(value, list) and len(value) == count:
                kind.append(repr(value[i]))
            elif isinstance(value, list | Mapping) and all(isinstance(v, int | str) for v in value):
                kind.append(i in value or str(i) in value)
    first = sorted({kinds.index(kind) for kind in kinds})[:LAYERS]
    rest = [i for i in range(count) if i not in first]
    return sorted([*first, *rest[: LAYERS - len(first)]])
