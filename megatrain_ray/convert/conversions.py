"""Converts values of other tools' keys. The tables of keys name these functions (`as: integer`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

EVERY_LINEAR = r"\.\d+\."  # all linear modules in numbered lists, that is, in blocks: peft leaves out the head as well
KERNEL_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")  # plugins of Axolotl without an effect on what is learned
UNDECAYED = r"^(?!.*(?:bias|norm)).*"  # prefix of a pattern: excludes what Transformers does not decay


class RefusedError(Exception):
    """Is raised for a value that cannot be honoured. The message says why."""


def share(value: Any) -> float:
    """Return a share of the records. Raises RefusedError for a number of records, and without a reason for none."""
    if not (found := number(value)):
        raise RefusedError
    if found >= 1:
        raise RefusedError("expected a share below 1; or write those records into a file, for data.eval_path")
    return found


def number(value: Any) -> float:
    """Return the value as a number, also if it is text. Raises RefusedError if it is neither.

    YAML 1.1 and quotes turn numbers into text, and both tools accept that.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RefusedError("expected a number") from None


def integer(value: Any) -> int:
    """Return the value as an integer. Raises RefusedError if it is none."""
    if (found := number(value)) != int(found):
        raise RefusedError("expected an integer")
    return int(found)


def names(value: Any) -> list[str]:
    """Return the entries of a list, or of a text separated by commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)


def template_file(value: Any) -> str:
    """Return the path of a Jinja file. Raises RefusedError if the value is the text of a template."""
    if "{" in str(value):
        raise RefusedError("write the template into a file, and name that")
    return str(value)


def anchored_patterns(value: Any) -> list[str]:
    """Return patterns that match from the start of a name, with literal dots.

    Raises RefusedError if a pattern selects a range of rows.
    """
    if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in value or ()):
        raise RefusedError("parameters are trained or frozen as a whole, not some of their rows")
    return ["^(?:" + pattern.replace(".", r"\.") + ")" for pattern in value or ()]


def only_pad_token(value: Any) -> None:
    """Raise RefusedError if a special token other than the padding token is set. Padding is never learned."""
    if isinstance(value, Mapping) and any(token for name, token in value.items() if name != "pad_token"):
        raise RefusedError(
            "the tokenizer's own are used: leave this out if it names those, else change model and tokenizer before"
        )


def kernel_plugins(value: Any) -> None:
    """Raise RefusedError if a plugin of Axolotl is listed that may change what is learned."""
    if others := [name for name in names(value) if not name.endswith(KERNEL_PLUGINS)]:
        raise RefusedError(f"{others[0]} is not here, and may change what is learned")


def module_patterns(value: Any) -> list[str]:
    """Return patterns for modules: for a list of names or ends of paths, a text with commas, `all` or `all-linear`."""
    found = names(value)
    if found in (["all"], ["all-linear"]):
        return [EVERY_LINEAR]
    return [rf"(^|\.){re.escape(name)}$" for name in found]


def module_patterns_or_expression(value: Any) -> list[str]:
    """Return patterns as `module_patterns` does, but take a text for a regular expression over whole paths."""
    if isinstance(value, str) and value != "all-linear":
        return [f"^(?:{value})$"]
    return module_patterns(value)


def one_folder(value: Any) -> str:
    """Return the folder of an adapter. Raises RefusedError if there are several."""
    found = names(value)
    if len(found) != 1:
        raise RefusedError("one adapter can be gone on from; merge the others into the model before")
    return str(found[0])


def lr_groups(value: Any) -> list[dict[str, Any]]:
    """Return parameter groups for Axolotl's list of {name, modules, lr}.

    Axolotl searches for parts of names, so the patterns do as well. They match only matrices: in Axolotl, norms and
    biases keep the learning rate of the run. Raises RefusedError if the list has another form.
    """
    try:
        return [
            {"match": [UNDECAYED + re.escape(part) for part in group["modules"]], "lr": number(group["lr"])}
            for group in value
        ]
    except (TypeError, KeyError, AttributeError):
        raise RefusedError("expected a list of {name, modules, lr}") from None


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "number": number,
    "integer": integer,
    "share": share,
    "number_or_off": lambda value: number(value) or None,  # 0 means off
    "negated": lambda value: not value,
    "names": names,
    "device": lambda on_cpu: "cpu" if on_cpu else "auto",
    "template_file": template_file,
    "anchored_patterns": anchored_patterns,
    "only_pad_token": only_pad_token,
    "kernel_plugins": kernel_plugins,
    "module_patterns": module_patterns,
    "module_patterns_or_expression": module_patterns_or_expression,
    "parameter_patterns": lambda modules: [rf"(^|\.){re.escape(name)}\." for name in names(modules)],
    "one_folder": one_folder,
    "lr_groups": lr_groups,
}
