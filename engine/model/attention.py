"""How layers attend, and what that costs in masks.

A Transformers model builds its masks before the first layer, for the attention implementation that its configuration
names. SDPA gets whole masks, [B, 1, T, T], unless plain causal attention over whole rows is all there is; flex
attention gets block masks, which hold four numbers for 128 × 128 positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

FLEX = "flex_attention"  # Transformers' name for it
PACKED: ContextVar[bool | None] = ContextVar("packed", default=None)  # of one forward; None: it must be looked up
MIN_HEAD_DIM = 16  # the smallest that flex attention's kernels multiply


class Attention(Enum):
    """SDPA: what Transformers takes by itself, which is eager attention where a model knows no SDPA."""

    SDPA = "sdpa"
    FLEX = "flex"


def flex_problem(model: nn.Module) -> str | None:
    """Why a Transformers model cannot use flex attention; None: it can."""
    name = type(model).__name__
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
    """Sets a model to flex attention, or back to what it was built with. Between forwards only: every layer of a
    forward reads it off the configuration that they share."""

    def __init__(self, model: nn.Module) -> None:
        self._config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        self._own: str = self._config._attn_implementation

    def set(self, attention: Attention) -> None:
        self._config._attn_implementation = FLEX if attention is Attention.FLEX else self._own


def packed_arguments(model: nn.Module, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What tells a model of several documents in a row: `positions`, [B, T], that begin again; None: nothing to tell.

    Models with positions along three axes, of which images have more than one, take those of the text before them.
    """
    if positions is None:
        return {}
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"position_ids": positions.expand(4, -1, -1) if "mrope_section" in rope else positions}


@contextmanager
def as_uncaptured() -> Iterator[None]:
    """In the block Transformers does not see that a stream is captured: it would make masks of what needs none, because
    another replay might need one. Rows of one document never do."""
    from transformers.utils import import_utils

    before = getattr(import_utils, "is_cuda_stream_capturing", None)
    if before is None:  # an older one, which does not look
        yield
        return
    import_utils.is_cuda_stream_capturing = lambda: False
    try:
        yield
    finally:
        import_utils.is_cuda_stream_capturing = before


def answer_packed() -> None:
    """From now on Transformers does not look a forward's positions up where PACKED says whether a row holds several
    documents: they are on the device, so the host would wait for all that was submitted before. Idempotent."""
    from transformers import masking_utils

    if not isinstance(masking_utils.find_packed_sequence_indices, partial):
        answer = partial(_document_numbers, masking_utils.find_packed_sequence_indices)
        masking_utils.find_packed_sequence_indices = answer


def _document_numbers(look_up: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Of each token within its row, [B, T]; None: every row is one document. As `look_up` does."""
    packed = PACKED.get()
    if packed is None:
        found: torch.Tensor | None = look_up(positions)
        return found
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1) if packed else None


@contextmanager
def imagined_masks(model: nn.Module, attention: Attention, *, packed: bool) -> Iterator[None]:
    """Within it the model's forward on fake tensors is given the masks that real ones would give it, whose values tell
    whether a row holds several documents. `packed`: it does.

    For flex attention there are none, and what it keeps for backward is what SDPA keeps without a mask.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks, functions = ALL_MASK_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS
    built = masks["sdpa"]

    def whole_rows(*args: Any, **kwargs: Any) -> Any:
        """No mask where a plain causal one would do; a pattern of the model's own (use_vmap) stays."""
        return built(*args, **kwargs | {"allow_is_causal_skip": not kwargs.get("use_vmap")})

    def without_cap(*args: Any, **kwargs: Any) -> Any:
        """Capped scores are flex attention's business; SDPA keeps as much without, and refuses some with a cap."""
        return sdpa_attention_forward(*args, **kwargs | {"softcap": None})

    switch = AttentionSwitch(model)
    if attention is Attention.FLEX:
        switch.set(attention)
        masks[FLEX], functions[FLEX] = (lambda *args, **kwargs: None), without_cap
    elif not packed:
        masks["sdpa"] = whole_rows
    try:
        yield
    finally:
        switch.set(Attention.SDPA)
        for interface, name in ((masks, FLEX), (functions, FLEX), (masks, "sdpa")):
            interface._local_mapping.pop(name, None)


def mask_bytes(attention: Attention, inputs: list[torch.Tensor], batch_size: int, seq_len: int) -> int:
    """Of one micro-batch: of the masks among its layers' `inputs`, or of the block masks in their place."""
    if attention is Attention.FLEX:
        blocks = -(-seq_len // 128)
        return 4 * 4 * batch_size * blocks * blocks  # four tables of int32: blocks by row and by column, part and full
    found = [t for t in inputs if t.shape[-2:] == (seq_len, seq_len) and not t.requires_grad]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}.values())


def attention_width(func: Any, args: tuple[Any, ...], seq_len: int) -> float:
    """Of an operation on [.., T, ..]: the numbers that are multiplied for each pair of tokens, in both of attention's
    products together, halved: B × heads × head_dim where keys and values are equally wide. 0: it is neither product."""
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
