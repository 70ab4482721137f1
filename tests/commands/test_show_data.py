"""`megatrain data`: three records with what is learned marked, and totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.cli import main
from tests.support.runs import config, write_config
from tests.support.tiny import build_tiny


def shown(folder: Path, capsys: pytest.CaptureFixture[str], expected: int = 0, **data: Any) -> str:
    """Return what the command prints of records in `folder`, of which the first file is the training data."""
    tree = config(folder / "run", folder / "model", data__tokenizer="bytes", **data)
    assert main(["data", str(write_config(folder / "config.yaml", tree))]) == expected
    assert not (folder / "run").exists()
    told = capsys.readouterr()
    return told.err if expected else told.out


def write(folder: Path, name: str, *records: dict[str, Any]) -> str:
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = build_tiny(tmp_path / "model", vocab_size=257)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 1500}))
    return tmp_path


def test_chats_are_shown_with_their_answers_marked(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [chat("é?", "4"), chat("\x1b[2J?", "5"), chat("long?", "x" * 2000), {"messages": []}]
    sft = {"data__kind": "sft", "data__seq_len": 1500, "data__path": write(folder, "chats.jsonl", *records)}
    held = write(folder, "held.jsonl", chat("q", "a"))
    assert "chats.jsonl, line 4: messages: expected a list of turns" in shown(folder, capsys, expected=2, **sft)
    assert "data.seq_len: 1501 is more than" in shown(folder, capsys, expected=2, **sft | {"data__seq_len": 1501})
    text = shown(folder, capsys, **sft, data__bad_records="skip", data__eval_path=held)
    first, second, third, totals = text.split("── sequence ")[1:3] + text.split("── sequence ")[3].split("\n\n", 1)
    assert first == (
        "1 of 3: 56 tokens, 2 learned ──\n<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n«4<|endoftext|>»\n\n\n"
    )
    assert "\\x1b[2J?" in second
    assert "\x1b" not in text
    assert "xx»\n[… 901 tokens …]\n«xx" in third
    assert third.endswith("xx»")
    lines = [line.strip() for line in totals.splitlines()]
    assert lines[:2] == ["learned   what stands between « and »", "template  the plain template"]
    assert lines[2] == f"data.path: {sft['data__path']}"
    assert lines[3].startswith("4 records: 3 sequences, 1615 tokens, ")
    assert lines[4].startswith("1 bad, skipped (")
    assert lines[5].startswith("1 too long, cut inside an answer (")
    assert "data.seq_len=2056 would hold the longest record, and the model has 1500 positions: divide it" in lines
    assert "tokens each: 56 to 1501, mean 538" in lines
    assert f"56–63   {'█' * 40} 2" in lines
    assert "2 rows of 1500 inputs, 54% filled" in lines
    assert "an epoch is 2 rows, 0.5 steps of 4 rows" in lines
    assert f"data.eval_path: {held}" in lines
    assert lines[-1] == "1 row of 1500 inputs, 4% filled"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\n\x1b[1;32m4<|endoftext|>\x1b[0m\n" in shown(folder, capsys, **sft, data__bad_records="skip")


def test_weights_of_tokens_and_texts_of_several_sources_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = list(b"abcdef")
    record = {"input_ids": ids, "weights": [1, 0, 0, 1, 1, 0.5]}
    text = shown(folder, capsys, data__kind="tokens", data__path=write(folder, "ids.jsonl", record))
    assert "abc«de»«×0.5 f»" in text
    assert "weights 0.5 to 1, 1 tokens of another weight than 1" in text
    sources = [{"path": write(folder, f"{k}.jsonl", {"text": f"text {k} " * 9}), "weight": 1} for k in range(2)]
    text = shown(folder, capsys, data__path=[*sources, sources[0]], data__packing=False)
    assert f"── text 1 of 1 of data.path[1], {sources[1]['path']}: 64 tokens ──\ntext 1 text 1 " in text
    assert text.count("1 text, 64 tokens") == 3
    assert "«" not in text


def test_of_a_stream_the_first_portion_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(folder, f"{k}.jsonl", {"text": "text" * 100}) for k in range(4)]
    stream = {"data__stream": "100KB", "data__stream_portion": 900}
    text = shown(folder, capsys, data__path=paths, data__shuffle=False, **stream)
    assert "stream    of each source the portion is shown that a run begins with: 0.5 of all files\n" in text
    assert "2 texts, 800 tokens" in text
    assert "an epoch is about 48 rows, 12 steps of 4 rows" in text


def test_labels_are_counted_and_prompts_leave_room_for_an_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = [{"prompt": f"Q{k}", "completion": "A", "label": k < 3} for k in range(4)]
    labels = write(folder, "l.jsonl", *labelled)
    unpaired = {"data__kind": "unpaired", "train__objective": "kto", "data__seq_len": 64}
    assert "\n  3 answers are labelled good, 1 bad\n" in shown(folder, capsys, **unpaired, data__path=labels)
    prompts = {"data__kind": "prompts", "data__path": write(folder, "p.jsonl", {"prompt": "x" * 20})}
    sampled = {"rewards": ["format"], "group_size": 2, "max_new_tokens": 16}
    text = shown(folder, capsys, **prompts, train__objective="grpo", train__rollouts=sampled, data__seq_len=32)
    assert "data.seq_len=86 would hold the longest record with an answer, and training refuses longer ones" in text
    assert text.endswith("an epoch is 2 answers, 0.5 steps of 4 answers\n")
