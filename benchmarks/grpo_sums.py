"""Teaches a model sums by GRPO: first by chats whose answers are mostly wrong, then by rewards for right ones.

    python -m benchmarks.grpo_sums OUT.json [--commit ID] [--chat-steps 300] [--updates 200] [key=value …]

The model has 0.54 billion parameters and random weights, and answers byte by byte. Chats ask for the sum of two digits;
one answer in ten is right, the others are drawn from all sums. So the model learns to answer with some sum, and that
the right one is a little likelier. Then the embedded sampler answers, and an answer's reward is 1 if it is right.
Settings go to both trainings. The report has the rows of metrics, with rewards and tokens a second.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.machine.environment import commit, hardware, versions

MODEL = {
    "model_type": "qwen2", "vocab_size": 320, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 36,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
RIGHT = 0.1  # share of right answers among the chats
NUM_CHATS = 8000


def write_records(folder: Path) -> None:
    """Write chats.jsonl and prompts.jsonl."""
    drawn = random.Random(0)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    with (folder / "prompts.jsonl").open("w") as file:
        for a, b in pairs * 4:
            file.write(json.dumps({"prompt": f"{a} + {b} = ?", "answer": str(a + b)}) + "\n")
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(NUM_CHATS):
            a, b = drawn.choice(pairs)
            answer = a + b if drawn.random() < RIGHT else sum(drawn.choice(pairs))
            turns = [{"role": "user", "content": f"{a} + {b} = ?"}, {"role": "assistant", "content": str(answer)}]
            file.write(json.dumps({"messages": turns}) + "\n")


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megatrain_ray", *arguments], check=True)


def train(name: str, folder: Path, config: dict[str, Any], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Train by the command line; return the rows of metrics."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(config | {"run_dir": str(folder / name)}))  # JSON is YAML
    run("train", str(file), *settings)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def chats(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {"config": MODEL},
        "data": {"kind": "sft", "path": str(folder / "chats.jsonl"), "tokenizer": "bytes", "seq_len": 1024},
        "eval_every": 0,
        "train": {"steps": steps, "batch_size": 8, "lr": 1e-4, "warmup_steps": 20, "precision": "bf16"},
    }  # fmt: skip


def rewards(folder: Path, updates: int) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model")},
        "data": {"kind": "prompts", "path": str(folder / "prompts.jsonl"), "tokenizer": "bytes", "seq_len": 96},
        "train": {
            "steps": updates, "batch_size": 256, "lr": 2.5e-5, "schedule": "linear", "precision": "bf16",
            "objective": "grpo",
            "rollouts": {"rewards": ["exact"], "group_size": 16, "steps": 2, "max_new_tokens": 8},
        },
        "save_every": None,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--chat-steps", type=int, default=300)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_records(folder)
        start_s = time.monotonic()
        train("chats", folder, chats(folder, options.chat_steps), options.settings)
        run("export", str(folder / "chats"), str(folder / "model"))
        chats_s = time.monotonic() - start_s
        rows = train("grpo", folder, rewards(folder, options.updates), options.settings)
        grpo_s = time.monotonic() - start_s - chats_s
    report = {
        "commit": options.commit or commit(),
        "hardware": hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions(),
        "chats_s": chats_s,  # both with their start
        "grpo_s": grpo_s,
        "rows": rows,  # of metrics.jsonl
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    rewards_seen = [row["reward"] for row in rows if "reward" in row]
    print(f"reward {rewards_seen[0]:.3f} at first, {rewards_seen[-1]:.3f} at last; {grpo_s:.0f} s of GRPO")
    return 0


if __name__ == "__main__":
    sys.exit(main())
