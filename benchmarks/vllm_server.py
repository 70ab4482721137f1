"""Trains a tiny model by GRPO with a real vLLM as the sampling server, and compares log-probabilities.

    python -m benchmarks.vllm_server OUT.json --vllm PATH [--commit ID] [--model-type llama] [--dtype float32]
        [--tied] [--refusals] [--port 8471] [key=value …]

`--vllm` names vLLM's command, which may be of another environment. The model has random weights and a tokenizer of its
own. Settings go to the training, such as train.rollouts.server.sleeps=true: on a CPU vLLM takes these requests, and
frees nothing.

* With `--refusals` vLLM is first started with what a run must refuse; the messages are in the report.
* Then a run makes 12 updates and samples before every second one. It evaluates held-out prompts at the start and at the
  end. In the third sampling vLLM gets SIGKILL while it completes, and is started again.
* Each sampling's log-probabilities by vLLM are compared with those of the plain Transformers model, by the weights of
  that step's save and, to see that this would show old weights, by those of the sampling before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatrain_ray.machine.environment import commit, hardware, versions

ROOT = Path(__file__).parents[1]
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
UPDATES, EVERY, KILLED_AFTER = 12, 2, 4
LEAST_RUNNING = 32  # completions when vLLM is killed
SEQ_LEN = 192
POLL_S = 0.02
START_S = 300.0
REFUSED: dict[str, tuple[dict[str, str], list[str]]] = {
    "without development mode": ({"VLLM_SERVER_DEV_MODE": "0"}, []),
    "processed log-probabilities": ({}, ["--logprobs-mode", "processed_logprobs"]),
    "a short context": ({}, ["--max-model-len", "64"]),
}


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megatrain_ray", *arguments], check=True)


def write_model(folder: Path, model_type: str, *, tied: bool) -> None:
    """Write a model of random weights with a tokenizer of the shipped text. tied: the head is the embedding."""
    text = ROOT / "examples/data/tinyshakespeare.txt"
    run("tokenizer", "train", str(text), "--out", str(folder), "--vocab-size", "500")
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, eos_token_id=end, bos_token_id=None, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class Server:
    """Runs vLLM in a process group of its own."""

    def __init__(self, command: str, model: Path, dtype: str, port: int, log: Path) -> None:
        self.url = f"http://localhost:{port}"
        self._log = log
        self._arguments = [
            command, "serve", str(model), "--port", str(port), "--generation-config", "vllm", "--dtype", dtype,
            "--enforce-eager", "--max-model-len", str(SEQ_LEN),
            "--no-enable-chunked-prefill",  # vLLM 0.32 on a CPU dies of a part of a prompt whose request has a seed
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> str:
        return " ".join(["vllm serve MODEL", *self._arguments[3:]])

    def start(self, environment: dict[str, str] = {}, options: Sequence[str] = ()) -> float:  # noqa: B006
        """Start it; return after how many seconds it answers."""
        start_s = time.monotonic()
        set_for_all = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._arguments, *options], env=inherited | set_for_all | environment, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=self._log.parent,
            )  # fmt: skip
        while not self._answers("/health"):
            if self._process.poll() is not None or time.monotonic() - start_s > START_S:
                sys.exit(f"vLLM does not start: see the end of its log\n{self._log.read_text()[-3000:]}")
            time.sleep(0.5)
        return time.monotonic() - start_s

    def num_running(self) -> int:
        """Return how many completions it computes, 0 if it does not answer."""
        text = self._answers("/metrics")
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
        return int(float(lines[0].split()[-1])) if lines else 0

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def version(self) -> str:
        return str(json.loads(self._answers("/version"))["version"])

    def _answers(self, path: str) -> str:
        try:
            with urlopen(self.url + path, timeout=5) as answer:
                return answer.read().decode() or "empty"
        except (URLError, OSError):
            return ""


@contextmanager
def training(config: Path, settings: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-m", "megatrain_ray", "train", str(config), *settings]) as process:
        yield process
        if process.wait():
            sys.exit("the training failed")


def write_config(folder: Path, server: Server) -> Path:
    """Write the configuration of the run, whose saves are kept."""
    rollouts = {
        "rewards": [f"{ROOT / 'examples/rewards.py'}:digits"], "group_size": 8, "steps": EVERY, "max_new_tokens": 128,
        "temperature": 1.2, "server": {"url": server.url, "timeout_s": START_S},
    }  # fmt: skip
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {
            "kind": "prompts", "path": str(ROOT / "examples/data/sums.jsonl"), "eval_fraction": 0.1, "seq_len": SEQ_LEN,
        },
        "train": {
            "steps": UPDATES, "batch_size": 64, "lr": 3e-3, "schedule": "constant", "precision": "fp32",
            "objective": "grpo", "rollouts": rollouts,
        },
        "eval_every": UPDATES, "save_every": EVERY, "save_keep": UPDATES, "run_dir": str(folder / "run"),
    }  # fmt: skip
    file = folder / "grpo.yaml"
    file.write_text(json.dumps(tree))  # JSON is YAML
    return file


def refusals(server: Server, config: Path) -> dict[str, str]:
    """Return what `megatrain train` says of servers that lack something."""
    said = {}
    for name, (environment, options) in REFUSED.items():
        server.start(environment, options)
        done = subprocess.run(
            [sys.executable, "-m", "megatrain_ray", "train", str(config)], capture_output=True, text=True, check=False
        )
        print(f"{name}: {done.stderr}", flush=True)
        said[name] = f"exit code {done.returncode}: {done.stderr.strip().splitlines()[-1]}"
        server.kill()
    return said


def killed_while_it_samples(server: Server, run_dir: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill the server in the sampling after KILLED_AFTER updates, start it again, and say what it was at."""
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None:
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if done >= KILLED_AFTER and (running := server.num_running()) >= LEAST_RUNNING:
            server.kill()
            there = (run_dir / "rollouts" / f"step_{KILLED_AFTER}.jsonl").exists()
            return {"after_updates": done, "running": running, "was_sampled": there, "started_s": server.start()}
        time.sleep(POLL_S)
    sys.exit("the training ended before the server could be killed")


