"""What other tools train of a model, and at which learning rates, as patterns of ours. They look for parts of names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatrain_ray.convert.key_tables import RefusedError, number

EMBEDDINGS = ["embed_tokens", "lm_head"]
UNDECAYED = r"^(?!.*(?:bias|norm)).*"  # then a part of a name: of what Transformers decays


def lr_groups_of(value: Any) -> list[dict[str, Any]]:
    """Axolotl's list of {name, modules, lr} as groups of ours: matrices alone, since norms and biases keep the run's
    learning rate there. Raises RefusedError."""
    try:
        return [
            {"match": [UNDECAYED + re.escape(part) for part in group["modules"]], "lr": number(group["lr"])}
            for group in value
        ]
    except (TypeError, KeyError, AttributeError):
        raise RefusedError("expected a list of {name, modules, lr}") from None


def axolotl_groups(theirs: Mapping[str, Any], lr: float) -> list[dict[str, Any]]:
    """With any such key Axolotl makes the embeddings a group of their own, which is not decayed. `lr`: the run's."""
    if not {"embedding_lr", "embedding_lr_scale", "lr_groups"} & theirs.keys():
        return []
    own = lr * scale if (scale := theirs.get("embedding_lr_scale")) else theirs.get("embedding_lr")
    embeddings = {"match": EMBEDDINGS, **({"lr": own} if own else {}), "weight_decay": 0.0}
    return [embeddings, *theirs.get("lr_groups", ())]


def trained_layers(number: int, num_layers: int, modules: Sequence[str], extra: Sequence[str]) -> list[str]:
    """LLaMA-Factory's freeze tuning as train.trainable: these `modules` of the last `number` of layers, of the first
    where it is negative, and whatever has one of `extra` in its name."""
    layers = range(max(0, num_layers - number), num_layers) if number > 0 else range(min(-number, num_layers))
    numbers = "|".join(map(str, layers))
    return [rf"\.(?:{numbers})\.{'' if module == 'all' else re.escape(module)}" for module in modules if numbers] + [
        re.escape(part) for part in extra
    ]
