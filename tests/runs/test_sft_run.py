"""Runs on chats through the command line and real actors, and what is refused before one is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from megatrain_ray.cli import main
from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.in_process import Train
from tests.support.runs import ROOT, assert_equals_reference, cli_here, config, losses, rows, write_config
from tests.support.texts import tokens_of
from tests.support.tiny import as_tensors, build_tiny

GSM8K = ROOT / "examples" / "gsm8k"
FAMILY = FAMILIES["qwen2.5"]
VOCAB_SIZE = 320
Tree = dict[str, Any]


def settings(folder: Path, **changes: Any) -> Tree:
    """Return settings of a tiny model and tokenizer on the shipped problems."""
    model = build_tiny(folder / "model", vocab_size=VOCAB_SIZE)
    tree = config(folder / "runs" / "run", model, **changes)
    tree["data"] = {
        "kind": "sft",
        "path": str(GSM8K / "train_400.jsonl"),
        "tokenizer": str(build(folder / "tokenizer", FAMILY)),
        "seq_len": 250,
        "packing": False,
    }
    return tree


def batches_of(tree: Tree, run_dir: Path) -> list[Batch]:
    data, train = DataConfig.model_validate(tree["data"]), tree["train"]
    stream = open_stream(data, tokens_of(data, run_dir, VOCAB_SIZE), VOCAB_SIZE, train["batch_size"])
    return [as_tensors(stream.next_batch()) for _ in range(train["steps"])]


def assert_answers_are_learned(tree: Tree, batches: list[Batch]) -> None:
    """Assert that the answer and the end mark of each row are supervised, or the beginning if the row is too short."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{tree['data']['tokenizer']}/tokenizer.json")
    lines = (GSM8K / "train_400.jsonl").read_text().splitlines()
    problems = {m[0]["content"]: m[1]["content"] for m in (json.loads(line)["messages"] for line in lines)}
    for batch in batches:
        assert batch.num_supervised == int((batch.targets != IGNORED).sum()) > 0
        for ids, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            question = text.partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            learned = tokenizer.decode([t for t in targets if t != IGNORED], skip_special_tokens=False)
            answer = problems[question] + FAMILY.ending
            is_cut = answer.startswith(learned) and learned != "" and targets[-1] != IGNORED
            assert learned == answer or is_cut


def test_a_run_on_chats_equals_the_reference_and_goes_on_where_it_was_saved(tmp_path: Path, train: Train) -> None:
    tree = settings(tmp_path, train__steps=4, train__batch_size=3, save_every=2, save_keep=9)
    run_dir = Path(tree["run_dir"])
    path = write_config(tmp_path / "config.yaml", tree)
    first = train(str(path))
    assert first.returncode == 0, first.stderr
    assert "\n400 records: " in first.stderr
    assert f"\ntemplate  of {tmp_path}/tokenizer\n" in first.stderr
    assert "warning: this template" not in first.stderr
    assert "too long, cut inside an answer" in first.stderr
    whole = losses(run_dir)
    shutil.rmtree(run_dir / "saves" / "step_4")
    second = train(str(path))
    assert second.returncode == 0, second.stderr
    assert "in the cache: 400 records: " in second.stderr
    assert losses(run_dir) == whole

    batches = batches_of(tree, run_dir)
    assert [row["tokens"] for row in rows(run_dir)] == [batch.num_supervised for batch in batches]
    assert_answers_are_learned(tree, batches)
    assert_equals_reference(run_dir, tree, tmp_path / "export", batches)
    exported = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert exported["chat_template"] == FAMILY.source
    assert not (tmp_path / "export" / "chat_template.jinja").exists()


