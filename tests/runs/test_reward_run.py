"""Runs of reward models through the command line: trained, resumed, evaluated, exported and loaded by Transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.data_sources import open_windows
from megatrain_ray.start_of_run import tokenize_all
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.in_process import Train
from tests.support.runs import cli_here, config, losses, rows, write_config
from tests.support.tiny import build_tiny

STEPS = 4


def reward_config(tmp_path: Path, **train: Any) -> dict[str, Any]:
    """Return the configuration of a run on preferences that begins with a causal model, whose head is tied."""
    records = [
        {"prompt": "q" * n, "chosen": "a" * (n % 7 + 1), "rejected": "b" * (n % 5 + 1), "margin": n % 3 / 4}
        for n in range(1, 25)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model", tied=True), save_every=2, save_keep=9, eval_every=2)
    numbers = {"center_rewards_coefficient": 0.01}
    split = {"batch_size": 2, "micro_batch_size": 1, "accumulate": 2}
    tree["train"] |= {"steps": STEPS, **split, "objective": "reward", "preference": numbers, **train}
    tree["data"] = {
        "kind": "pairs", "path": str(tmp_path / "pairs.jsonl"), "eval_fraction": 0.3, "tokenizer": "bytes",
        "seq_len": 120,
    }  # fmt: skip
    return tree


def test_a_run_makes_a_reward_model_that_transformers_loads(tmp_path: Path, train: Train) -> None:
    path = write_config(tmp_path / "config.yaml", reward_config(tmp_path))
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "run"
    assert f"next      megatrain export {run_dir} OUT_DIR" in done.stdout
    first = rows(run_dir)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert {"eval_reward_chosen", "eval_reward_margin", "eval_reward_accuracy"} < evaluations[0].keys()
    assert f"  margin {first[0]['reward_margin']:.3g}  accuracy {first[0]['reward_accuracy']:.3g}  norm" in done.stdout

    shutil.rmtree(run_dir / "saves" / "step_4")
    assert train(str(path)).returncode == 0
    assert losses(run_dir) == [row["loss"] for row in first]
    with train.actors():
        alone = cli_here("eval", str(run_dir), "--json")
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout)["eval_loss"] == evaluations[-1]["eval_loss"]

    asked = cli_here("generate", str(run_dir), "Hi")
    assert asked.returncode == 2 and "is a reward model, which scores answers" in asked.stderr
    exported = cli_here("export", str(run_dir), str(tmp_path / "exported"))
    assert "AutoModelForSequenceClassification.from_pretrained" in exported.stdout
    means = mean_scores(AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported"), path)
    assert means == pytest.approx([evaluations[-1][f"eval_reward_{name}"] for name in ("chosen", "rejected")], rel=1e-5)
    as_tokens = cli_here("plan", str(path), f"model.path={tmp_path / 'exported'}", "train.objective=simpo",
                         "train.preference.center_rewards_coefficient=0")  # fmt: skip
    assert as_tokens.returncode == 2 and "model.path: " in as_tokens.stderr
    assert "is a reward model (LlamaForSequenceClassification), which predicts no tokens" in as_tokens.stderr


@torch.no_grad()
def mean_scores(model: Any, path: Path, pad: int | None = None) -> list[float]:
    """Return the mean score of the held-out chosen answers, and of the rejected ones.

    pad: for a batch of all answers; None: one at a time.
    """
    num_ids = model.config.vocab_size
    settings, data = tokenize_all(load_config(path), num_ids, path.parent, Startup())
    assert data.held_out is not None and settings.data.held_out is not None
    (windows,) = open_windows(settings.data.held_out, data.held_out, num_ids, whole=True)
    corpus = windows.corpus
    ids = torch.from_numpy(np.asarray(corpus.tokens, np.int64)).split(corpus.document_lengths.tolist())
    if pad is None:
        scores = [model(input_ids=document[None]).logits.item() for document in ids]
    else:
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
        scores = model(input_ids=batch, attention_mask=(batch != pad).long()).logits.flatten().tolist()
    return [sum(part) / len(part) for part in (scores[::2], scores[1::2])]


def test_an_adapter_has_the_head(tmp_path: Path, train: Train) -> None:
    """The head is trained whole, as modules_to_save of peft, and goes with the adapter and the merged model.

    The tokenizer has a pad that ends no answer, so the merged model scores all answers in one batch.
    """
    tree = reward_config(tmp_path, steps=1) | {"lora": {"match": "q_proj", "rank": 4}, "save_every": 0, "eval_every": 1}
    model = build(build_tiny(tmp_path / "model", tied=True, vocab_size=320), FAMILIES["qwen2.5"])
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": FAMILIES["qwen2.5"].source}
    (model / "tokenizer_config.json").write_text(json.dumps(tokens))
    del tree["data"]["tokenizer"]
    tree["data"]["seq_len"] = 256
    path, out = write_config(tmp_path / "config.yaml", tree), tmp_path / "out"
    alone = cli_here("eval", str(model), "--config", str(path))
    assert alone.returncode == 2 and "is no reward model, so its scores would be random" in alone.stderr
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    for arguments in (("adapter",), ("merged", "--merge")):
        done = cli_here("export", str(tmp_path / "run"), str(out / arguments[0]), *arguments[1:])
        assert done.returncode == 0, done.stderr
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    merged = AutoModelForSequenceClassification.from_pretrained(out / "merged")
    means = mean_scores(merged, path)
    assert mean_scores(adapted, path) == pytest.approx(means, rel=1e-5)
    pad = merged.config.pad_token_id
    assert pad == AutoTokenizer.from_pretrained(out / "merged").pad_token_id is not None
    assert mean_scores(merged, path, pad) == pytest.approx(means, rel=1e-5)
    (*_, last) = (json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines())
    assert means == pytest.approx([last[f"eval_reward_{name}"] for name in ("chosen", "rejected")], rel=1e-5)
    with train.actors():
        alone = cli_here("eval", str(tmp_path / "run"), "--json")
    assert json.loads(alone.stdout)["eval_loss"] == last["eval_loss"]
