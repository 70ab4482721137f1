"""Trains on GSM8K, exports, and answers: a 137M-parameter model of bytes with random weights, or a published model.

    python -m benchmarks.gsm8k OUT_FOLDER COMMIT memorise [TRAIN.jsonl] [key=value …]
    python -m benchmarks.gsm8k OUT_FOLDER COMMIT held_out TRAIN.jsonl HELD_OUT.jsonl [key=value …]
    python -m benchmarks.gsm8k OUT_FOLDER COMMIT published TRAIN.jsonl HELD_OUT.jsonl MODEL [key=value …] [--option …]

memorise: trains on the first 100 problems (of examples/gsm8k unless a file is named), exports, and answers the 100
    questions greedily. It counts the answers that ended by themselves, those that are the same to the last character,
    and the final numbers that are the same.
held_out: trains on one file and evaluates on the other, from before the first step on.
published: fine-tunes a model folder on one file, and answers the questions of the other: greedily, and once more with
    the options of `megatrain generate`, if any are given.

Everything goes through the CLI. Writes OUT_FOLDER/gsm8k_PART.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.scratch import fresh
from benchmarks.vertical_slice import ROOT, machine, train

CONFIG = ROOT / "examples" / "gsm8k" / "config.yaml"
SHIPPED = ROOT / "examples" / "gsm8k" / "train_400.jsonl"
RUNS = ROOT / "runs"
NUM_PROBLEMS = 100
SHAPE = {
    "hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 14, "num_attention_heads": 14,
    "num_key_value_heads": 14,
}  # fmt: skip
SETTINGS = ["train.micro_batch_size=16", "train.precision=bf16", "train.lr=5e-4", "save_every=0"]
BATCH_SIZE = 660  # half of the test part: a token takes Transformers about as long for 600 prompts as for 100
# Three epochs of the 7,473 training problems in rows of 512 tokens.
PUBLISHED = [
    "data.seq_len=512", "train.epochs=3", "train.steps=null", "train.batch_size=16", "train.micro_batch_size=null",
    "train.lr=1e-4", "train.warmup_steps=20", "train.weight_decay=0.01", "train.precision=bf16", "eval_every=100",
]  # fmt: skip


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
    return {**_export_and_answer(run_dir, exported, data, chosen), **_losses(run)}


def _export_and_answer(run_dir: Path, exported: Path, data: Path, chosen: Sequence[tuple[str, str]]) -> dict[str, Any]:
    start_s = time.monotonic()
    _megatrain("export", str(run_dir), str(exported))
    return {**answers_of(exported, data, chosen), "export_and_answer_wall_s": time.monotonic() - start_s}


def _losses(run: Mapping[str, Any]) -> dict[str, Any]:
    rows = run["rows"]
    return {"train_wall_s": run["wall_s"], "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"], "raw": run}


def answers_of(folder: Path, data: Path, chosen: Sequence[tuple[str, str]], *options: str) -> dict[str, Any]:
    """Return how many answers of a model, greedy ones by default, ended by themselves and were right.

    data: file with the chats.
    chosen: their questions and answers.
    options: of `megatrain generate`.
    """
    defaults = ("--temperature=0", "--max-new-tokens=512", f"--batch-size={BATCH_SIZE}")
    printed = _megatrain("generate", str(folder), "--chat", "--prompts", str(data), *defaults, *options)
    answered = [json.loads(line) for line in printed.splitlines()]
    pairs = [(row["answer"], answer) for row, (_, answer) in zip(answered, chosen, strict=True)]
    return {
        "ended": sum(row["ended"] for row in answered),
        "same_text": sum(answer == expected for answer, expected in pairs),
        "same_number": sum(number_of(answer) == number_of(expected) for answer, expected in pairs),
        "of": len(pairs),
        "wrong": [pair for pair in pairs if pair[0] != pair[1]][:5],
    }


def _megatrain(*arguments: str) -> str:
    command = [sys.executable, "-m", "megatrain_ray", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


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


def published(arguments: Sequence[str]) -> dict[str, Any]:
    data, other, run_dir = RUNS / "gsm8k_train.jsonl", RUNS / "gsm8k_other.jsonl", fresh(RUNS / "gsm8k_published")
    chats(Path(arguments[0]), data)
    questions = chats(Path(arguments[1]), other)
    model, options = arguments[2], [text for text in arguments[3:] if text.startswith("--")]
    overrides = [text for text in arguments[3:] if text not in options]
    run = train(
        CONFIG, run_dir, "model.config=null", f"model.path={model}", "data.tokenizer=null", f"data.path={data}",
        f"data.eval_path={other}", *PUBLISHED, *overrides,
    )  # fmt: skip
    if run["exit"]:
        sys.exit(run["stderr"])
    exported = run_dir.with_name("exported")
    answers = _export_and_answer(run_dir, exported, other, questions)
    if options:
        answers[" ".join(options)] = answers_of(exported, other, questions, *options)
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    return {**answers, "evaluations": evaluations, **_losses(run)}


def main() -> None:
    out, part, overrides = Path(sys.argv[1]), sys.argv[3], sys.argv[4:]
    out.mkdir(parents=True, exist_ok=True)
    RUNS.mkdir(exist_ok=True)
    report = {
        "machine": machine(),
        "arguments": overrides,
        part: {"memorise": memorise, "held_out": held_out, "published": published}[part](overrides),
    }
    (out / f"gsm8k_{part}.json").write_text(json.dumps(report, indent=1))
    print(json.dumps({key: value for key, value in report[part].items() if key != "raw"}))


if __name__ == "__main__":
    main()
