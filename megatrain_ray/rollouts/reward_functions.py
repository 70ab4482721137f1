"""Finds reward functions: those that have a name here, and those of a user's own modules.

All have the signature that TRL's GRPOTrainer calls: lists of prompts and completions, and a list for each further
column of the records. They return a number for each completion, or None for one that they do not judge.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatrain_ray.config.values import EXACT, FORMAT, MATH
from megatrain_ray.errors import ConfigError

RewardFunction = Callable[..., Sequence[float | None]]

ANSWER = "answer"  # column that holds the right answer
GIVEN = ("prompts", "completions", "completion_ids")  # columns that functions get whatever the records have
# Answers in which math-verify finds a formula by itself: a sentence's last number, or what stands in delimiters.
SENTENCE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}|\n|\$|\\boxed|\\\(|\\\[")
MATH_S = 2  # seconds, whole ones: within which a formula is understood or compared; a longer one is wrong
THINK = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)  # the pattern of TRL's think_format_reward


def find_rewards(rewards: Sequence[str | Mapping[str, str]]) -> dict[str, RewardFunction]:
    """Return the functions that train.rollouts.rewards lists, by their names in metrics.

    Raises ConfigError for a module or function that is not there, and for a library that is not installed.
    """
    found: dict[str, RewardFunction] = {}
    for number, reward in enumerate(rewards):
        name, function = _find(reward, f"train.rollouts.rewards.{number}")
        count = sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in found)
        found[f"{name}_{count + 1}" if count else name] = function
    return found


def needs_answer(reward: str | Mapping[str, str]) -> bool:
    """Return whether a reward of train.rollouts.rewards compares with the column `answer` of the records."""
    return reward in (EXACT, MATH) if isinstance(reward, str) else re.compile(reward["regex"]).groups > 0


def _find(reward: str | Mapping[str, str], key: str) -> tuple[str, RewardFunction]:
    if not isinstance(reward, str):
        return "regex", partial(regex, re.compile(reward["regex"], re.DOTALL))
    if reward == MATH:
        return MATH, _math(key)
    if reward in NAMED:
        return reward, NAMED[reward]
    return _own(reward, key)


def _own(reward: str, key: str) -> tuple[str, RewardFunction]:
    """Return a function of a module, which is a name or a file. Raises ConfigError."""
    module_name, _, name = reward.rpartition(":")
    try:
        module = _module(module_name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    except (Exception, SystemExit) as error:  # the module is a program and may raise anything
        raise ConfigError(f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function {name}")
    if missing := _not_taken(function):
        raise ConfigError(
            f"{key}: {name} takes no {' or '.join(missing)}; every function gets all columns of the records by their "
            "names: add **columns to its parameters"
        )
    return name, function


def _not_taken(function: Callable[..., Any]) -> list[str]:
    """Return those of the columns which all records have that are no parameters of the function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return [column for column in GIVEN if column not in names]


def _module(name: str) -> Any:
    if not name.endswith(".py"):
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)  # where the command runs, as for `python -m`
        return importlib.import_module(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no such file: {name} (relative paths start at {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion that is the record's `answer`, blanks around both left out; else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(made).strip() == answer_text(right)) for made, right in pairs]


def regex(pattern: re.Pattern[str], completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 for each completion in which the pattern is found; else 0.

    If the pattern has a group, the first group of its last match must be the record's `answer`, blanks left out.
    """
    if not pattern.groups:
        return [float(pattern.search(text_of(made)) is not None) for made in completions]
    found = [[*pattern.finditer(text_of(made))][-1:] for made in completions]
    pairs = zip(found, columns[ANSWER], strict=True)
    return [float(any((last[1] or "").strip() == answer_text(right) for last in lasts)) for lasts, right in pairs]


def thought_first(completions: Sequence[Any], **_: Any) -> list[float]:
    """Return 1 for each completion that is one <think>…</think> and what follows; else 0."""
    return [float(THINK.fullmatch(text_of(made)) is not None) for made in completions]


NAMED: dict[str, RewardFunction] = {EXACT: exact, FORMAT: thought_first}


def _math(key: str) -> RewardFunction:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(f"{key}: math needs math-verify: pip install 'megatrain-ray[math]'") from None

    def math(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
        """Return 1 for each completion whose last number or formula equals the record's `answer`; else 0.

        None where math-verify finds neither in the answer.
        """

        # An answer such as 9^{9^{9^9}} would take the time of all. The limits take signals, which the process may have.
        def reward(made: str, right: str) -> float | None:
            gold = parse(right if SENTENCE.search(right) else f"${right}$", parsing_timeout=MATH_S)
            if not gold:
                return None
            return float(verify(gold, parse(made, parsing_timeout=MATH_S), timeout_seconds=MATH_S))

        return [reward(text_of(made), answer_text(right)) for made, right in zip(completions, answer, strict=True)]

    return math


def answer_text(answer: Any) -> str:
    """Return the text of a record's answer, without blanks around it. 42.0 is 42: tables with gaps hold floats."""
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer).strip()


def text_of(completion: Any) -> str:
    """Return a completion's text. Of a chat it is a list with one message, as in TRL."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
