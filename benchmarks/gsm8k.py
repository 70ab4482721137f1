"""Trains a 137M-parameter model on GSM8K from random weights, byte by byte; exports it, and answers.

    python -m benchmarks.gsm8k OUT_FOLDER COMMIT memorise [TRAIN.jsonl] [key=value …]
    python -m benchmarks.gsm8k OUT_FOLDER COMMIT held_out TRAIN.jsonl HELD_OUT.jsonl [key=value …]

memorise: trains on the first 100 problems (of examples/gsm8k unless a file is named), exports, and answers the 100
    questions greedily. It counts the answers that ended by themselves, those that are the same to the last character,
    and the final numbers that are the same.
held_out: trains on one file and evaluates on the other, from before the first step on.

Everything goes through the CLI. Writes OUT_FOLDER/gsm8k_PART.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.scratch import fresh
from benchmarks.vertical_slice import ROOT, machine, train
from tests.support.runs import cli

CONFIG = ROOT / "examples" / "gsm8k" / "config.yaml"
SHIPPED = ROOT / "examples" / "gsm8k" / "train_400.jsonl"
RUNS = ROOT / "runs"
NUM_PROBLEMS = 100
SHAPE = {
    "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 14, "num_attention_heads": 14,
    "num_key_value_heads": 14,
}  # fmt: skip
SETTINGS = ["train.micro_batch_size=16", "train.precision=bf16", "train.lr=5e-4", "save_every=0"]


def settings(data: Path, *more: str) -> list[str]:
    shape = [f"model.config.{key}={value}" for key, value in SHAPE.items()]
    return [*shape, f"data.path={data}", *SETTINGS, *more]


def chats(path: Path, data: Path, num: int | None = None) -> list[tuple[str, str]]:
    """Return the first `num` problems of a file as pairs of question and answer, and write them as chats.

    path: JSON lines, each with question and answer as in the original, or with messages.
    data: file that the chats are written to.
    num: None takes all problems.
    """
    pairs = []
    with path.open(encoding="utf-8") as file:
        for record in map(json.loads, islice(file, num)):
            question, answer = (m["content"] for m in record["messages"]) if "messages" in record else record.values()
            pairs.append((question, answer))
    with data.open("w", encoding="utf-8") as file:
        for question, answer in pairs:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return pairs


def memorise(overrides: Sequence[str]) -> dict[str, Any]:
    files = [Path(text) for text in overrides if "=" not in text]
    data, run_dir = RUNS / "gsm8k_100.jsonl", fresh(RUNS / "gsm8k_memorise")
    exported = run_dir.with_name("exported")
    chosen = chats(files[0] if files else SHIPPED, data, NUM_PROBLEMS)
    rest = [text for text in overrides if "=" in text]
    run = train(CONFIG, run_dir, *settings(data, "train.steps=500", "train.warmup_steps=50", *rest))
    start_s = time.monotonic()
    done = cli("export", str(run_dir), str(exported))
    assert done.returncode == 0, done.stderr
    answered = answers_of(exported, data)
    pairs = [(row["answer"], answer) for row, (_, answer) in zip(answered, chosen, strict=True)]
    return {
        "ended": sum(row["ended"] for row in answered),
        "same_text": sum(answer == expected for answer, expected in pairs),
        "same_number": sum(number_of(answer) == number_of(expected) for answer, expected in pairs),
        "of": len(pairs),
        "train_wall_s": run["wall_s"],
        "export_and_answer_wall_s": time.monotonic() - start_s,
        "first_loss": run["rows"][0]["loss"],
        "last_loss": run["rows"][-1]["loss"],
        "wrong": [pair for pair in pairs if pair[0] != pair[1]][:5],
        "raw": run,
    }


def answers_of(folder: Path, chats: Path) -> list[dict[str, Any]]:
    """Return the chats with the greedy answers of the exported model to their questions."""
    done = cli("generate", str(folder), "--chat", "--prompts", str(chats), "--temperature=0", "--max-new-tokens=1024",
               "--batch-size=50")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def number_of(answer: str) -> str:
    return answer.rpartition("####")[2].strip()


def held_out(overrides: Sequence[str]) -> dict[str, Any]:
    data, other, run_dir = RUNS / "gsm8k_train.jsonl", RUNS / "gsm8k_other.jsonl", fresh(RUNS / "gsm8k_held_out")
    chats(Path(overrides[0]), data)
    chats(Path(overrides[1]), other)
    evaluation = [f"data.eval_path={other}", "eval_every=50"]
    steps = ["train.steps=600", "train.warmup_steps=50"]
    run = train(CONFIG, run_dir, *settings(data, *steps, *evaluation, *overrides[2:]))
    return {"wall_s": run["wall_s"], "raw": run}


def main() -> None:
    out, part, overrides = Path(sys.argv[1]), sys.argv[3], sys.argv[4:]
    out.mkdir(parents=True, exist_ok=True)
    RUNS.mkdir(exist_ok=True)
    report = {
        "machine": machine(),
        "arguments": overrides,
        part: {"memorise": memorise, "held_out": held_out}[part](overrides),
    }
    (out / f"gsm8k_{part}.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report[part].items() if key != "raw"}))


if __name__ == "__main__":
    main()
