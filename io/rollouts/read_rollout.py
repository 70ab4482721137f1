"""Reads records of rollouts. Each is one answer of a sampler to a prompt, with a reward or an advantage."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.conversation_formats import LARGEST_NUMBER, PROMPT_COMPLETION, check_keys, number_under
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import RecordError, as_mapping, check_unicode, keys_of, numbers_under
from megatrain_ray.io.tokens.token_files import OLD_LOGPROBS, REFERENCE_LOGPROBS

IDS = "prompt_ids", "completion_ids"
KEYS = (
    "prompt", "completion", *IDS, "logprobs", "reward", "advantage", "group", "mask", "ended", "system", "tools",
    REFERENCE_LOGPROBS, OLD_LOGPROBS,
)  # fmt: skip
MOST_LOGPROB = 1e-3  # samplers round, so that a certain token may have a little more than 0


class Rollout(NamedTuple):
    """Holds one answer as its record gives it.

    asked: the prompt as a conversation, if it is no ids.
    answered: the prompt with the answer, if neither is ids.
    text: the answer, if it is a text.
    prompt_ids, completion_ids: None if the record has none.
    logprobs: log-probability of each token of the answer in the policy that sampled it, NaN where it is not known;
        None: it is known of none.
    mask: which tokens of the answer are learned; None: all.
    advantage: of all tokens of the answer, or of each; None: it is made of rewards.
    reward: NaN: the record has none.
    group: what tells the answers to one prompt from others.
    names_group: whether the record names its group. Otherwise that is its prompt.
    ended: False: the sampler cut the answer off.
    compared: further log-probabilities of each token, by key, as a run writes them of its own answers.
    """

    asked: Conversation | None
    answered: Conversation | None
    text: str | None
    prompt_ids: NDArray[np.uint32] | None
    completion_ids: NDArray[np.uint32] | None
    logprobs: NDArray[np.float32] | None
    mask: NDArray[np.bool_] | None
    advantage: float | NDArray[np.float32] | None
    reward: float
    group: str
    names_group: bool
    ended: bool
    compared: Mapping[str, NDArray[np.float32]]


def read_rollout(record: Any) -> Rollout:
    """Return what a record says. Raises RecordError naming the key that is wrong."""
    fields = {key: value for key, value in as_mapping(record).items() if value is not None}
    check_keys(frozenset(map(str, fields)), KEYS)
    for text_key, ids_key in zip(("prompt", "completion"), IDS, strict=True):
        if (text_key in fields) == (ids_key in fields):
            has = "both" if text_key in fields else f"neither (keys: {keys_of(record)})"
            raise RecordError(f"expected either {text_key} or {ids_key}, got {has}")
    if "prompt_ids" in fields and "completion_ids" not in fields:
        raise RecordError("completion: goes with a prompt; with prompt_ids give completion_ids")
    asked = PROMPT_COMPLETION.read_prompt(fields) if "prompt" in fields else None
    answered = PROMPT_COMPLETION.read(fields) if "completion" in fields else None
    if answered is not None and not answered.answers:
        raise RecordError(f"completion: expected an answer of the assistant, got {fields['completion']!r:.60}")
    group = fields.get("group")
    if isinstance(group, bool) or not isinstance(group, str | int | float | None):
        raise RecordError(f"group: expected a text or a number, got {group!r:.60}")
    if not isinstance(ended := fields.get("ended", True), bool):
        raise RecordError(f"ended: expected true or false, got {ended!r:.60}")
    prompt = fields.get("prompt", fields.get("prompt_ids"))
    text = fields.get("completion")
    advantage, reward = _advantage(fields), number_under(fields, "reward", math.nan)
    if advantage is None and math.isnan(reward):
        raise RecordError("expected a reward or an advantage, got neither")
    return Rollout(
        asked, answered, check_unicode(text, "completion") if isinstance(text, str) else None,
        _ids(fields, "prompt_ids"), _ids(fields, "completion_ids"), _logprobs(fields, "logprobs"), _mask(fields),
        advantage, reward,
        json.dumps(prompt if group is None else group, sort_keys=True, default=str), group is not None, ended,
        {key: found for key in (REFERENCE_LOGPROBS, OLD_LOGPROBS) if (found := _logprobs(fields, key)) is not None},
    )  # fmt: skip


def _ids(fields: Mapping[str, Any], key: str) -> NDArray[np.uint32] | None:
    numbers = numbers_under(fields, key, "integers", "iu")
    if numbers is None:
        return None
    if not numbers.size:
        raise RecordError(f"{key}: expected ids, got none")
    if not 0 <= numbers.min() <= numbers.max() < 1 << 32:
        raise RecordError(f"{key}: expected ids of 0 and more, got {numbers.min()} to {numbers.max()}")
    return numbers.astype(np.uint32)


def _logprobs(fields: Mapping[str, Any], key: str) -> NDArray[np.float32] | None:
    given = fields.get(key)
    values = given if isinstance(given, list) else []
    is_known = [value is not None for value in values]
    if not all(is_known):  # samplers write null where they know none
        fields = {**fields, key: [0.0 if value is None else value for value in values]}
    numbers = numbers_under(fields, key, "numbers", "iuf")
    if numbers is None:
        return None
    if (wrong := np.flatnonzero(~((numbers >= -LARGEST_NUMBER) & (numbers <= MOST_LOGPROB)))).size:
        at = int(wrong[0])
        raise RecordError(
            f"{key}: expected finite log-probabilities of 0 and less, or null where none is known; token {at} has "
            f"{numbers[at]}"
        )
    return np.where(is_known, numbers, math.nan).astype(np.float32)


def _mask(fields: Mapping[str, Any]) -> NDArray[np.bool_] | None:
    numbers = numbers_under(fields, "mask", "0 and 1", "biu")
    if numbers is not None and not np.isin(numbers, (0, 1)).all():
        raise RecordError(f"mask: expected 0 and 1, got {numbers.min()} to {numbers.max()}")
    return None if numbers is None else numbers.astype(np.bool_)


def _advantage(fields: Mapping[str, Any]) -> float | NDArray[np.float32] | None:
    if "advantage" not in fields:
        return None
    if not isinstance(fields["advantage"], list):
        return number_under(fields, "advantage", math.nan)
    numbers = numbers_under(fields, "advantage", "a number, or one for each token", "iuf")
    assert numbers is not None
    if (wrong := np.flatnonzero(~(abs(numbers) <= LARGEST_NUMBER))).size:
        at = int(wrong[0])
        raise RecordError(f"advantage: expected finite numbers, token {at} of the answer has {numbers[at]}")
    return numbers.astype(np.float32)
