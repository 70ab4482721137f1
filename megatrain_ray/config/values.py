"""Defines the types of values that settings may have, and the validators that refuse others."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatrain_ray.config.urls import StoreUrl, without_secrets
from megatrain_ray.units import format_ranges, parse_ranges, parse_size


class Group(BaseModel):
    """Groups settings that belong together. Unknown keys, wrong types and non-finite numbers are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class WeightedPath(Group):
    path: Annotated[str, Field(min_length=1)]
    """A path, a glob or a folder."""
    weight: Annotated[float, Field(gt=0)]
    """Its share of the windows, in proportion to the other weights."""


class HubDataset(Group):
    hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """OWNER/NAME of a data set on the Hugging Face hub."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Its configuration (subset), where it has several."""
    split: Annotated[str, Field(min_length=1)] = "train"
    """Its split."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit; null: main."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of the windows, in proportion to the other weights."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """The commit that is read. A run writes it into its own configuration when it begins, and a resume reads it."""

    def __str__(self) -> str:
        named = f", {self.name}" if self.name else ""
        return f"{self.hub}{f'@{self.revision}' if self.revision else ''}{named}, {self.split}"


Source = str | WeightedPath | HubDataset


def at_most(most: int, value: Any) -> Any:
    """Return the number. Raises ValueError if it is larger than anything that a machine can do."""
    if value > most:
        raise ValueError(f"expected at most {most}, got {value}")
    return value


def without_nul(value: str) -> str:
    """Return the text. Raises ValueError if it holds a NUL, which no path and no name may."""
    if "\0" in value:
        raise ValueError("expected a text without a NUL character")
    return value


def auto_or_switch(value: Any) -> Any:
    """Accept "auto", true or false. Raises ValueError for anything else."""
    if value != "auto" and not isinstance(value, bool):
        raise ValueError(f"expected auto, true or false, got {value!r}")
    return value


def seconds_of(text: str) -> float:
    """Return the seconds of a text such as 30s or 0.5s. Raises ValueError for anything else."""
    if not (match := re.fullmatch(r"(\d+\.?\d*|\.\d+) ?s", text)) or not float(match[1]):
        raise ValueError(f"expected seconds, as in 30s, got {text!r}")
    return float(match[1])


def steps_or_text(read: Callable[[str], object], fewest: int, expected: str, value: Any) -> Any:
    """Accept a number of steps from `fewest` on, or a text that `read` accepts. Raises ValueError for anything else."""
    if isinstance(value, str):
        read(value)
    elif type(value) is not int or not fewest <= value <= MOST:
        raise ValueError(f"expected a number of steps from {expected}, got {value!r}")
    return value


def wandb_project(value: Any) -> Any:
    """Accept the name of a project in place of a mapping with it. Raises ValueError for true and false."""
    if isinstance(value, bool):
        raise ValueError(f"expected the name of a project, or {{project, entity, name, tags}}, got {value!r}")
    return {"project": value} if isinstance(value, str) else value


def epochs_of(text: str) -> Fraction:
    """Return the number in a text such as 1 epoch or 0.5 epochs. Raises ValueError for anything else."""
    if not (match := re.fullmatch(r"(\d+\.?\d*|\.\d+) ?epochs?", text)) or not float(match[1]):
        raise ValueError(f"expected epochs, as in 1 epoch or 0.5 epochs, got {text!r}")
    return Fraction(match[1])


def steps_or_share(value: Any) -> int | float:
    """Accept a whole number of steps, or a share of them below 1. Raises ValueError for anything else."""
    if type(value) in (int, float) and 0 <= value <= MOST and (value < 1 or value == int(value)):
        return int(value) if value == int(value) else float(value)
    raise ValueError(f"expected a whole number of steps, or their share as a number below 1; got {value!r}")


def exact(number: float) -> Fraction:
    """Return a number as the decimal that it is written as: 0.07 × 100 is then 7, and not a little more."""
    return Fraction(repr(number))


def sources_of_data(value: Any) -> Any:
    given = [value] if isinstance(value, (str, dict)) else value
    expected = (
        f"expected a path, a glob, a list of these, or a list of {{path, weight}} or {{hub: OWNER/NAME}}; got {value!r}"
    )
    if not isinstance(given, (list, tuple)) or not all(given) or not given or "\0" in "".join(map(str, given)):
        raise ValueError(expected)
    sources = tuple(_source(source) if isinstance(source, dict) else source for source in given)
    if not all(isinstance(source, (str, WeightedPath, HubDataset)) for source in sources):
        raise ValueError(expected)
    for source in sources:
        if not isinstance(source, HubDataset):
            without_secrets(source if isinstance(source, str) else source.path)
    if len({weight_of(source) is None for source in sources}) > 1:
        raise ValueError("some sources have a weight and some none; give each as {path, weight}, or none")
    return value if isinstance(value, str) else sources


def with_commits(new: str | tuple[Source, ...], earlier: str | tuple[Source, ...]) -> str | tuple[Source, ...]:
    """Return the sources with the commits of those data sets of the hub that an earlier start read."""
    news, before = listed(new), listed(earlier)
    if len(news) != len(before):
        return new
    found = tuple(old if _is_same(source, old) else source for source, old in zip(news, before, strict=True))
    return new if found == news else found


def listed(sources: str | tuple[Source, ...]) -> tuple[Source, ...]:
    """Return sources as a list, which may be one path."""
    return (sources,) if isinstance(sources, str) else sources


def _is_same(source: Source, before: Source) -> bool:
    """Return whether a source is the data set of the hub that another one, with its commit, is."""
    if not isinstance(before, HubDataset) or weight_of(source) != before.weight:
        return False
    if isinstance(source, HubDataset):
        return source.commit is None and source.model_copy(update={"commit": before.commit}) == before
    path = source if isinstance(source, str) else source.path
    short = HubDataset(hub=before.hub, revision=before.revision, weight=before.weight, commit=before.commit)
    return short == before and path == "@".join(filter(None, (before.hub, before.revision)))


def weight_of(source: str | WeightedPath | HubDataset) -> float | None:
    """Return the weight of a source of data; None: it has none."""
    return None if isinstance(source, str) else source.weight


def store_url(value: str) -> str:
    """Return the text. Raises ValueError unless it is a URL, without a password or a key."""
    StoreUrl.parse(value)
    return without_secrets(value)


def names_of_data(value: Any) -> Any:
    names = value if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"expected a name or a list of names, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def name_patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"expected a pattern of names or a list of them, got {value!r}")
    try:
        list(map(re.compile, patterns))
    except re.error as error:
        raise ValueError(f"{error.pattern!r} is no regular expression: {error}") from None
    return tuple(patterns)


def reward_functions(value: Any) -> tuple[str | dict[str, str], ...]:
    """Accept names of reward functions, regular expressions and functions of own modules. Raises ValueError."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"expected a list of {REWARDS}; got {value!r:.60}")
    for reward in value:
        if isinstance(reward, dict) and reward.keys() == {"regex"} and isinstance(reward["regex"], str):
            name_patterns(reward["regex"])
        elif not isinstance(reward, str) or (reward not in NAMED_REWARDS and not re.fullmatch(r".+:\w+", reward)):
            raise ValueError(f"expected {REWARDS}; got {reward!r:.60}")
    return tuple(value)


