"""Selects how layers attend, and computes what the masks cost.

A Transformers model builds its masks before the first layer, for the attention implementation that its configuration
names. SDPA gets whole masks, [B, 1, T, T], unless plain causal attention over whole rows is enough. Flex attention gets
block masks, which hold four numbers for 128 × 128 positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from megatrain_ray.io.tokens.token_files import IGNORED

FLEX = "flex_attention"  # Transformers' name of flex attention
# Whether rows of the current forward hold several documents; None: unknown, the positions tell.
PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)
MIN_HEAD_DIM = 16  # smallest head_dim that flex attention's kernels support
# Shorter rows go to its kernel for decoding. Torch 2.11 had none for 32 rows of 112 with 16 heads of 128, on an H100.
MIN_TOKENS = 128


class Attention(Enum):
    """Names the implementations of attention."""

    SDPA = "sdpa"  # Transformers' default choice, which is eager attention for a model that does not support SDPA
    FLEX = "flex"  # flex attention


def flex_problem(model: nn.Module, seq_len: int) -> str | None:
    """Return why a Transformers model cannot use flex attention for rows of `seq_len` tokens; None: it can."""
    name = type(model).__name__
    if seq_len < MIN_TOKENS:
        return f"its kernels need rows of {MIN_TOKENS} tokens at least, and data.seq_len is {seq_len}"
    supported: Any = getattr(model, "_supports_flex_attn", False)
    if not supported or not model._can_set_attn_implementation():  # type: ignore[operator]
        return f"Transformers' {name} does not support it"
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    dropout = getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0)
    if dropout:
        return f"it has no dropout, and the attention of this {name} has {dropout}"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim < MIN_HEAD_DIM:
        return f"its kernels need heads of {MIN_HEAD_DIM} at least, and this {name} has heads of {head_dim}"
    return None


class AttentionSwitch:
    """Switches a model to flex attention, or back to the implementation that it was built with.

    Switch only between forwards: every layer reads the setting from the configuration that all of them share.
    """

    def __init__(self, model: nn.Module) -> None:
        self._config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._own: str = self._config._attn_implementation

    def set(self, attention: Attention) -> None:
        self._config._attn_implementation = FLEX if attention is Attention.FLEX else self._own


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the forward argument that keeps a model from caching keys and values, if its forward takes one.

    That of openai-gpt's base model in Transformers 4 does not.
    """
    return {"use_cache": False} if _takes_use_cache(type(model).forward) else {}


@cache  # forwards ask for every chunk of a loss
def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(parameter.name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def packed_arguments(model: nn.Module, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the forward arguments that tell a model that a row holds several documents.

    positions: [B, T], beginning again in every document; None: no arguments are needed.
    """
    if positions is None:
        return {}
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    # Models with positions along three axes, as images need them, get the text's in front of those: [4, B, T].
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"position_ids": positions.expand(4, -1, -1) if "mrope_section" in rope else positions}


def pads_make_it_long(model: nn.Module) -> bool:
    """Return whether a model takes the length of its row for that of the document (longrope), so that pads count."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]  # perhaps one for each type of layer
    return any("longrope" in (one.get("rope_type"), one.get("type")) for one in ropes)


def without_pads(positions: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """Return positions, [B, T], that are 0 after the last supervised token of a row.

    What stands there has no effect on the loss, and would count in the length that longrope sees.
    """
    index = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    last = torch.where(targets == IGNORED, 0, index).amax(1, keepdim=True)
    return torch.where(index > last, 0, index if positions is None else positions)


@contextmanager
def as_uncaptured() -> Iterator[None]:
    """Hide from Transformers, within the block, that a stream is being captured.

    During a capture Transformers makes masks even where none is needed, because another replay might need one. Rows of
    one document never do.
    """
    from transformers.utils import import_utils

    before = getattr(import_utils, "is_cuda_stream_capturing", None)
    if before is None:  # an older version of Transformers, which does not check for a capture
        yield
        return
    import_utils.is_cuda_stream_capturing = lambda: False
    try:
        yield
    finally:
        import_utils.is_cuda_stream_capturing = before


def answer_packed() -> None:
    """Make Transformers read from PACKED whether a row holds several documents, instead of from the positions.

    The positions are on the device, so reading them makes the host wait for all work submitted before. They are still
    read where PACKED is None. Idempotent.
    """
    from transformers import masking_utils

    if not isinstance(masking_utils.find_packed_sequence_indices, partial):
        answer = partial(_document_numbers, masking_utils.find_packed_sequence_indices)
        masking_utils.find_packed_sequence_indices = answer


def _document_numbers(look_up: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's document within its row, [B, T]; None: every row is one document.

    look_up: Transformers' function that finds the same from the positions.
    """
    packed = PACKED.get()
    if packed is None:
        found: torch.Tensor | None = look_up(positions)
        return found
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1) if packed else None


@contextmanager
def imagined_masks(model: nn.Module, attention: Attention, *, packed: bool) -> Iterator[None]:
    """Give the model's forward on fake tensors, within the block, the masks that real tensors would give it.

    For flex attention there are no masks, and what it keeps for the backward is what SDPA keeps without a mask.

    packed: whether a row holds several documents, which only the values of real tensors tell.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks, functions = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS

    # Flex attention caps scores. SDPA keeps as much for the backward without a cap, and refuses some models with one.
    def without_cap(*args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(*args, **kwargs | {"softcap": None})

    switch = AttentionSwitch(model)
    if attention is Attention.FLEX:
        switch.set(attention)
        masks[FLEX], functions[FLEX] = (lambda *args, **kwargs: None), without_cap
    answer_packed()  # the positions of fake tensors tell nothing
    token = PACKED.set(packed)
    try:
        yield
    finally:
        PACKED.reset(token)
        switch.set(Attention.SDPA)
        for interface in (masks, functions):
            interface._local_mapping.pop(FLEX, None)


def mask_bytes(attention: Attention, inputs: list[torch.Tensor], batch_size: int, seq_len: int) -> int:
    """Return the bytes of one micro-batch's masks: those among its layers' `inputs`, or of flex attention's blocks."""
    if attention is Attention.FLEX:
        blocks = -(-seq_len // 128)
        return 4 * 4 * batch_size * blocks * blocks  # four int32 tables: by row and by column, partial and full blocks
    found = [t for t in inputs if t.shape[-2:] == (seq_len, seq_len) and not t.requires_grad]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def attention_width(func: Any, args: tuple[Any, ...], seq_len: int) -> float:
    """Return the width of attention in an operation: half the numbers multiplied per pair of tokens in both products.

    With keys and values of equal width that is B × heads × head_dim for a whole attention. One product by itself gives
    half of the numbers that it multiplies. 0: the operation is not a product of attention.

    func, args: an operation on [.., T, ..] and its arguments.
    """
    if func._opname.startswith("_scaled_dot_product"):
        query, _, value = args[:3]
        return float(query.shape[0] * query.shape[1] * (query.shape[3] + value.shape[3]) / 2)
    if func not in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
        return 0.0
    left, right = args[-2:]
    if left.shape[1:] == (seq_len, seq_len):
        return float(left.shape[0] * right.shape[2] / 2)
    if (left.shape[1], right.shape[2]) == (seq_len, seq_len):
        return float(left.shape[0] * left.shape[2] / 2)
    return 0.0
