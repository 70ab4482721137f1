"""Encodes rollouts as sequences of ids, with what is learned of each token and by how much."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.encode_chats import (
    ChatEncoder,
    EncodedRecord,
    KeptSequence,
    Truncation,
    tallied,
    with_ends_of,
)
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, chosen_records
from megatrain_ray.io.records.process_map import map_in_order
from megatrain_ray.io.records.read_records import (
    BadRecords,
    RecordError,
    RecordOutcome,
    RecordTally,
    as_written,
    check_unicode,
)
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.rollouts.advantages import Grouping, ScaleRewards, advantages
from megatrain_ray.io.rollouts.read_rollout import Rollout, read_rollout
from megatrain_ray.io.tokens.token_files import ADVANTAGE, SAMPLER_LOGPROB, WEIGHT_TYPE, TokenArray, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer, load_tokenizer
from megatrain_ray.units import format_quantity

COLUMNS = ADVANTAGE, SAMPLER_LOGPROB  # of the sequences


@dataclass(frozen=True)
class RolloutRecipe:
    """Makes sequences from files of rollouts. Each is a document of at most `seq_len` tokens, all of them inputs."""

    files: tuple[Path, ...]
    tokenizer: str
    template: ChatTemplate
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    num_processes: int = 1  # as for ChatRecipe
    choice: RecordChoice = ALL_RECORDS
    scale_rewards: ScaleRewards = "group"
    drops_unfinished: bool = False
    compared: tuple[str, ...] = ()  # keys of `Rollout.compared` that become columns, which all records have

    has_weights: ClassVar[bool] = True

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS + self.compared

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "rollouts",
            **self.template.settings(),
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
            "rewards": [self.scale_rewards, self.drops_unfinished, *self.compared],
            **load_tokenizer(self.tokenizer).extension,
            **self.choice.settings(),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        """Yield every sequence with something to learn, in the order of the files, which are read twice.

        Raises ConfigError as `tallied` and for a file that cannot be read, MegatrainError if a process dies.
        """
        assert tokenizer is not None
        scored = advantages_of((record for _, record in self._records()), self.scale_rewards)
        work = RolloutEncoder(
            tokenizer, self.template, self.seq_len, self.truncation, self.drops_unfinished, self.compared
        )
        given = (  # make_tokens tells that a file has grown meanwhile
            (location, (as_written(location, record), float(advantage)))
            for (location, record), advantage in zip(self._records(), scored, strict=False)
        )
        with closing(map_in_order(work, given, self.num_processes)) as records:
            yield from tallied(records, tally)

    def _records(self) -> Iterator[tuple[RecordLocation, Any]]:
        return chosen_records(self.files, self.choice)


def advantages_of(records: Iterable[Any], scale: ScaleRewards) -> NDArray[np.float32]:
    """Return the advantage of each record by the rewards of its group, as `advantages`; 0 for a bad record."""
    grouping, rewards, groups = Grouping(), list[float](), list[int]()
    for record in records:
        try:
            rollout = read_rollout(record)
            rewards.append(rollout.reward)
            groups.append(grouping.number(rollout))
        except RecordError:  # which the encoder says
            rewards.append(math.nan)
            groups.append(0)
    return advantages(rewards, groups, scale)


class RolloutEncoder:
    """Encodes a rollout as one sequence of at most `max_tokens`. Picklable, so that other processes can run it.

    The sequence has COLUMNS: the advantage of each token of the answer, and its log-probability by the sampler, NaN
    where it is not known. Then come those that `compared` names. In place of the advantage of the first token, which is
    never a target, stands the reward.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, max_tokens: int, truncation: Truncation = "turn",
        drops_unfinished: bool = False, compared: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._tokenizer = with_ends_of(template, tokenizer)
        self._template = template
        self._chats = ChatEncoder(tokenizer, template)
        self._max_tokens = max_tokens
        self._truncation = truncation
        self._drops_unfinished = drops_unfinished
        self._compared = compared

    def __call__(self, given: tuple[Any, float]) -> EncodedRecord:
        """Encode a record, with the advantage that it has if it gives none."""
        record, advantage = given
        try:
            rollout = read_rollout(record)
            ids, answer = self._ids(rollout)
            _check_lengths(rollout, answer.size)
            if not answer.size:
                return EncodedRecord([], [RecordOutcome.NOTHING_LABELLED])
            num_columns = len(COLUMNS) + len(self._compared)
            learned, columns = np.zeros(ids.size, WEIGHT_TYPE), np.zeros((num_columns, ids.size), WEIGHT_TYPE)
            columns[0, answer] = advantage if rollout.advantage is None else rollout.advantage
            columns[1, answer] = math.nan if rollout.logprobs is None else rollout.logprobs
            for number, key in enumerate(self._compared, len(COLUMNS)):
                columns[number, answer] = rollout.compared[key]
            learned[answer] = 1 if rollout.mask is None else rollout.mask
        except RecordError as error:
            return EncodedRecord([], [], str(error))
        columns[0, 0] = rollout.reward
        return self._kept(rollout, KeptSequence(ids, learned, columns), moves=bool(columns[0, answer].any()))

    def _kept(self, rollout: Rollout, found: KeptSequence, *, moves: bool) -> EncodedRecord:
        """Return what is used of the sequence. moves: some token has an advantage."""
        length, outcome = found.ids.size, None
        if self._drops_unfinished and not rollout.ended:
            outcome = RecordOutcome.UNFINISHED
        elif not found.loss_weights[1:].any():
            outcome = RecordOutcome.NOTHING_LABELLED
        elif length > self._max_tokens:
            fits = self._truncation != "drop" and found.loss_weights[1 : self._max_tokens].any()
            outcome = RecordOutcome.CUT if fits else RecordOutcome.TOO_LONG
        if outcome not in (None, RecordOutcome.CUT):
            return EncodedRecord([], [outcome], longest=length + 1)
        is_scored = rollout.logprobs is not None and not np.isnan(rollout.logprobs).all()
        unscored = None if is_scored else RecordOutcome.UNSCORED
        level = RecordOutcome.NO_ADVANTAGE if not moves else None
        notes = [*filter(None, (outcome, unscored, level))]
        return EncodedRecord([found.first(self._max_tokens)], notes, longest=length + 1)

    def _ids(self, rollout: Rollout) -> tuple[TokenArray, NDArray[np.int64]]:
        """Return the ids of prompt and answer, and which of them are the answer's. Raises RecordError."""
        if rollout.answered is not None and (rollout.ended or rollout.text is None):
            chats = self._chats.encode(rollout.answered)
            if len(chats) != 1:
                raise RecordError(
                    f"completion: the chat template writes its answers as {len(chats)} sequences; give completion_ids"
                )
            return chats[0].ids, np.flatnonzero(chats[0].loss_weights)
        prompt, answer = rollout.prompt_ids, rollout.completion_ids
        if prompt is None:
            assert rollout.asked is not None
            text = self._template.render(rollout.asked.messages, rollout.asked.tools, prompt=True)
            prompt = self._tokenizer.encode(check_unicode(text, "the prompt"))
        if answer is None:  # it is cut off, so the template would write an end that was not sampled
            answer = self._tokenizer.encode(rollout.text or "")
        ids = np.concatenate([prompt, answer]).astype(np.uint32)
        return ids, np.arange(prompt.size, ids.size)


def _check_lengths(rollout: Rollout, num_tokens: int) -> None:
    """Raise RecordError if the record has numbers for another number of tokens than its answer has."""
    given = {"logprobs": rollout.logprobs, "mask": rollout.mask, "advantage": rollout.advantage} | {**rollout.compared}
    for key, values in given.items():
        if isinstance(values, np.ndarray) and values.size != num_tokens:
            raise RecordError(
                f"{key}: has {format_quantity(values.size, 'number')}, and the answer "
                f"{format_quantity(num_tokens, 'token')}; expected as many"
                + ("" if rollout.completion_ids is not None else ". completion_ids says which tokens were sampled")
            )
