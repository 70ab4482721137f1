"""Keeps the rollouts of a run: which prompts are next, the files of what was sampled, and the reward functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.train_groups import RolloutsConfig
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.data.marks_and_template import ALL_IDS, template_of
from megatrain_ray.data.rollout_stream import RolloutFiles, compared_logprobs
from megatrain_ray.data.tokenize_data import tokenize_rollouts
from megatrain_ray.engine.step.sampler import Prompt, SamplingParams
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, remove_owned
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.rollouts.answer_scores import SampledAnswer
from megatrain_ray.rollouts.prompts import DrawnPrompt, Prompts, answer_ends
from megatrain_ray.rollouts.reward_functions import ANSWER, needs_answer
from megatrain_ray.rollouts.reward_process import RewardProcess
from megatrain_ray.rollouts.rollout_records import read_rollouts, summary_of
from megatrain_ray.rollouts.running_rollouts import RunningRollouts, Score
from megatrain_ray.rollouts.sampling_server import SamplingServer

LEAST_KEPT = 2  # a save of a step of the sampling before may still be under way


@dataclass(frozen=True)
class RunRollouts:
    """Holds what all samplings of a run have in common. Made by `open_rollouts`.

    held_out: prompts that are answered in evaluations; None: nothing is evaluated.
    """

    config: TrainConfig
    settings: RolloutsConfig
    files: RolloutFiles
    prompts: Prompts
    held_out: Prompts | None
    rewards: RewardProcess
    vocab_size: int

    def sampling_params(self) -> SamplingParams:
        """Return how tokens are drawn, and which of them end a completion."""
        tokenizer = load_tokenizer(self.config.tokenizer)
        ends = answer_ends(tokenizer, template_of(self.config.data, self.config.tokenizer), self.vocab_size)
        return SamplingParams(self.settings.max_new_tokens, self.settings.temperature, self.settings.top_p, ends)

    @property
    def weights_folder(self) -> Path | None:
        """Return where a server that samples finds weights: absolute. None: there is no server."""
        server = self.settings.server
        return Path(server.weights or self.files.folder.parent).absolute() if server else None

    async def check_server(self) -> None:
        """Raise ConfigError if the server that samples lacks something."""
        if self.settings.server is not None:
            async with SamplingServer(self.settings.server) as server:
                await server.check(self.sampling_params(), self.config.data.seq_len, self.vocab_size)

    def resume(self, step: int) -> tuple[int, dict[str, Any]]:
        """Go on after `step` updates: delete what later ones have sampled, and find what the next one learns from.

        Return the number of updates before the newest sampling, -1 if none is there, and what metrics have of it.
        Raises MegatrainError if the rollouts are missing that the last updates have learned from.
        """
        for later in self.files.steps():
            if later > step or not step:  # a start that made no update may have had other settings
                self._delete(later)
        first = self.files.first_of(step)
        file = self.files.file(first)
        if not file.exists():
            if step == first:
                return -1, {}
            raise MegatrainError(f"{file} is missing, of which update {step + 1} is to learn: put it back")
        self._make_tokens(first)
        with explained("read", file):
            return first, summary_of(read_rollouts(file))

    def begin(
        self, step: int, sample: Callable[[int, list[Prompt], SamplingParams], Any],
        score: Callable[[int, list[SampledAnswer]], Any],
    ) -> RunningRollouts:  # fmt: skip
        """Begin the sampling after `step` updates, whose answers later ones learn from.

        sample, score: submit prompts to be answered, and answers whose log-probabilities are needed. They return the
            call.
        """
        prompts = self.prompts.draw(step // self.files.interval, self.files.num_prompts)
        scored = score if compared_logprobs(self.config.train) else None
        return self._begin(step, prompts, self.settings, self.sampling_params(), sample, scored)

    def begin_evaluation(
        self, step: int, sample: Callable[[int, list[Prompt], SamplingParams], Any]
    ) -> RunningRollouts:  # fmt: skip
        """Begin to answer each held-out prompt once, after `step` updates. `sample`: as for `begin`."""
        assert self.held_out is not None  # else nothing is evaluated
        settings = self.settings.model_copy(update={"group_size": 1})
        sampling = replace(self.sampling_params(), temperature=self.settings.eval_temperature)
        return self._begin(step, self.held_out.all(), settings, sampling, sample, None)

    def _begin(
        self, step: int, prompts: Sequence[DrawnPrompt], settings: RolloutsConfig, sampling: SamplingParams,
        sample: Callable[[int, list[Prompt], SamplingParams], Any], score: Score | None,
    ) -> RunningRollouts:  # fmt: skip
        tokenizer = load_tokenizer(self.config.tokenizer)

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(np.array(ids[:-1] if ids[-1] in sampling.ends else ids, np.uint32))

        def submit(step: int, prompts: list[Prompt]) -> Any:
            return sample(step, prompts, sampling)

        seed = self.config.train.seed
        return RunningRollouts(submit, prompts, settings, seed, step, self.rewards, decode, score)

    def commit(self, running: RunningRollouts, saved: Collection[int]) -> None:
        """Write the rollouts of a sampling, after which they are there, and delete the oldest ones.

        saved: updates in the saves that are there or being written, which a resume may go on from.
        """
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in running.records]
        file = self.files.file(running.step)
        with explained("write", file):
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, "".join(lines))
        self._make_tokens(running.step)
        needed = {self.files.first_of(step) for step in saved}
        for old in self.files.steps()[: -max(self.settings.keep, LEAST_KEPT)]:
            if old not in needed:
                self._delete(old)

    def _make_tokens(self, first: int) -> None:
        tokenize_rollouts(self.config, self.files.file(first), self.vocab_size, self.files.tokens(first))

    def _delete(self, first: int) -> None:
        folder = self.files.tokens(first)
        with explained("delete", self.files.file(first)):
            for tokens in [*folder.glob("*/")]:
                with suppress(NotOwnedError):  # of a run that was copied: nothing finds them
                    remove_owned(tokens, FolderKind.TOKENS)
            with suppress(OSError):
                folder.rmdir()
            self.files.file(first).unlink()


@contextmanager
def open_rollouts(
    config: TrainConfig, run_dir: Path, tokens: Sequence[Path], held_out: Sequence[Path] | None, source: ModelSource
) -> Iterator[RunRollouts | None]:
    """Read the prompts of a run and start the process of its reward functions for the block; None: it has none.

    tokens, held_out: folders of the tokens of the data, and of held-out prompts; None: nothing is evaluated.

    Raises ConfigError for prompts that are too long or lack a column, for reward functions that are not there, and for
    a server that lacks something.
    """
    settings = config.train.rollouts
    if settings is None:
        yield None
        return
    num_prompts = settings.steps * config.num_step_rows // settings.group_size
    vocab_size = source.written_vocab_size or ALL_IDS
    prompts, evaluated = _prompts(config.data, settings, tokens, vocab_size), None
    if held_out is not None and (data := config.data.held_out) is not None:
        with naming_held_out(data):
            evaluated = _prompts(data, settings, held_out, vocab_size)
    rewards = RewardProcess(settings.rewards, settings.timeout_s)
    try:
        files = RolloutFiles(run_dir / "rollouts", settings.steps, num_prompts)
        rollouts = RunRollouts(config, settings, files, prompts, evaluated, rewards, vocab_size)
        asyncio.run(rollouts.check_server())
        yield rollouts
    finally:
        rewards.close()


def _prompts(data: DataConfig, settings: RolloutsConfig, tokens: Sequence[Path], vocab_size: int) -> Prompts:
    """Open prompts, and check that each leaves room for an answer and has what rewards need. Raises ConfigError."""
    prompts = Prompts(data, open_corpus(data.key, tokens[0], vocab_size))
    prompts.check_lengths(data.seq_len - settings.max_new_tokens)
    if any(map(needs_answer, settings.rewards)):
        prompts.check_columns(ANSWER)
    return prompts