def test_a_run_on_chats_side_by_side_equals_the_reference(tmp_path: Path, train: Train) -> None:
    """Answers have weights of 0, 0.5 and 1 in the loss."""
    tree = settings(tmp_path, train__steps=3, train__batch_size=2)
    chats = [
        {"prompt": "a" * n, "completion": [{"role": "assistant", "content": "b" * n, "weight": n % 3 / 2}]}
        for n in range(5, 30)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tree["data"] |= {"path": str(tmp_path / "chats.jsonl"), "packing": True}
    done = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    run_dir = Path(tree["run_dir"])
    batches = batches_of(tree, run_dir)
    assert all(batch.positions is not None and batch.loss_weights is not None for batch in batches)
    assert {0.5, 1.0} <= {weight for batch in batches for weight in batch.loss_weights.flatten().tolist()}
    assert_equals_reference(run_dir, tree, tmp_path / "export", batches)


@pytest.mark.parametrize("tokenizer", ["its own", "bytes"])
def test_an_exported_model_stops_after_its_answer(tmp_path: Path, train: Train, tokenizer: str) -> None:
    """Also where the answer's end is not the tokenizer's eos token, and the model's configuration names neither."""
    question, answer = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is 4. Yes."}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    tree = settings(tmp_path, train__steps=40, train__lr=3e-3, train__batch_size=1, save_every=0)
    tree["data"] |= {"path": str(tmp_path / "chats.jsonl"), "seq_len": 80}
    file = tmp_path / "tokenizer" / "tokenizer_config.json"
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    if tokenizer == "bytes":
        tree["data"]["tokenizer"] = tokenizer
    done = train(str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    assert "warning: this template" not in done.stderr
    done = cli_here("export", tree["run_dir"], str(tmp_path / "export"))
    expected = ["<|endoftext|>"] if tokenizer == "bytes" else ["<|im_end|>", "<|endoftext|>"]
    assert f"generation stops at {', '.join(expected)}\n" in done.stdout
    generate = transformers.pipeline("text-generation", str(tmp_path / "export"))
    [found] = generate([question], max_new_tokens=100, do_sample=False)
    assert found["generated_text"][-1] == answer
    done = cli_here("generate", tree["run_dir"], "What?", "--chat")
    assert (done.returncode, done.stdout) == (0, f"{answer['content']}\n")
    assert not list(Path(tree["run_dir"]).glob(".export-*"))
    of_export = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    ids = tokenizers.Tokenizer.from_file(str(tmp_path / "export" / "tokenizer.json")).token_to_id
    ends = [ids(name) for name in expected]
    assert of_export["eos_token_id"] == (ends[0] if len(ends) == 1 else ends)
    assert of_export["pad_token_id"] == ids("<|endoftext|>")
    if tokenizer == "bytes":
        assert_an_export_of_an_earlier_release_has_its_template(tree, tmp_path / "old", [question, answer])


def assert_an_export_of_an_earlier_release_has_its_template(tree: Tree, out: Path, chat: list[Any]) -> None:
    """Its run knew no data.add_eos, and answers of bytes ended with ordinary text."""
    file = Path(tree["run_dir"]) / "config.yaml"
    written = file.read_text()
    assert "  add_eos: true\n" in written
    file.write_text(written.replace("  add_eos: true\n", ""))
    assert cli_here("export", tree["run_dir"], str(out)).returncode == 0
    text = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(chat, tokenize=False)
    assert text.endswith("Yes.<|im_end|>\n")


def line(file: Path, record: Any) -> str:
    file.write_text(json.dumps(record) + "\n")
    return str(file)


TURNS = [{"role": "user", "content": "q"}, {"role": "robot", "content": "a"}]

# name: (what is done to the settings, what the message says)
CASES: dict[str, tuple[Callable[[Path, Tree], None], str]] = {
    "unknown role": (
        lambda f, t: t["data"].update(path=line(f / "a.jsonl", {"messages": TURNS})),
        "a.jsonl, line 1: turn 2: unknown role 'robot'; expected one of system, developer, user, assistant, tool. Fix "
        "the record, or set data.bad_records: skip",
    ),
    "a key of the other kind": (
        lambda f, t: t["data"].update(text_field="body"),
        "data.text_field: goes with data.kind: pretrain, and data.kind is sft; leave the key out",
    ),
    "a key of chats for texts": (
        lambda f, t: t["data"].update(kind="pretrain", truncation="drop"),
        "data.truncation: goes with data.kind: sft or tokens or pairs or unpaired or rollouts, and data.kind is "
        "pretrain; leave the key out",
    ),
    "no template there": (
        lambda f, t: t["data"].update(chat_template=str(f / "gone.jinja")),
        "data.chat_template: no such file",
    ),
    "no data set there": (
        lambda f, t: t["data"].update(dataset="one"),
        "data.dataset goes with one dataset_info.json and nothing else",
    ),
    "nothing to learn": (
        lambda f, t: t["data"].update(path=line(f / "a.jsonl", {"messages": TURNS[:1]})),
        "data.path: nothing to learn\n1 record: 0 sequences",
    ),
    "variables of the renderer's own": (
        lambda f, t: t["data"].update(chat_template_args={"tools": []}),
        "data.chat_template_args: tools is what the program gives a template itself; expected a variable of",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(tmp_path: Path, train: Train, name: str) -> None:
    spoil, message = CASES[name]
    tree = settings(tmp_path)
    spoil(tmp_path, tree)
    path = write_config(tmp_path / "config.yaml", tree)
    done = train(str(path))
    assert done.returncode == 2
    shown = done.stderr
    assert message in shown
    assert sum(line.startswith("error: ") for line in shown.splitlines()) == 1
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"


def test_the_example_can_be_planned(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["plan", str(GSM8K / "config.yaml")]) == 0
    assert "loss" in capsys.readouterr().out
