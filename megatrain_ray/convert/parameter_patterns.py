"""Adapters among other tools' keys: names of modules, as the peft library takes them, as patterns of ours."""

from __future__ import annotations

import re
from typing import Any

from megatrain_ray.convert.key_tables import RefusedError, names

EVERY = r"\.\d+\."  # all linear modules of the blocks, which stand in numbered lists: the head is left out there too


def targets_of(value: Any) -> list[str]:
    """Of a list of names or ends of paths, or a text with commas; `all` and `all-linear`."""
    found = names(value)
    if found in (["all"], ["all-linear"]):
        return [EVERY]
    return [rf"(^|\.){re.escape(name)}$" for name in found]


def targets_or_expression(value: Any) -> list[str]:
    """The same, where a text is a regular expression for whole paths."""
    if isinstance(value, str) and value != "all-linear":
        return [f"^(?:{value})$"]
    return targets_of(value)


def parameters_of(value: Any) -> list[str]:
    """Patterns of what modules of these names hold."""
    return [rf"(^|\.){re.escape(name)}\." for name in names(value)]


def one_folder(value: Any) -> str:
    """Raises RefusedError for several."""
    found = names(value)
    if len(found) != 1:
        raise RefusedError("one adapter can be gone on from; merge the others into the model before")
    return str(found[0])


def resolve_lora(given: dict[str, Any]) -> None:
    """Changes settings by dotted key: adapters where the method is lora. Else their keys do nothing, as in the tools.
    Without an alpha it is twice the rank, as LLaMA-Factory has it."""
    lora = {key: given.pop(key) for key in list(given) if key.startswith("lora.")}
    every, beside = given.pop("every_linear", False), given.pop("beside", [])
    if given.pop("method", "full") != "lora":
        return
    if every:
        lora["lora.match"] = [EVERY, *lora.get("lora.match", [])]
    if "lora.rank" in lora:
        lora.setdefault("lora.alpha", 2 * lora["lora.rank"])
    given |= lora
    if beside:
        given["train.trainable"] = [*given.get("train.trainable", []), *beside]
