"""Implements `megatrain eval`: the held-out loss of a run's save, or of any model, without training."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.progress import describe_evaluation, describe_held_out_loss
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.export import choose_save
from megatrain_ray.run.run_files import RunFiles, no_run
from megatrain_ray.training_run import evaluate_model


def evaluate(options: Namespace) -> str:
    """Return the line about the evaluation. Raises ConfigError, and as Trainer.train."""
    source, file = options.source, options.config
    files = RunFiles(Path(source).absolute())
    if files.path.is_file():
        raise ConfigError(no_run(files.path))
    if file is None and not files.holds_run:
        if not Path(source).exists():
            raise ConfigError(f"{source}: there is no such folder; name a run directory, or give --config FILE")
        raise ConfigError(
            f"{source} is no run directory: give --config FILE, a configuration with data.eval_path or "
            "data.eval_fraction, whose held-out data are evaluated"
        )
    overrides = list(options.overrides)
    if any(text.startswith("data.eval_path=") for text in overrides):  # in place of a share of the training records
        overrides.insert(0, "data.eval_fraction=null")
    config = load_config(file or files.config_file, overrides)
    if file is None:
        config = config.as_begun()  # else texts of an earlier release's run would begin with a bos token
    step = choose_save(files, options.step) if files.holds_run else options.step
    with redirect_stdout(sys.stderr):
        row = evaluate_model(source, config, step)
    row = row if step is None else {"step": step, **row}
    if options.json:
        return json.dumps(row)
    return f"{source}  {describe_evaluation(row) if files.holds_run else describe_held_out_loss(row)}"
