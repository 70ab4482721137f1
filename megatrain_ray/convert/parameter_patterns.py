"""Translates names of modules in other tools' settings of adapters (peft's format) into patterns of parameter names."""

from __future__ import annotations

import re
from typing import Any

from megatrain_ray.convert.key_tables import RefusedError, names

EVERY = r"\.\d+\."  # all linear modules in numbered lists, that is, in blocks: peft leaves out the head as well


def targets_of(value: Any) -> list[str]:
    """Return patterns for modules: for a list of names or ends of paths, a text with commas, `all` or `all-linear`."""
    found = names(value)
    if found in (["all"], ["all-linear"]):
        return [EVERY]
    return [rf"(^|\.){re.escape(name)}$" for name in found]


def targets_or_expression(value: Any) -> list[str]:
    """Return patterns for modules as `targets_of` does, but take a text for a regular expression over whole paths."""
    if isinstance(value, str) and value != "all-linear":
        return [f"^(?:{value})$"]
    return targets_of(value)


def parameters_of(value: Any) -> list[str]:
    """Return patterns for all parameters of the modules with these names."""
    return [rf"(^|\.){re.escape(name)}\." for name in names(value)]


def one_folder(value: Any) -> str:
    """Return the folder of an adapter. Raises RefusedError if there are several."""
    found = names(value)
    if len(found) != 1:
        raise RefusedError("one adapter can be gone on from; merge the others into the model before")
    return str(found[0])


def resolve_lora(given: dict[str, Any]) -> None:
    """Turn the tool's settings of adapters into ours, in place.

    They are dropped if the method is not lora, as in the tools. A missing alpha becomes twice the rank, as in
    LLaMA-Factory.

    given: settings by dotted key.
    """
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
