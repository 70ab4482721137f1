"""Draws the prompts of a sampling, with the other columns of their records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.values import listed
from megatrain_ray.data.hub_sources import local_paths
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.batch_stream import permutation
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.encode_chats import with_ends_of
from megatrain_ray.io.chat.template_ending import last_mark, text_after_answer
from megatrain_ray.io.records.choose_records import RecordChoice, chosen_records
from megatrain_ray.io.records.file_formats import RECORD_SUFFIXES
from megatrain_ray.io.records.find_files import find_files
from megatrain_ray.io.records.read_records import as_mapping, as_written, keys_of
from megatrain_ray.io.rollouts.encode_prompts import PROMPT, asked_of
from megatrain_ray.io.tokens.tokenizer import Tokenizer
from megatrain_ray.units import format_quantity


def find_prompts(data: DataConfig) -> tuple[Path, ...]:
    """Return the files of prompts. Raises ConfigError if there are none."""
    return find_files(local_paths(listed(data.path)), RECORD_SUFFIXES)


class DrawnPrompt(NamedTuple):
    """Holds a prompt of a sampling.

    prompt: as the record gives it: a text, or messages.
    columns: the record's other entries, for reward functions.
    """

    ids: list[int]
    prompt: Any
    columns: Mapping[str, Any]


class Prompts:
    """Draws the prompts of samplings, epoch after epoch. They depend only on the data, data.seed and the sampling."""

    def __init__(self, data: DataConfig, corpus: Corpus) -> None:
        """Read the records. `corpus`: their prompts' tokens."""
        choice = RecordChoice(data.max_records, data.hash_range)
        self._data = data
        self._corpus = corpus
        self._records = [
            as_mapping(as_written(location, record)) for location, record in chosen_records(find_prompts(data), choice)
        ]
        if len(self._records) != corpus.num_documents:
            raise ConfigError("data.path: files changed while they were read; start again when they are done")
        lengths = np.asarray(corpus.document_lengths)
        self._starts = np.cumsum(lengths) - lengths

    def check_lengths(self, most_tokens: int) -> None:
        """Raise ConfigError if a prompt has more tokens than are left for it."""
        lengths = np.asarray(self._corpus.document_lengths)
        if (long := np.flatnonzero(lengths > most_tokens)).size:
            raise ConfigError(
                f"data.path: the prompt of record {long[0] + 1} has {lengths[long[0]]} tokens "
                f"({format_quantity(long.size, 'prompt')} too long), and data.seq_len - train.rollouts.max_new_tokens "
                f"leaves {most_tokens}; shorten or leave out the records, or change one of the two"
            )

    def check_columns(self, key: str) -> None:
        """Raise ConfigError if a record lacks a column that rewards need."""
        for number, record in enumerate(self._records, 1):
            if record.get(key) is None:
                raise ConfigError(
                    f"train.rollouts.rewards: exact, math and a regex with a group compare with the column {key!r}, "
                    f"which record {number} of data.path lacks; its keys are {keys_of(record)}"
                )

    def draw(self, sampling: int, count: int) -> list[DrawnPrompt]:
        """Return the prompts of a sampling by its number, from 0. It draws `count`, as all before it do."""
        numbers = range(sampling * count, (sampling + 1) * count)
        return [self._prompt(self._index(*divmod(number, len(self._records)))) for number in numbers]

    def all(self) -> list[DrawnPrompt]:
        """Return every prompt once, in the order of the records."""
        return [*map(self._prompt, range(len(self._records)))]

    def _index(self, epoch: int, cursor: int) -> int:
        if not self._data.shuffle:
            return cursor
        return int(permutation(len(self._records), self._data.seed, epoch)[cursor])

    def _prompt(self, index: int) -> DrawnPrompt:
        start, record = self._starts[index], self._records[index]
        ids = self._corpus.tokens[start : start + self._corpus.document_lengths[index]].tolist()
        prompt = record.get(PROMPT)
        if prompt is None:
            prompt = [dict(message) for message in asked_of(record, self._data.chat_format).messages]
        return DrawnPrompt(ids, prompt, {key: value for key, value in record.items() if key not in RESERVED})


RESERVED = frozenset({PROMPT, "prompts", "completions"})  # names of arguments of reward functions, and the prompt


def answer_ends(tokenizer: Tokenizer, template: ChatTemplate, vocab_size: int) -> tuple[int, ...]:
    """Return the ids at which sampling stops: the template's mark after an answer, and the tokenizer's eos token."""
    own = with_ends_of(template, tokenizer)
    found = (last_mark(own, text_after_answer(template)), own.end_of_document)
    return tuple(dict.fromkeys(end for end in found if end is not None and end < vocab_size))