def differences(run_dir: Path, folder: Path, dtype: torch.dtype, merge: Sequence[str]) -> list[dict[str, Any]]:
    """Compare the log-probabilities of each sampling with those of plain Transformers models."""
    torch.set_num_threads(1)  # the model is tiny
    found: list[dict[str, Any]] = []
    models = {0: folder / "model"}
    for step in range(EVERY, UPDATES, EVERY):
        models[step] = folder / f"exported_{step}"
        run("export", str(run_dir), str(models[step]), "--step", str(step), *merge)
    for step, path in models.items():
        records = list(map(json.loads, (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()))
        before = models.get(step - EVERY)
        found.append({
            "after_updates": step,
            "answers": len(records),
            "tokens": sum(len(record["logprobs"]) for record in records),
            "ended": sum(record["ended"] for record in records),
            "reward": sum(record["reward"] for record in records) / len(records),
            "largest_difference": largest_difference(path, records, dtype),
            "largest_difference_from_former_weights": largest_difference(before, records, dtype) if before else None,
        })  # fmt: skip
        print(found[-1])
    return found


@torch.no_grad()
def largest_difference(path: Path, records: Sequence[dict[str, Any]], dtype: torch.dtype) -> float:
    """Return the largest difference of a record's log-probabilities to a model's, over all tokens of answers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    largest = 0.0
    for record in records:
        prompt, answer = record["prompt_ids"], torch.tensor(record["completion_ids"])
        logits = model(torch.tensor([[*prompt, *record["completion_ids"]]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        largest = max(largest, float((expected - torch.tensor(record["logprobs"])).abs().max()))
    return largest


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    write_model(folder / "model", options.model_type, tied=options.tied)
    server = Server(options.vllm, folder / "model", options.dtype, options.port, folder / "vllm.log")
    config = write_config(folder, server)
    said = refusals(server, config) if options.refusals else {}
    server.start()
    try:
        vllm = server.version()
        with training(config, options.settings) as process:
            death = killed_while_it_samples(server, folder / "run", process)
    finally:
        server.kill()
    merge = ["--merge"] if any(setting.startswith("lora.") for setting in options.settings) else []
    rows = list(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
    return {
        "commit": options.commit or commit(),
        "hardware": hardware("cpu"),
        "versions": versions() | {"vllm": vllm},
        "server": server.command,
        "model_type": options.model_type,
        "tied": options.tied,
        "settings": options.settings,
        "refused": said,
        "death": death,
        "samplings": differences(folder / "run", folder, getattr(torch, options.dtype), merge),
        "ratio_max": [
            row["ratio_max"] for row in rows
        ],  # of updates; the first of a sampling has the sampler's weights
        "losses": [row["loss"] for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--commit")
    parser.add_argument("--model-type", default="llama")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument("--port", type=int, default=8471)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    folder = Path(tempfile.mkdtemp())
    try:
        report = measure(folder, options)
    finally:
        shutil.rmtree(folder)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
