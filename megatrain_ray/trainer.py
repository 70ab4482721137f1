"""Implements Trainer, by which programs train, evaluate and export as they do with Transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.urls import is_url
from megatrain_ray.config.yaml_file import set_keys
from megatrain_ray.convert.training_arguments import is_arguments, settings_of, with_arguments
from megatrain_ray.data.python_objects import Objects, with_held_out
from megatrain_ray.driver.callbacks import Callbacks
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import SaveChoice, exported, load_exported
from megatrain_ray.export.remote_export import export_by_name
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.train_output import TrainOutput
from megatrain_ray.training_run import TrainingRun, evaluate_model


class Trainer:
    """Trains a model, and resumes the run if its directory holds one. It is used like Transformers' Trainer."""

    def __init__(
        self, model: Any = None, args: Any = None, *, train_dataset: Any = None, eval_dataset: Any = None,
        processing_class: Any = None, callbacks: Sequence[Any] = (), overrides: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Take the settings of a run, and objects in place of files that some of them would name.

        args: settings as a mapping (`{"train": {"lr": 1e-5}}` or `{"train.lr": 1e-5}`), the path of a YAML file, a
            TrainConfig, or a transformers.TrainingArguments or trl.SFTConfig (convert/training_arguments.py).
        overrides: settings that take precedence over `args`, as a mapping like that.
        callbacks: transformers.TrainerCallback objects (driver/callbacks.py).

        The other arguments replace the settings model.path, data.path, data.eval_path and data.tokenizer, which are
        then left out. data/python_objects.py says what they may be. data.kind follows train.objective and the first
        record unless it is set.

        Raises ConfigError.
        """
        self._objects = Objects(model, train_dataset, eval_dataset, processing_class)
        self.config = self._read(args, overrides or {})
        given = args if is_arguments(args) else self.config
        self._save: SaveChoice = "best" if getattr(args, "load_best_model_at_end", False) else None
        self._callbacks = Callbacks(callbacks, given, model=model, processing_class=processing_class)

    def _read(self, args: Any, overrides: Mapping[str, Any]) -> TrainConfig:
        if isinstance(args, TrainConfig):
            if overrides or not self._objects.is_empty:
                raise ConfigError("args: with objects or overrides give a mapping or the path of a file")
            return args
        settings = settings_of(args)
        set_keys(settings, overrides)
        tree = self._objects.fill(settings)
        if is_arguments(args):
            tree = with_arguments(args, tree)
            tree["data"].setdefault("seq_len", self._objects.longest_row())
            if tree["data"]["seq_len"] is None:
                raise ConfigError(
                    "args: the length of rows is missing: give overrides={'data.seq_len': N}, or an SFTConfig"
                )
        return TrainConfig.model_validate(tree)

    def train(self) -> TrainOutput:
        """Train until `train.steps` updates or `train.epochs` are made, and return what came of it.

        Raises ConfigError (2), CapacityError (3), InterruptedRunError (130, after a save unless `save_every: null`),
        and MegatrainError (1) for anything that failed while running. The numbers are exit codes.
        """
        return TrainingRun(self.config, self._objects, self._callbacks).run()

    def save_model(
        self, output_dir: Path | str, dtype: Literal["bf16", "fp32"] | None = None, *, merge: bool = False,
        step: SaveChoice = None, extras: bool = True,
    ) -> Path | str:  # fmt: skip
        """Write a save as a Hugging Face folder, and return the folder, which may be a URL.

        With `lora` this is a folder of peft's, or with `merge` the model with its adapters added in.

        step: of the save; "best": that with the least held-out loss; None: the newest, or with TrainingArguments'
            `load_best_model_at_end` the best.
        extras: keep what the model's folder holds beyond the model, as it was.

        Raises as export_by_name does.
        """
        chosen = self._chosen(step)
        run, out = self.config.run_dir, str(output_dir)
        export_by_name(run, out, dtype, merge=merge, step=chosen, extras=extras)
        return out if is_url(out) else Path(out)

    def load_model(self, dtype: Literal["bf16", "fp32"] | None = None, *, step: SaveChoice = None) -> Any:
        """Return the model of a save as a PreTrainedModel on the CPU, with its adapters added in.

        dtype: None: that of the working copy.
        step: as in `save_model`.

        Meanwhile the run directory needs room for an export. Raises as export_run does.
        """
        with exported(Path(self.config.run_dir), dtype, self._chosen(step)) as folder:
            return load_exported(folder)

    def evaluate(self, eval_dataset: Any = None, *, step: SaveChoice = None) -> dict[str, Any]:
        """Return eval_loss and the other numbers of an evaluation of a save, without training.

        eval_dataset: records, or a path, in place of the run's held-out data.
        step: as in `save_model`.

        Raises as `train` and export_run do, and ConfigError if the run has not begun.
        """
        files = RunFiles(Path(self.config.run_dir).absolute())
        if not files.holds_run:
            raise ConfigError(
                f"evaluate: no run has begun in {files.path}: call train() first; with eval_every it evaluates the "
                "model before the first update, too"
            )
        with scratch_folder("evaluate") as folder:
            config = files.read_config()
            if eval_dataset is not None:
                config = with_held_out(config, eval_dataset, folder)
            return evaluate_model(str(files.path), config, self._chosen(step))

    def _chosen(self, step: SaveChoice) -> SaveChoice:
        return self._save if step is None else step