def _source(source: dict[Any, Any]) -> WeightedPath | HubDataset:
    if "hub" in source:
        return _hub_dataset(source)
    try:
        return WeightedPath.model_validate(source)
    except ValidationError as error:
        if {problem["type"] for problem in error.errors()} <= {"greater_than", "finite_number"}:
            message = f"the weight of {source['path']} is {source['weight']}; expected a number more than 0"
        else:
            message = f"expected {{path: a path or a glob, weight: a number}}, got {source!r}"
        raise ValueError(message) from None


def _hub_dataset(source: dict[Any, Any]) -> HubDataset:
    try:
        return HubDataset.model_validate(source)
    except ValidationError as error:
        keys = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise ValueError(
            f"expected {{hub: OWNER/NAME, name, split, revision, weight}}, got {source!r}: see {keys}"
        ) from None


def model_settings(value: Any) -> dict[str, Any] | str:
    if isinstance(value, (dict, str)) and value:
        return value
    raise ValueError(f"expected a mapping of the model's settings, or the path of a config.json; got {value!r}")


def template_arguments(value: Any) -> Any:
    """Return variables of a template with dates as texts: YAML reads 2024-07-26 as a date, which no template writes.

    Raises ValueError for what JSON cannot hold.
    """
    if not isinstance(value, dict):
        return value
    found = {key: part.isoformat() if isinstance(part, datetime.date) else part for key, part in value.items()}
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"expected texts, numbers, true, false, null, and lists and mappings of these: {error}"
        ) from None
    return found


