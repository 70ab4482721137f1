"""Checks by trying which tokens a model's tokens see: none that come later, and none of another document in the row.

The forwards are real ones, of a small copy of the model with random weights (small_copy.py).
"""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path

import torch

from megatrain_ray.engine.model.attention import PACKED, answer_packed, packed_arguments, without_cache
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.small_copy import FIRST_SPECIAL

log = logging.getLogger(__name__)

EARLIER, LATER = 21, 19  # tokens; multiples of nothing, so that windows do not end where a document does
FIRST_ID = 3
ROUNDING = 1e-4  # relative to the largest logit


def sees_later_tokens(architecture: Architecture) -> bool:
    """Return whether a token's logits change with a later token. False if a small copy of the model cannot be run."""
    return _sees_later_tokens(json.dumps(architecture.settings, sort_keys=True), architecture.code)


@cache  # a start opens its model several times
def _sees_later_tokens(settings: str, code: Path | None) -> bool:
    try:
        trial = _Trial(Architecture(json.loads(settings), code))
        ids, others = trial.ids(EARLIER + LATER), trial.ids(EARLIER + LATER)
        moved = torch.cat([ids[:, :EARLIER], others[:, EARLIER:]], dim=1)
        return trial.differ(trial.logits(ids)[:, :EARLIER], trial.logits(moved)[:, :EARLIER])
    except Exception as error:  # of the model's own code, on sizes that its maker did not mean
        log.info("a small copy of the model does not run: %s", f"{type(error).__name__}: {error}".partition("\n")[0])
        return False


def check_packing(
    architecture: Architecture, setting: str = "data.packing: true",
    remedy: str = "set data.packing: false, which cuts each document alone",
) -> None:  # fmt: skip
    """Raise ConfigError unless a document has the same logits behind another one in a row as it has alone.

    setting, remedy: what puts several documents into a row, and what to do about it, for the message.
    """
    try:
        trial = _Trial(architecture)
        ids = trial.ids(EARLIER + LATER)
        alone = trial.logits(ids[:, EARLIER:])
        positions = torch.cat([torch.arange(EARLIER), torch.arange(LATER)])[None]
        behind = trial.logits(ids, positions)[:, EARLIER:]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"{setting}: a trial of this model on a row of two documents failed with {reason}; {remedy}"
        ) from error
    if trial.differ(alone, behind):
        raise ConfigError(
            f"{setting}: this model does not keep the documents of a row apart: tokens see those of the one before; "
            f"{remedy}"
        )


class _Trial:
    """Runs forwards of a small copy of a model, all with the same random numbers."""

    def __init__(self, architecture: Architecture) -> None:
        self._generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self._model = architecture.small_copy()
        self._model.train()
        with torch.no_grad():
            for parameter in self._model.parameters():  # some begin as zeros, which would hide what follows them
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=self._generator))

    def ids(self, count: int) -> torch.Tensor:
        """Return random token ids, [1, count]."""
        return torch.randint(FIRST_ID, FIRST_SPECIAL, (1, count), generator=self._generator)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, [1, T, V]. What draws random numbers draws the same ones in every call.

        Masks are left out where a step leaves them out. In Transformers 4 Doge is causal by its mask only.

        positions: [1, T], beginning again in every document, or None.
        """
        answer_packed()
        token = PACKED.set(positions is not None)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                arguments = packed_arguments(self._model, positions)
                logits: torch.Tensor = self._model(input_ids=ids, **without_cache(self._model), **arguments).logits
        finally:
            PACKED.reset(token)
        if logits.isnan().any():  # which differs from nothing
            raise ValueError("its logits are NaN")
        return logits

    def differ(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        return bool((first - second).abs().max() > ROUNDING * first.abs().max())
