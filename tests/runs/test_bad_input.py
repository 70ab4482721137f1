"""Bad input through the command line: the right exit code, one message that names it, nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.cli import main
from megatrain_ray.crew.ray_daemons import Daemons
from tests.support.runs import cli, config, write_config
from tests.support.tiny import build_tiny

Tree = dict[str, Any]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


SHAPE = {"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}

# name: (what is done to the model folder or the settings, exit code, what the message says)
CASES: dict[str, tuple[Callable[[Path, Tree], None], int, str]] = {
    "unknown key": (lambda f, t: t["train"].update(stepz=3), 2, "train.stepz: unknown key; did you mean train.steps?"),
    "wrong type": (lambda f, t: t["train"].update(steps="ten"), 2, "train.steps: expected an integer, got"),
    "missing data": (lambda f, t: t["data"].update(path="/nowhere.txt"), 2, "no such file: /nowhere.txt"),
    "missing model": (lambda f, t: t["model"].update(path="/nowhere"), 2, "model.path: /nowhere is no folder"),
    "missing model, as it was written": (
        lambda f, t: t["model"].update(path="./my/model"),
        2,
        "model.path: ./my/model is no folder",
    ),
    "no config.json": (lambda f, t: (f / "config.json").unlink(), 2, "config.json"),
    "broken config.json": (lambda f, t: (f / "config.json").write_text("{"), 2, "config.json is not valid JSON"),
    "typo in the model": (
        lambda f, t: t.update(model={"config": SHAPE | {"num_hidden_layer": 9}}),
        2,
        "no num_hidden_layer; did you mean num_hidden_layers?",
    ),
    "impossible model": (
        lambda f, t: t.update(model={"config": SHAPE | {"hidden_size": 63}}),
        2,
        "builds no llama model",
    ),
    "other model": (
        lambda f, t: t.update(model={"config": {"model_type": "t5"}}),
        2,
        "a t5 model cannot be trained: it is an encoder-decoder",
    ),
    "shape of another model": (
        lambda f, t: t.update(model={"config": SHAPE | {"model_type": "mistral"}}),
        2,
        "MistralForCausalLM cannot be traced: its forward on ids failed with",
    ),
    "truncated weights": (lambda f, t: truncate(f / "model.safetensors"), 2, "model.safetensors is damaged"),
    "empty data": (lambda f, t: t["data"].update(path=write(f / "empty.txt", "")), 2, "nothing to learn in"),
    "bad JSON": (
        lambda f, t: t["data"].update(path=write(f / "a.jsonl", '{"text": "x"}\n{"text"\n')),
        2,
        "a.jsonl, line 2: not valid JSON: Expecting ':' delimiter at column 8. Fix the record, or",
    ),
    "a file cut short": (
        lambda f, t: t["data"].update(path=write(f / "a.parquet", "PAR1"), bad_records="skip"),
        2,
        "it may be cut short or damaged: copy the file again",
    ),
    "no tracker": (lambda f, t: t.update(log={"mlflow": "x"}), 2, "log.mlflow: the package mlflow is not installed"),
    "no template": (
        lambda f, t: t["data"].update(kind="sft", path=write(f / "a.jsonl", "{}"), chat_template="/nowhere.jinja"),
        2,
        "data.chat_template: ",
    ),
    "no known format": (lambda f, t: t["data"].update(path=write(f / "a.xml", "x")), 2, "a.xml is of no known format"),
    "documents to pack": (
        lambda f, t: t.update(
            model={"config": {"model_type": "bloom", "vocab_size": 320, "hidden_size": 64, "n_layer": 1, "n_head": 4}},
            data=t["data"] | {"path": write(f / "a.jsonl", '{"text": "x"}\n{"text": "y"}\n')},
        ),
        2,
        "this model does not keep the documents of a row apart: tokens see those of the one before; set data.packing",
    ),
    "too long": (lambda f, t: t["data"].update(seq_len=1000), 2, "data.seq_len: 1000 is more than the model's 256"),
    "id beyond the vocabulary": (
        lambda f, t: t.update(model={"config": SHAPE | {"vocab_size": 64}}),
        2,
        "but the model's vocab_size is 64",
    ),
    "little RAM": (lambda f, t: t["hardware"].update(ram_limit="1MiB"), 3, "of host RAM, 1.00 MiB available: raise"),
    "little HBM": (lambda f, t: t["hardware"].update(hbm_limit="64KiB"), 3, "of device memory, 64.00 KiB available"),
}


def test_a_plan_for_a_gpu_needs_neither_that_nor_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = config(tmp_path / "run", SHAPE, hardware__device="cuda", data__path="/nowhere.txt")
    path = write_config(tmp_path / "config.yaml", tree | {"data": tree["data"] | {"eval_path": "/held_out.txt"}})
    for options in ((), ("--json",)):
        assert main(["plan", str(path), "hardware.hbm_limit=24GiB", *options]) == 0
        shown = capsys.readouterr()
        assert "CUDA context" in shown.out
        here = f"(relative paths start at {Path.cwd()}); a plan does without data, training does not"
        assert [line for line in shown.err.splitlines() if not line.startswith("note: rates are those of the ")] == [
            f"note: data.path: no such file: /nowhere.txt {here}",
            f"note: data.eval_path: no such file: /held_out.txt {here}",
        ]
    assert not (tmp_path / "run").exists()


def check_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    spoil, code, message = CASES[name]
    folder = build_tiny(tmp_path / "model")
    tree = config(tmp_path / "runs" / "run", folder)
    spoil(folder, tree)
    path = write_config(tmp_path / "config.yaml", tree)
    capsys.readouterr()
    assert main(["train", str(path)]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert sum(line.startswith("error: ") for line in shown.splitlines()) == 1
    assert "Traceback" not in shown
    assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"


# What needs the model itself is told later: it is read while Ray starts.
AFTER_RAY = {
    "typo in the model", "impossible model", "other model", "shape of another model", "truncated weights",
    "documents to pack", "little RAM", "little HBM",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Nothing that is refused needs the processes that a start brings up meanwhile."""
    started = []

    @contextmanager
    def no_processes(*_: object) -> Iterator[tuple[Daemons, None]]:
        started.append(name)
        yield Daemons(), None

    monkeypatch.setattr("megatrain_ray.training_run.ray_processes", no_processes)
    monkeypatch.setattr("megatrain_ray.metrics.sinks.find_spec", lambda package: None)
    check_refusal(tmp_path, capsys, name)
    assert bool(started) == (name in AFTER_RAY)


def test_python_without_docstrings_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-OO", "-m", "megatrain_ray", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: python -OO removes docstrings, and Transformers reads them; start Python with -O at most\n"
    )


def test_bad_input_beside_a_cluster(tmp_path: Path, ray_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_refusal(tmp_path, capsys, "bad JSON")


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config.yaml", config(tmp_path / "run", build_tiny(tmp_path / "model")))
    done = cli("train", str(path), RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "error: cannot connect to the Ray cluster 127.0.0.1:1: Connection refused; start it, correct RAY_ADDRESS, or "
        "unset it for a cluster of the run's own"
    )