def number_ranges(expected: str, value: Any) -> str:
    """Return a list of numbers as the kernel writes it: `0-15,32-47`. Raises ValueError if it is not one."""
    numbers = parse_ranges(value) if isinstance(value, str) else (value,) if type(value) is int and value >= 0 else ()
    if not numbers:
        raise ValueError(f"expected {expected}; got {value!r}")
    return format_ranges(numbers)


def server_address(value: str) -> str:
    """Return an address without a slash at its end. Raises ValueError for anything but a scheme and a host."""
    if not re.fullmatch(r"https?://[^/?#@\s]+/?", value):
        raise ValueError(f"expected a server as in http://localhost:8000, without a path; got {value!r}")
    return value.removesuffix("/")


NAMED_REWARDS = EXACT, MATH, FORMAT = "exact", "math", "format"
REWARDS = f"{', '.join(NAMED_REWARDS)}, {{regex: PATTERN}}, MODULE:FUNCTION or FILE.py:FUNCTION"
MOST = 2**31 - 1  # of anything that a run counts
MOST_SEQUENCES = 2**20  # of a step; and epochs
Text = Annotated[str, Field(min_length=1), AfterValidator(without_nul)]
Address = Annotated[str, AfterValidator(server_address)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1), AfterValidator(partial(at_most, MOST))]
NotNegative = Annotated[int, Field(ge=0), AfterValidator(partial(at_most, MOST))]
Positive = Annotated[float, Field(gt=0)]
Sequences = Annotated[int, Field(ge=1), AfterValidator(partial(at_most, MOST_SEQUENCES))]
Epochs = Annotated[float, Field(gt=0), AfterValidator(partial(at_most, MOST_SEQUENCES))]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1), AfterValidator(partial(at_most, 2**60))]
Rate = Annotated[float, Field(ge=0, lt=1)]
WarmUp = Annotated[int | float, BeforeValidator(steps_or_share)]
Switch = Annotated[Literal["auto", True, False], BeforeValidator(auto_or_switch)]
EPOCHS, SECONDS = f"0 to {MOST}, or epochs as in 1 epoch or 0.5 epochs", "1 on, or seconds as in 30s"
StepsOrEpochs = Annotated[int | str, BeforeValidator(partial(steps_or_text, epochs_of, 0, EPOCHS))]
StepsOrSeconds = Annotated[int | str, BeforeValidator(partial(steps_or_text, seconds_of, 1, SECONDS))]
Sources = Annotated[str | tuple[Source, ...], BeforeValidator(sources_of_data)]
Names = Annotated[str | tuple[str, ...], BeforeValidator(names_of_data)]
Url = Annotated[str, AfterValidator(store_url)]
Patterns = Annotated[tuple[str, ...], BeforeValidator(name_patterns)]
TemplateArguments = Annotated[dict[str, Any], BeforeValidator(template_arguments)]
Rewards = Annotated[tuple[Any, ...], BeforeValidator(reward_functions)]
ModelSettings = Annotated[dict[str, Any] | Text, BeforeValidator(model_settings)]
CpuList = Annotated[str, BeforeValidator(partial(number_ranges, "CPUs, as in 0-15,32-47"))]
GpuList = Annotated[str, BeforeValidator(partial(number_ranges, "GPUs, as in 0-3"))]
