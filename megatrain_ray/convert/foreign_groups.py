"""Translates which parameters other tools train, and at which learning rates, into patterns of parameter names.

These tools search for parts of names, so the patterns do as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_ray.convert.key_tables import RefusedError, number

EMBEDDINGS = ["embed_tokens", "lm_head"]
UNDECAYED = r"^(?!.*(?:bias|norm)).*"  # prefix of a pattern: excludes what Transformers does not decay


def lr_groups_of(value: Any) -> list[dict[str, Any]]:
    """Return parameter groups for Axolotl's list of {name, modules, lr}.

    They match only matrices: in Axolotl, norms and biases keep the learning rate of the run. Raises RefusedError if the
    list has another form.
    """
    try:
        return [
            {"match": [UNDECAYED + re.escape(part) for part in group["modules"]], "lr": number(group["lr"])}
            for group in value
        ]
    except (TypeError, KeyError, AttributeError):
        raise RefusedError("expected a list of {name, modules, lr}") from None


def axolotl_groups(theirs: Mapping[str, Any], lr: float) -> list[dict[str, Any]]:
    """Return the parameter groups that Axolotl makes.

    If any key on groups is set, Axolotl puts the embeddings into a group of their own, without decay.

    theirs: Axolotl's values of names in `RESOLVED`.
    lr: learning rate of the run.
    """
    if not {"embedding_lr", "embedding_lr_scale", "lr_groups"} & theirs.keys():
        return []
    own = lr * scale if (scale := theirs.get("embedding_lr_scale")) else theirs.get("embedding_lr")
    embeddings = {"match": EMBEDDINGS, **({"lr": own} if own else {}), "weight_decay": 0.0}
    return [embeddings, *theirs.get("lr_groups", ())]


def trained_layers(number: int, num_layers: int, modules: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the patterns for `train.trainable` that correspond to LLaMA-Factory's freeze tuning.

    number: the last `number` layers are trained; if negative, the first ones.
    modules: modules of these layers that are trained; `all` stands for all of them.
    extra: parts of names; parameters with one of them in their name are trained as well.
    """
    layers = range(max(0, num_layers - number), num_layers) if number > 0 else range(min(-number, num_layers))
    numbers = "|".join(map(str, layers))
    return [rf"\.(?:{numbers})\.{'' if module == 'all' else re.escape(module)}" for module in modules if numbers] + [
        re.escape(part) for part in extra
    ]
