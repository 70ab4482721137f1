"""Checks a whole configuration when it is constructed, and fills in what may be left out."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from megatrain_ray.config.checks import disagreements
from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.groups import Settings
from megatrain_ray.config.problem_lines import describe_problems
from megatrain_ray.config.values import epochs_of, exact, with_commits
from megatrain_ray.errors import ConfigError


class TrainConfig(Settings):
    """Holds a whole configuration. Its construction raises ConfigError, with one line for every problem."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(value)
        except ValidationError as error:
            raise ConfigError(*describe_problems(error, cls)) from None
        if problems := list(disagreements(config)):
            raise ConfigError(*problems)
        return config

    @property
    def tokenizer(self) -> str:
        """Return data.tokenizer, or model.path if that is not set."""
        name = self.data.tokenizer or self.model.path
        assert name is not None  # `disagreements` requires one of the two
        return name

    def with_split(self, micro_batch_size: int, accumulate: int) -> TrainConfig:
        """Return the same configuration with the split into micro-batches that a plan has chosen."""
        batch_size = micro_batch_size * accumulate * self.hardware.num_gpus
        split = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "accumulate": accumulate}
        return self.model_copy(update={"train": self.train.model_copy(update=split)})

    def with_steps(self, num_rows: int) -> TrainConfig:
        """Return the same configuration with epochs replaced by the steps that they are.

        These are train.epochs, save_every and eval_every.

        num_rows: rows in an epoch of the data.

        Raises ConfigError if other settings ask for more steps.
        """
        epoch_steps = Fraction(num_rows, self.num_step_rows)
        every = {key: value for key in ("save_every", "eval_every") if isinstance(value := getattr(self, key), str)}
        counted = {key: max(1, round(epochs_of(text) * epoch_steps)) for key, text in every.items()}
        config, epochs = self.model_copy(update=counted), self.train.epochs
        if epochs is None:
            return config
        steps = math.ceil(exact(epochs) * epoch_steps)
        train = self.train.model_copy(update={"steps": steps, "epochs": None})
        config = config.model_copy(update={"train": train})
        for problem in disagreements(config):
            raise ConfigError(f"train.epochs: {epochs:g} of {num_rows} rows are {steps} steps: {problem}")
        return config

    def as_begun(self) -> TrainConfig:
        """Return the configuration of a run that has begun, where settings that its release lacked are as it behaved.

        Earlier releases never began texts with the bos token, and ended them with the eos token only in packed rows.
        With the tokenizer `bytes` they ended answers with ordinary text.
        """
        marks = self.data.decided_marks(self.tokenizer)
        update = {key: False for key in marks if getattr(self.data, key) is None}
        return self.model_copy(update={"data": self.data.model_copy(update=update)})

    def resolve(self, earlier: TrainConfig | None = None) -> TrainConfig:
        """Return the configuration with tokenizer, batch split and commits of data sets filled in.

        Data sets of the hub are read at the commits that the `earlier` run read. Texts begin and end as in that run.

        If the split is left open, that of the `earlier` run is used if it has the same batch size. Otherwise it remains
        open for the plan.
        """
        split, data = self.split(), self._resolved_data(earlier.data if earlier else None)
        whole = self.with_split(*split).model_copy(update={"data": data})
        if whole.train.batch_size == self.hardware.num_gpus or not self.train.split_is_free:
            return whole
        if earlier and not earlier.train.split_is_free:
            as_before = whole.with_split(*earlier.split())  # valid only if the earlier run had as many GPUs
            if as_before.train.batch_size == earlier.train.batch_size == whole.train.batch_size:
                return as_before
        return whole.model_copy(update={"train": self.train.model_copy(update={"batch_size": whole.train.batch_size})})

    def _resolved_data(self, earlier: DataConfig | None) -> DataConfig:
        update: dict[str, Any] = {"tokenizer": self.tokenizer}
        if earlier is not None:
            marks = self.data.decided_marks(self.tokenizer)
            update |= {key: getattr(earlier, key) for key in marks if getattr(self.data, key) is None}
            update["path"] = with_commits(self.data.path, earlier.path)
            if self.data.eval_path is not None and earlier.eval_path is not None:
                update["eval_path"] = with_commits(self.data.eval_path, earlier.eval_path)
        return self.data.model_copy(update=update)
