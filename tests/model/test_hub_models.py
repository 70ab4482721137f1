"""What is trained of popular models' folders is what Transformers makes of them: ids, chats, the first loss, exports.

The configurations follow those that the models' makers publish (tests/support/hub_models.py).
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.export.export import export_run
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.tokens.token_files import IGNORED
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.chat_fixtures import FAMILIES
from tests.support.hub_models import HUB, TEXTS, VOCAB_SIZE, build_hub_model
from tests.support.in_process import actors_as_threads
from tests.support.runs import cli_here, losses, write_config
from tests.support.texts import tokens_of
from tests.support.tiny import as_tensors

MARKED = "a<|im_end|>b </s>c<s> d<|user|> e"
ANSWER = "It is 4. Yes."
CHAT = [{"role": "user", "content": "Sure? in 12345"}, {"role": "assistant", "content": ANSWER}]
# What Transformers itself, or the run, writes into a configuration: not from the source.
WRITTEN = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "eos_token_id", "pad_token_id", "auto_map"}


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", HUB)
def test_token_ids(tmp_path: Path, name: str) -> None:
    build_hub_model(tmp_path, name)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False), load_tokenizer(str(tmp_path))
    for text in (*TEXTS, MARKED, " leading", "IT'S é"):
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.adds_bos == (theirs("a")["input_ids"][:1] == [theirs.bos_token_id])
    assert ours.end_of_document == theirs.eos_token_id


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", HUB)
def test_a_run_and_its_export(tmp_path: Path, name: str) -> None:
    """The run's learning rate is so small that no bit of a parameter changes."""
    model, run_dir = build_hub_model(tmp_path / "model", name), tmp_path / "run"
    tree = settings(model, tmp_path)
    with actors_as_threads():
        done = cli_here("train", str(write_config(tmp_path / "run.yaml", tree)))
    assert done.returncode == 0, done.stderr
    (batch,) = batches(tree, run_dir)
    assert_the_answer_is_learned(batch, model, HUB[name]["template"])
    theirs = load(model)
    assert losses(run_dir) == [loss(theirs, batch)]
    export_run(run_dir, tmp_path / "export", "fp32")
    ours = load(tmp_path / "export")
    held = dict(ours.state_dict())
    assert held.keys() == theirs.state_dict().keys()
    assert all(torch.equal(held[key], value) for key, value in theirs.state_dict().items())
    folders = model, tmp_path / "export"
    published, exported = (json.loads((folder / "config.json").read_text()) for folder in folders)
    assert published.keys() - WRITTEN <= exported.keys()
    one, other = (AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict() for folder in folders)
    assert from_source(one) == from_source(other)


def from_source(config: Any) -> Any:
    """Return a configuration without what the run or Transformers itself writes."""
    if not isinstance(config, dict):
        return config
    return {key: from_source(value) for key, value in config.items() if key not in WRITTEN}


def settings(model: Path, folder: Path) -> dict[str, Any]:
    (folder / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    data = {"kind": "sft", "path": str(folder / "chats.jsonl"), "seq_len": 200, "packing": False}
    train = {"steps": 1, "batch_size": 1, "lr": 1e-30, "schedule": "constant", "weight_decay": 0.0, "precision": "fp32"}
    log = {"tensorboard": False, "prometheus": False}
    return {
        "model": {"path": str(model)}, "data": data, "train": train, "hardware": {"device": "cpu"}, "log": log,
        "run_dir": str(folder / "run"),
    }  # fmt: skip


def batches(tree: dict[str, Any], run_dir: Path) -> list[Batch]:
    data = DataConfig.model_validate({**tree["data"], "tokenizer": tree["model"]["path"]})
    return [as_tensors(open_stream(data, tokens_of(data, run_dir, VOCAB_SIZE), VOCAB_SIZE, 1).next_batch())]


def assert_the_answer_is_learned(batch: Batch, model: Path, template: str | None) -> None:
    """Compare with the ids of Transformers' own rendering; a folder without a template gets the plain one."""
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    learned = tokenizer.decode(batch.targets[batch.targets != IGNORED])
    if template is None:
        assert ANSWER in learned
        return
    today = f"{datetime.now():%d %b %Y}"  # of which chats are rendered the same every day
    text = tokenizer.apply_chat_template(CHAT, tokenize=False).replace(today, "26 Jul 2024")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert batch.input_ids[0, : len(ids)].tolist() == ids
    ending = tokenizer.eos_token if template == "zephyr" else FAMILIES[template].ending
    assert learned.strip() == FAMILIES[template].content(ANSWER).strip() + ending


def load(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    options: dict[str, Any] = {"attn_implementation": "eager"} if capped else {}
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False, **options)
    except ValueError:  # it is a vision-language model that has no class for text
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **options)


def loss(model: Any, batch: Batch) -> float:
    with torch.no_grad():
        logits = model.train()(input_ids=batch.input_ids, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten()).item()
