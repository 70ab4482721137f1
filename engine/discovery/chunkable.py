"""Finds modules that may be computed for a chunk of tokens at a time: a block's MLP, dense or of experts, and norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatrain_ray.engine.discovery.trial_forward import Call, Trial, storage_of, storages_of
from megatrain_ray.engine.model.output_recorder import is_recorded
from megatrain_ray.engine.model.structure import Mlp

# A trial cannot show whether one token depends on another. Modules of Transformers with these names compute each token
# independently (tests/engine/layer_calls/test_chunked_mlp.py runs every family's). Modules in a model's own code may
# not.
NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
LIBRARY = "transformers."


def find_mlp(model: nn.Module, trial: Trial, base: str, block: str) -> Mlp | None:
    """Return the MLP of the block at path `block`: a Transformers module with one of NAMES that is called once.

    It takes one hidden state as its only argument, and returns one like it. Return None if there is no such module, if
    it contains a convolution or draws random numbers (chunks would draw others), or if the model returns something from
    inside of it.
    """
    for path in (f"{block}.{name}" for name in NAMES):
        calls = [call for call in trial.calls if call.path == path]
        if len(calls) == 1 and _is_per_token(calls[0]) and not is_recorded(model, base, path):
            module = model.get_submodule(path)
            is_known = type(module).__module__.startswith(LIBRARY)
            if is_known and not any(isinstance(part, _ConvNd) for part in module.modules()):
                return Mlp(path.removeprefix(f"{block}."), _width(module, trial, calls[0]))
    return None


def find_norms(model: nn.Module, trial: Trial, base: str, head: Iterable[str]) -> frozenset[str]:
    """Return those paths in `head` whose modules are norms that compute each token independently.

    Their classes have Norm in their names and belong to Transformers or torch. As with `find_mlp` they are called once,
    on one hidden state, and the model returns nothing from inside of them.
    """
    return frozenset(path for path in head if _is_norm(model, trial, path) and not is_recorded(model, base, path))


def _is_norm(model: nn.Module, trial: Trial, path: str) -> bool:
    kind, calls = type(model.get_submodule(path)), [call for call in trial.calls if call.path == path]
    is_named = "Norm" in kind.__name__ and kind.__module__.startswith((LIBRARY, "torch."))
    return is_named and len(calls) == 1 and _is_per_token(calls[0])


def _is_per_token(call: Call) -> bool:
    if call.draws or call.attention or list(call.contents) != [0]:  # the only argument is positional
        return False
    given, returned = call.contents[0], call.output
    both = isinstance(given, torch.Tensor) and isinstance(returned, torch.Tensor)
    return both and given.dim() == 3 and given.shape == returned.shape and given.dtype == returned.dtype


def _width(module: nn.Module, trial: Trial, call: Call) -> int:
    """Return the elements per token of the module's largest tensor: saved for the backward, or its output.

    The input is as large as the output.
    """
    weights = storages_of(module.parameters())
    saved = (t for t in trial.saved[slice(*call.saved)] if storage_of(t) not in weights)
    num_tokens = call.output.numel() // call.output.shape[-1]
    return int(-(-max(t.numel() for t in (*saved, call.output)) // num_tokens))
