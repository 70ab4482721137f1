"""Names from outside change no terminal and forge no line, whichever command prints them."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from pathlib import Path

import pytest

from megatrain_ray.cli import main
from megatrain_ray.console.logs import SafeFormatter
from megatrain_ray.errors import ConfigError
from megatrain_ray.escapes import UNSAFE, escaped
from tests.support.report_runs import make_run
from tests.support.runs import config, write_config

FORGED = "x\x1b[2J\nall is well\r\u202e"
MODEL = {"model_type": FORGED, "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_unsafe_characters_are_written_as_escapes() -> None:
    assert escaped(FORGED) == "x\\x1b[2J\\nall is well\\r\\u202e"
    assert escaped("a\tb é 模 👩‍👩‍👧") == "a\tb é 模 👩‍👩‍👧"
    assert escaped("two\nlines\x9b", keep="\n") == "two\nlines\\u009b"
    assert escaped(os.fsdecode(b"\xff")) == "\\udcff"
    value = {"a": "".join(map(chr, range(0x2070)))}
    assert json.loads(escaped(json.dumps(value, ensure_ascii=False))) == value


def test_a_message_has_the_lines_that_it_was_made_of() -> None:
    error = ConfigError(f"{FORGED}:", "  second")
    assert str(error) == "x\\x1b[2J\\nall is well\\r\\u202e:\n  second"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_log_keeps_the_lines_of_tracebacks_only() -> None:
    try:
        raise ValueError("a\x1bb")
    except ValueError:
        record = logging.LogRecord("name", logging.INFO, "", 1, "%s", (FORGED,), sys.exc_info())
    text = SafeFormatter("%(message)s").format(record)
    assert text.startswith("x\\x1b[2J\\nall is well\\r\\u202e\nTraceback")
    assert text.endswith("\nValueError: a\\x1bb")


def commands(folder: Path) -> list[tuple[str, ...]]:
    """Return one call of each command that prints a forged name, and further ones of commands that print several."""
    run = make_run(folder / FORGED, 3, FORGED)
    (run / f"trace_steps_1_{FORGED}.json").write_text("{}")
    (run / "model.json").write_text(json.dumps({"config": {"model_type": FORGED}}))
    named, data = folder / f"{FORGED}.yaml", folder / f"{FORGED}.jsonl"
    data.write_text(json.dumps({FORGED: 1}) + "\n")
    write_config(named, config(folder / "new", MODEL))
    keys = write_config(folder / "keys.yaml", config(folder / "new", MODEL) | {FORGED: 1, f"{FORGED}2": 2})
    theirs = write_config(folder / "theirs.yaml", {"base_model": "x", FORGED: 1})
    own = write_config(folder / "own.yaml", config(folder / "new", {**MODEL, "model_type": "llama"}))
    return [
        ("inspect", str(run)), ("inspect", str(run), "--config"), ("report", str(run)), ("refit", str(run), FORGED),
        ("export", str(run), str(folder / "out")), ("eval", str(run / FORGED)), ("generate", FORGED, "prompt"),
        ("doctor", FORGED), ("tokenizer", "train", FORGED, "--out", "out", "--vocab-size", "300"),
        ("tokenizer", "train", str(data), "--out", str(folder / "tokenizer"), "--vocab-size", "300"),
        ("convert-config", FORGED), ("convert-config", str(theirs)), ("plan", str(named)), ("plan", str(keys)),
        ("plan", FORGED), ("plan", str(own), f"{FORGED}=1"), ("data", str(own), f"data.path={data}"),
        ("data", str(own), f"data.path='{FORGED}'"), ("train", str(own), f"spill.path=[{FORGED!r}]"), (FORGED,),
        ("bench", str(own), f"train.lr={FORGED!r}"), ("export", "a", "b", "--dtype", FORGED),
    ]  # fmt: skip


def test_no_command_prints_a_forged_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in commands(tmp_path):
        try:
            main(command)
        except SystemExit as refused:  # of argparse
            assert refused.code == 2
        shown = capfd.readouterr()
        lines = (shown.out + shown.err).split("\n")
        assert not [line for line in lines if UNSAFE.search(line) or line.lstrip().startswith("all is well")], command
        assert "\\nall is well" in shown.out + shown.err, command
    page = (tmp_path / FORGED / "report.html").read_text(encoding="utf-8")
    assert not UNSAFE.search(page.replace("\n", ""))
