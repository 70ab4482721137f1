"""Makes the batches of a run that samples its own answers, from the tokens of each sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import BatchStream, HeldOut
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.batching.windows import cut
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.tokens.token_files import META_NAME, OLD_LOGPROBS, REFERENCE_LOGPROBS
from megatrain_ray.read_file import parse_json


def compared_logprobs(train: OptimizationConfig) -> tuple[str, ...]:
    """Return which log-probabilities the answers of a sampling get before its first update, as keys of records."""
    if train.rollouts is None:
        return ()
    needed = (REFERENCE_LOGPROBS, train.policy.beta > 0), (OLD_LOGPROBS, train.policy.correction is not None)
    return tuple(key for key, is_needed in needed if is_needed)


@dataclass(frozen=True)
class RolloutFiles:
    """Says where the rollouts of a run lie, and when they are made.

    folder: of the run.
    interval: updates with the rollouts of one sampling.
    num_prompts: prompts of a sampling.
    """

    folder: Path
    interval: int
    num_prompts: int

    def first_of(self, step: int) -> int:
        """Return the number of updates before the sampling whose rollouts the update after `step` learns from."""
        return step // self.interval * self.interval

    def file(self, first: int) -> Path:
        """Return the file with the rollouts that were sampled after `first` updates."""
        return self.folder / f"step_{first}.jsonl"

    def tokens(self, first: int) -> Path:
        """Return the folder that the folder of their tokens is in."""
        return self.folder / f"step_{first}"

    def found_tokens(self, first: int) -> Path:
        """Return the folder with the tokens of `file`. In a run that was moved or copied there may be others beside it.

        Raises MegatrainError if it is not there.
        """
        file = self.file(first)
        with explained("read", file):
            made_of = [file_identity(file)]
        for meta in self.tokens(first).glob(f"*/{META_NAME}"):
            with suppress(OSError, ValueError, KeyError, TypeError):  # it is damaged
                if parse_json(meta.read_bytes())["provenance"]["files"] == made_of:
                    return meta.parent
        raise MegatrainError(
            f"{self.tokens(first)}: the tokens of {file.name} are missing, or it has changed; the same command resumes"
        )

    def steps(self) -> list[int]:
        """Return after how many updates the rollouts that are there were sampled, in order."""
        names = (file.stem.removeprefix("step_") for file in self.folder.glob("step_*.jsonl"))
        return sorted(int(name) for name in names if name.isdigit())


def rows_of_answers(answers: Corpus, data: DataConfig, vocab_size: int, micro_batch_size: int) -> HeldOut:
    """Put the answers of an update into one batch, with as few rows as `data.packing` allows.

    micro_batch_size: rows of all GPUs' micro-batches together; rows of nothing fill the last ones.
    """
    windows = cut(
        answers, seq_len=data.seq_len, packing=data.packing, vocab_size=vocab_size, whole=True, documents_per_record=1
    )
    return HeldOut([windows], batch_size=windows.num_windows, micro_batch_size=micro_batch_size)


class RolloutStream:
    """Serves batches in the order of steps; a sampling's rollouts in the order of their prompts."""

    def __init__(
        self, prompts: BatchStream, files: RolloutFiles, open_tokens: Callable[[Path], Corpus],
        make_rows: Callable[[Corpus], HeldOut], num_answers: int,
    ) -> None:  # fmt: skip
        """Begin before the first step.

        prompts: of which only the position is used.
        open_tokens: opens the rollouts of a token folder.
        make_rows: puts the answers of an update into one batch.
        num_answers: of an update.
        """
        self._prompts = prompts
        self._files = files
        self._open_tokens = open_tokens
        self._make_rows = make_rows
        self._num_answers = num_answers
        self._step = 0
        self._opened: tuple[int, Corpus] | None = None  # updates before the sampling that was read last, its rollouts

    @property
    def position(self) -> dict[str, Any]:
        """Return the position among the prompts, with the number of steps."""
        num_drawn = self._step // self._files.interval * self._files.num_prompts
        epoch, cursor = divmod(num_drawn, self._prompts.num_windows)
        return {**self._prompts.position, "epoch": epoch, "cursor": cursor, "step": self._step}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises ConfigError for one of other prompts."""
        self._prompts.seek(position)
        self._step = int(position["step"])

    def skip(self, num_batches: int) -> None:
        self._step += num_batches

    def next_batch(self) -> Batch:
        """Return the next batch. Raises MegatrainError if its rollouts are not there."""
        first = self._files.first_of(self._step)
        if self._opened is None or self._opened[0] != first:
            self._opened = first, self._open_tokens(self._files.found_tokens(first))
        start = (self._step - first) * self._num_answers
        self._step += 1
        return self._make_rows(self._opened[1].part(slice(start, start + self._num_answers))).batch(0)
