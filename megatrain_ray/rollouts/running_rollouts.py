"""Runs a sampling from the driver: it submits prompts, and has the completions rewarded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatrain_ray.config.train_groups import RolloutsConfig
from megatrain_ray.engine.step.sampler import Completion, Prompt
from megatrain_ray.io.batching.splitmix import splitmix64_chain
from megatrain_ray.rollouts.answer_scores import SampledAnswer
from megatrain_ray.rollouts.prompts import DrawnPrompt
from megatrain_ray.rollouts.reward_process import RewardProcess
from megatrain_ray.rollouts.rollout_records import Record, rollout_record, summary_of, total_rewards

Sample = Callable[[int, list[Prompt]], Any]  # submits prompts by step, and returns the call
Score = Callable[[int, list[SampledAnswer]], Any]  # the same of answers


class _Answer(NamedTuple):
    """Holds a prompt that is to be answered once. `group`: number of the prompt within the sampling."""

    group: int
    drawn: DrawnPrompt
    prompt: Prompt


class RunningRollouts:
    """Samples `group_size` completions of each prompt with the weights after `step` updates, and rewards them."""

    def __init__(
        self, sample: Sample, prompts: Sequence[DrawnPrompt], settings: RolloutsConfig, seed: int, step: int,
        rewards: RewardProcess, decode: Callable[[list[int]], str], score: Score | None = None,
    ) -> None:  # fmt: skip
        """Submit the prompts. A call answers as many of those that it is given as the device has room for.

        seed: of the random numbers, with the step, the prompt's number and the completion's number in its group.
        decode: returns the text of ids.
        score: submits the answers whose log-probabilities go into the records; None: there are none to compute.
        """
        self.step = step
        self.records: list[Record] = []
        self._sample = sample
        self._settings = settings
        self._rewards = rewards
        self._decode = decode
        self._score = score
        self._compared: Mapping[str, Sequence[list[float]]] = {}  # by key of records: of each answer
        self._start_s = time.monotonic()
        self._sampling_s = self._scoring_s = 0.0
        self._is_asked = False  # whether the rewards are being computed, or are there
        answers = [
            _Answer(group, drawn, Prompt(drawn.ids, splitmix64_chain(seed, step, group, index) >> 1))
            for group, drawn in enumerate(prompts)
            for index in range(settings.group_size)
        ]
        self._answers = answers
        # Prompts of about one length are computed together.
        self._left = sorted(range(len(answers)), key=lambda k: len(answers[k].drawn.ids))
        self._completions: dict[int, Completion] = {}
        self._call: Any = None
        self._given_up = False
        self._submit()

    @property
    def calls(self) -> list[Any]:
        """Return the call under way: of a sampling or of scores; none once the completions are being rewarded."""
        return [] if self._call is None else [self._call]

    @property
    def progress(self) -> tuple[int, int]:
        """Return how many completions are sampled, and how many there will be."""
        return len(self._completions), len(self._answers)

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens per second so far."""
        seconds = self._sampling_s or time.monotonic() - self._start_s
        return sum(len(completion.ids) for completion in self._completions.values()) / seconds

    def add_result(self, found: Any) -> None:
        """Add the result of the call, completions or scores, and begin what comes next: in the end the rewards."""
        self._call = None
        if not self._left:
            self._compared = found
            self._scoring_s = time.monotonic() - self._start_s - self._sampling_s
        else:
            self._completions |= zip(self._left, found, strict=False)
            self._left = self._left[len(found) :]
            if not self._left:
                self._sampling_s = time.monotonic() - self._start_s
        if self._given_up:
            return
        if self._left:
            self._submit()
        elif self._score and not self._compared:
            answers = [SampledAnswer(one.drawn.ids, self._completions[k].ids) for k, one in enumerate(self._answers)]
            self._call = self._score(self.step, answers)
        else:
            self._ask()

    def give_up(self) -> None:
        """Submit nothing more. The call under way must still be waited for."""
        self._given_up = True

    def is_over(self, wait_s: float) -> bool:
        """Return whether there is nothing to wait for any more: it was given up, or `records` has all rollouts.

        wait_s: seconds to wait for the rewards, if these are being computed. Raises as RewardProcess.answer and
            total_rewards.
        """
        if self._call is not None:
            return False
        if self.records or not self._is_asked:
            return True
        scores = self._rewards.answer(wait_s)
        if scores is None:
            return self._given_up
        rewards = total_rewards(scores, self._settings.reward_weights or [1.0] * len(scores))
        for k, answer in enumerate(self._answers):
            completion = self._completions[k]
            of_one = {name: values[k] for name, values in scores.items()}
            text = self._decode(completion.ids)
            compared = {key: values[k] for key, values in self._compared.items()}
            record = rollout_record(answer.drawn.ids, answer.group, completion, text, of_one, rewards[k])
            self.records.append(record | compared)
        return True

    def summary(self) -> dict[str, float]:
        """Return what metrics have of the rollouts, once all are there."""
        return {
            **summary_of(self.records), "tokens_per_s": self.tokens_per_s, "sampling_s": self._sampling_s,
            **({"scoring_s": self._scoring_s} if self._compared else {}),
            "reward_s": time.monotonic() - self._start_s - self._sampling_s - self._scoring_s,
        }  # fmt: skip

    def evaluation(self) -> dict[str, Any]:
        """Return a row of evaluations.jsonl, once all are there. The loss is minus the mean reward."""
        found = summary_of(self.records)
        return {
            "step": self.step, "eval_loss": 0.0 - found["reward"],  # no negative zero
            **{f"eval_{name}": value for name, value in found.items()},
            "eval_tokens": sum(len(answer.drawn.ids) for answer in self._answers),
            "eval_s": time.monotonic() - self._start_s,
        }  # fmt: skip

    def _submit(self) -> None:
        self._call = self._sample(self.step, [self._answers[k].prompt for k in self._left])

    def _ask(self) -> None:
        self._is_asked = True
        drawn = [answer.drawn for answer in self._answers]
        ids = [self._completions[k].ids for k in range(len(drawn))]
        # As in TRL: a completion of a chat is a list with one message.
        completions = [
            text if isinstance(one.prompt, str) else [{"role": "assistant", "content": text}]
            for one, text in zip(drawn, map(self._decode, ids), strict=True)
        ]  # fmt: skip
        names = dict.fromkeys(name for one in drawn for name in one.columns)
        columns = {name: [one.columns.get(name) for one in drawn] for name in names}
        self._rewards.ask([one.prompt for one in drawn], completions, {**columns, "completion_ids": ids})
