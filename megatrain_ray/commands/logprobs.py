"""Implements `megatrain logprobs`: the log-probabilities of a model over the data of a configuration."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_worker import sources_of
from megatrain_ray.driver.running_evaluation import perplexity
from megatrain_ray.io.tokens.logprob_files import LOGPROBS_NAME, read_logprob_meta
from megatrain_ray.model.open_model import read_model
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.trainer import compute_logprobs, tokenize_all
from megatrain_ray.units import format_count


def logprobs(options: Namespace) -> Iterator[str]:
    """Yield a line for each source. Raises ConfigError, and as Trainer.train."""
    config, files = load_config(options.config, options.overrides), None
    with redirect_stdout(sys.stderr):
        files = RunFiles(Path(config.run_dir).absolute())
        config = config.resolve(files.read_config() if files.holds_run and files.has_begun else None)
        vocab_size = read_model(config.model).written_vocab_size
        config, data = tokenize_all(config, vocab_size, files.path, Startup())
        found = compute_logprobs(options.model, config, data, files.path, options.step)
    held_out = config.data.held_out
    names = [*sources_of(config.data), *(sources_of(held_out) if held_out and data.held_out else ())]
    for name, tokens, folder in zip(
        names, (*data.training, *(data.held_out or ())), (*found.training, *found.held_out), strict=True
    ):
        row = _row(name, tokens, folder)
        yield json.dumps(row) if options.json else _line(row)


def _row(name: str, tokens: Path, folder: Path) -> dict[str, Any]:
    meta = read_logprob_meta(folder)
    assert meta is not None  # it has just been checked
    return {
        "source": name, "targets": meta.num_targets, "mean_logprob": meta.mean, "tokens": str(tokens),
        "logprobs": str(folder / LOGPROBS_NAME),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    mean = row["mean_logprob"]
    numbers = f"{format_count(row['targets'])} targets  mean {mean:.4f}  perplexity {perplexity(-mean):.5g}"
    return f"{row['source']}  {numbers}  {row['logprobs']}"
