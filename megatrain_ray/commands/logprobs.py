"""Implements `megatrain logprobs`: the log-probabilities of a model over the data of a configuration."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_sources import cut_source, sources_of
from megatrain_ray.data.marks_and_template import ALL_IDS
from megatrain_ray.driver.running_evaluation import perplexity
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.windows import Windows
from megatrain_ray.io.tokens.logprob_files import LOGPROBS_NAME, open_logprobs, read_logprob_meta
from megatrain_ray.model.open_model import read_model
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.start_of_run import tokenize_all
from megatrain_ray.training_run import compute_logprobs
from megatrain_ray.units import format_count

ANSWERS: tuple[str, ...] = ("chosen", "rejected")  # of a preference
LABELLED = ("good", "bad", "mismatched")  # the last only if the objective needs them


def logprobs(options: Namespace) -> Iterator[str]:
    """Yield a line for each source. Raises ConfigError, and as Trainer.train."""
    config, files = load_config(options.config, options.overrides), None
    if config.data.stream is not None:
        raise ConfigError("data.stream: log-probabilities are of data that are tokenised whole; set data.stream: null")
    with redirect_stdout(sys.stderr):
        files = RunFiles(Path(config.run_dir).absolute())
        config = config.resolve(files.read_config() if files.holds_run and files.has_begun else None)
        vocab_size = read_model(config.model).written_vocab_size
        config, data = tokenize_all(config, vocab_size, files.path, startup := Startup())
        found = compute_logprobs(options.model, config, data, files.path, options.step, startup=startup)
    held_out = config.data.held_out
    names = [*sources_of(config.data), *(sources_of(held_out) if held_out and data.held_out else ())]
    for name, tokens, folder in zip(
        names, (*data.training, *(data.held_out or ())), (*found.training, *found.held_out), strict=True
    ):
        row = _row(name, tokens, folder)
        if config.data.in_pairs or config.data.is_labelled:
            answers = ANSWERS if config.data.in_pairs else LABELLED if config.train.estimates_kl else LABELLED[:2]
            row |= _of_answers(name, folder, cut_source(config.data, name, tokens, ALL_IDS, whole=True), answers)
        yield json.dumps(row) if options.json else _line(row)


def _row(name: str, tokens: Path, folder: Path) -> dict[str, Any]:
    meta = read_logprob_meta(folder)
    assert meta is not None  # it has just been checked
    return {
        "source": name, "targets": meta.num_targets, "mean_logprob": meta.mean, "tokens": str(tokens),
        "logprobs": str(folder / LOGPROBS_NAME),
    }  # fmt: skip


def _of_answers(name: str, folder: Path, windows: Windows, answers: Sequence[str]) -> dict[str, Any]:
    """Return targets and mean log-probability of the answers of each kind, and of all but mismatched ones."""
    corpus, values = windows.corpus, open_logprobs(name, folder, windows.num_places)
    assert corpus.loss_weights is not None  # preferences and labelled answers are chats
    lengths = np.asarray(corpus.document_lengths)
    firsts = np.cumsum(lengths) - lengths
    kinds = np.arange(lengths.size) % 2
    if windows.labelled:
        is_good = np.logical_or.reduceat(np.asarray(corpus.loss_weights) > 0, firsts)
        # After each answer stands the mismatched one; where there is none, its own once more (preferences.py).
        kinds = np.where(kinds == 1, 3 - is_good, 1 - is_good)
    supervised = corpus.loss_weights != 0
    supervised[firsts] = False  # first tokens, which are no targets, may hold a margin
    counts, sums = (np.bincount(np.repeat(kinds, lengths), of, 4) for of in (supervised, values))
    numbers = [_mean(*of) for of in zip(counts.tolist(), sums.tolist(), strict=True)]
    found = {kind: of for kind, of in zip(answers, numbers, strict=False) if of["targets"]}
    return _mean(sum(counts[:2]), sum(sums[:2])) | found


def _mean(count: float, total: float) -> dict[str, Any]:
    return {"targets": int(count), "mean_logprob": float(total) / max(count, 1)}


def _line(row: dict[str, Any]) -> str:
    answers = [f"{key}: {_numbers(row[key])}" for key in (*ANSWERS, *LABELLED) if key in row]
    numbers = "  ".join(answers) or _numbers(row)
    return f"{row['source']}  {numbers}  {row['logprobs']}"


def _numbers(row: dict[str, Any]) -> str:
    mean = row["mean_logprob"]
    return f"{format_count(row['targets'])} targets  mean {mean:.4f}  perplexity {perplexity(-mean):.5g}"
