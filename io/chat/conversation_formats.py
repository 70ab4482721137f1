"""Reads records of chats as conversations, in formats that are recognised by their keys or stated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from megatrain_ray.io.chat.messages import THOUGHT_KEYS, Conversation, new_message, parse_tools, text_of
from megatrain_ray.io.images.image_parts import LIST_KEYS, UNREAD
from megatrain_ray.io.records.read_records import RecordError, as_mapping, keys_of, missing_key

ChatFormat = Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion"]
Learn = Literal["all", "last"]

# Keys that change what is learned in ways that neither a Conversation nor a pair of them can express.
REFUSED_KEYS = ("image", "images", "video", "videos", "audio", "audios")
CHOSEN, REJECTED = "chosen", "rejected"  # keys of the two answers of a preference
LABEL_KEYS = ("label", "kto_tag")  # that say whether an answer is good: TRL's and LLaMA-Factory's

# Keys that a turn may have in addition to role and content; templates read these names.
MESSAGE_EXTRAS = frozenset({"tool_calls", "tool_call_id", "name", *THOUGHT_KEYS})
LEARN_KEYS = ("train", "weight")  # that say how much a turn is learned
TURN_KEYS = ("messages", "conversations", "conversation")  # of lists of turns
FORMAT_KEYS = (*TURN_KEYS, "instruction", "output", "prompt", "completion")  # tell formats apart
LARGEST_NUMBER = 3.4e38  # of FP32, about
MESSAGE_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}


class _ReadTurn(NamedTuple):
    message: dict[str, Any]
    loss_weight: float = 1.0


@dataclass(frozen=True)
class AlpacaLayout:
    """Describes records with one question and one answer, perhaps with earlier ones, by their keys; None: no key."""

    instruction: str | None = "instruction"
    input: str | None = "input"
    output: str | None = "output"
    system: str | None = "system"
    history: str | None = "history"
    tools: str | None = "tools"

    def read(self, record: Mapping[str, Any]) -> Conversation:
        """Return the conversation of a record. Raises RecordError naming the key or turn that is wrong."""
        names = (self.instruction, self.input, self.output, self.system, self.history, self.tools)
        check_keys(frozenset(record), names)
        if missing := [key for key in (self.instruction, self.output) if key and key not in record]:
            raise missing_key(record, missing[0])
        parts = [text_of(_get(record, key), str(key)) for key in (self.instruction, self.input)]
        answer = text_of(_get(record, self.output), str(self.output))
        turns = [*self._history(record), ("user", "\n".join(part for part in parts if part)), ("assistant", answer)]
        return _conversation(record, [_ReadTurn(new_message(*turn, {})) for turn in turns], self.system, self.tools)

    def _history(self, record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        pairs = _get(record, self.history) or []
        if not isinstance(pairs, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
            raise RecordError(f"{self.history}: expected a list of [question, answer], got {pairs!r:.60}")
        for number, (question, answer) in enumerate(pairs, 1):
            where = f"{self.history}, pair {number}"
            yield "user", text_of(question, where)
            yield "assistant", text_of(answer, where)


@dataclass(frozen=True)
class TurnsLayout:
    """Describes records with a list of turns, each with a role and a content.

    roles: maps the roles of the records to those of a template.
    extras: further keys that a turn may have.
    """

    turns: str
    role: str
    content: str
    roles: Mapping[str, str]
    extras: frozenset[str] = frozenset()
    system: str | None = "system"
    tools: str | None = "tools"

    def read(self, record: Mapping[str, Any]) -> Conversation:
        check_keys(frozenset(record), (self.turns, self.system, self.tools))
        turns = record.get(self.turns)
        if not isinstance(turns, list) or not turns:
            found = f"{turns!r:.60}" if self.turns in record else f"none (keys: {keys_of(record)})"
            raise RecordError(f"{self.turns}: expected a list of turns, got {found}")
        return _conversation(record, self.read_turns(turns), self.system, self.tools)

    def read_turns(self, turns: list[Any]) -> list[_ReadTurn]:
        return [self._turn(turn, f"turn {number}") for number, turn in enumerate(turns, 1)]

    def _turn(self, turn: Any, where: str) -> _ReadTurn:
        known = (self.role, self.content, *sorted(self.extras), *LEARN_KEYS)
        check_keys(frozenset(turn) if isinstance(turn, dict) else frozenset(), known, f"{where}: ")
        if not isinstance(turn, dict) or not isinstance(role := turn.get(self.role), str):
            raise RecordError(f"{where}: expected a mapping with {self.role} and {self.content}, got {turn!r:.60}")
        if role not in self.roles:
            near = _meant(role, self.roles) or f"expected one of {', '.join(self.roles)}"
            raise RecordError(f"{where}: unknown role {role!r}; {near}")
        given = {key: value for key, value in turn.items() if value is not None and (key, value) != ("tool_calls", [])}
        extras = {key: given[key] for key in sorted(given.keys() - {self.role, self.content, *LEARN_KEYS}, key=str)}
        if unknown := sorted(extras.keys() - self.extras):
            raise RecordError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(known)}")
        try:
            message = new_message(self.roles[role], text_of(turn.get(self.content), self.content), extras)
            if message.get("tool_calls") and turn.get(self.content) is None:
                message["content"] = None  # as Transformers gives it to a template
            return _ReadTurn(message, _loss_weight(given, message["role"]))
        except RecordError as error:
            raise RecordError(f"{where} ({role}): {error}") from None


@dataclass(frozen=True)
class PromptLayout:
    """Describes records with a prompt and its completion: texts, messages, or lists of messages.

    Of the answers, those in the completion are learned. A text is what the user asks, or the assistant answers.
    """

    prompt: str = "prompt"
    completion: str = "completion"
    system: str | None = "system"
    tools: str | None = "tools"

    def read(self, record: Mapping[str, Any]) -> Conversation:
        check_keys(frozenset(record), (self.prompt, self.completion, self.system, self.tools))
        asked = [turn._replace(loss_weight=0.0) for turn in self._turns(record, self.prompt, "user")]
        answered = self._turns(record, self.completion, "assistant")
        return _conversation(record, [*asked, *answered], self.system, self.tools)

    def read_prompt(self, record: Mapping[str, Any]) -> Conversation:
        """Return the prompt of a record, whatever its completion is. Raises RecordError."""
        return _conversation(record, self._turns(record, self.prompt, "user"), self.system, self.tools)

    def _turns(self, record: Mapping[str, Any], key: str, role: str) -> list[_ReadTurn]:
        value = record.get(key)
        if value is None:
            raise missing_key(record, key)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return [_ReadTurn(new_message(role, text_of(value, key), {}))]
        try:
            return MESSAGES.read_turns(value)
        except RecordError as error:
            raise RecordError(f"{key}, {error}") from None


ALPACA = AlpacaLayout()
PROMPT_COMPLETION = PromptLayout()
SHAREGPT = TurnsLayout("conversations", "from", "value", SHAREGPT_ROLES)
MESSAGES = TurnsLayout("messages", "role", "content", MESSAGE_ROLES, extras=MESSAGE_EXTRAS)


@dataclass(frozen=True)
class AutoLayout:
    """Recognises the format of each record by its keys. Turns may stand under `messages` or `conversations`."""

    def read(self, record: Mapping[str, Any]) -> Conversation:
        found = [turns_layout(record, name) for name in TURN_KEYS if record.get(name) is not None]
        if "instruction" in record and "output" in record:
            found.append(ALPACA)
        if record.get("prompt") is not None and record.get("completion") is not None:
            found.append(PROMPT_COMPLETION)
        if len(found) == 1:
            return found[0].read(record)
        if not found:
            check_keys(frozenset(record), FORMAT_KEYS)
        fits = "several formats at once" if found else "no known format"
        raise RecordError(
            f"its keys ({keys_of(record)}) fit {fits}; expected messages, conversations, "
            'instruction and output, or prompt and completion, as {"prompt": "Hi", "completion": "Hello"}. State '
            "data.chat_format, or rename the keys"
        )


ChatLayout = AlpacaLayout | TurnsLayout | PromptLayout | AutoLayout
LAYOUTS: Mapping[ChatFormat, ChatLayout] = {
    "auto": AutoLayout(), "alpaca": ALPACA, "sharegpt": SHAREGPT, "messages": MESSAGES,
    "prompt_completion": PROMPT_COMPLETION,
}  # fmt: skip


def read_conversation(record: Any, layout: ChatLayout) -> Conversation:
    """Return the conversation of a record of `read_records`. Raises RecordError."""
    fields = learnable_fields(record)
    if preferred := [key for key in (CHOSEN, REJECTED) if fields.get(key) not in (None, [], "")]:
        raise RecordError(f"{preferred[0]}: is of a preference, which data.kind: pairs reads; set that, or remove it")
    return layout.read(fields)


def learnable_fields(record: Any) -> Mapping[str, Any]:
    """Return the fields of a record. Raises RecordError for those that say what a conversation cannot."""
    fields = as_mapping(record)
    if refused := [key for key in REFUSED_KEYS if fields.get(key) not in (None, [], "")]:
        if refused[0] in LIST_KEYS:
            raise RecordError(f"{refused[0]}: {UNREAD}")
        raise RecordError(f"{refused[0]}: cannot be learned from; remove the key")
    if labelled := [key for key in LABEL_KEYS if isinstance(fields.get(key), bool)]:
        raise RecordError(
            f"{labelled[0]}: says whether the answer is good, which data.kind: unpaired reads; set that, or remove it"
        )
    return fields


def turns_layout(record: Mapping[str, Any], name: str) -> ChatLayout:
    """Return the layout of the turns under a key, by the keys of the first turn."""
    turns = record[name]
    first = turns[0] if isinstance(turns, list) and turns else None
    if isinstance(first, dict) and "from" in first:
        return TurnsLayout(name, "from", "value", SHAREGPT_ROLES)
    return TurnsLayout(name, "role", "content", MESSAGE_ROLES, extras=MESSAGE_EXTRAS)


def _conversation(
    record: Mapping[str, Any], turns: list[_ReadTurn], system: str | None, tools: str | None
) -> Conversation:
    if system and (text := text_of(record.get(system), system)):
        if turns[0].message["role"] == "system":
            raise RecordError(f"two system texts: one under {system!r}, one in turn 1; keep one")
        turns = [_ReadTurn(new_message("system", text, {})), *turns]
    weights = {i: turn.loss_weight for i, turn in enumerate(turns) if turn.loss_weight != 1}
    return Conversation(tuple(turn.message for turn in turns), parse_tools(record.get(tools)) if tools else (), weights)


def _loss_weight(turn: Mapping[str, Any], role: str) -> float:
    """Return how much a turn is learned: its `weight`, or 0 if `train` is false. Raises RecordError."""
    train, weight = turn.get("train", True), turn.get("weight", 1)
    if not isinstance(train, bool):
        raise RecordError(f"train: expected true or false, got {train!r:.60}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST_NUMBER:
        raise RecordError(f"weight: expected a number of 0 and more, got {weight!r:.60}")
    if role != "assistant":
        for key in LEARN_KEYS:
            if turn.get(key):
                raise RecordError(f"{key}: only turns of the assistant are learned; leave the key out")
    return float(weight) * train


def number_under(record: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number under a key, the default if there is none. Raises RecordError."""
    value = record.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_NUMBER:
        raise RecordError(f"{key}: expected a number, got {value!r:.60}")
    return float(value)


def _get(record: Mapping[str, Any], key: str | None) -> Any:
    return None if key is None else record.get(key)


def _meant(word: str, known: Iterable[str]) -> str:
    """Return a question that names what a word nearly is; empty if it is near to nothing."""
    close = get_close_matches(word.lower(), known, n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else ""


@lru_cache(maxsize=256)  # the records and turns of a file have few distinct sets of keys
def check_keys(keys: frozenset[str], known: tuple[str | None, ...], where: str = "") -> None:
    """Raise RecordError for a key that is nearly the name of a missing known one, which would be silently lost."""
    absent = [key for key in known if key and key not in keys]
    for key in sorted(keys - set(known), key=str):
        if near := _meant(str(key), absent):
            raise RecordError(f"{where}unknown key {key!r}; {near}")
