"""Runs that answer their own prompts: they learn what is rewarded, and a resume in mid-sampling changes no digit."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.kill_campaign.cases import BACKWARD, DRIVER, GPU
from benchmarks.kill_campaign.phases import by_folder, by_title
from megatrain_ray.io.saves.save_folder import list_saves
from tests.support import fault_injection
from tests.support.in_process import Train
from tests.support.reference import load_model
from tests.support.runs import assert_same_masters, cli, cli_here, config, losses, rows, write_config
from tests.support.tiny import build_tiny

STEPS, EVERY, GROUP, KEPT, HELD_OUT = 14, 2, 8, 3, 1  # two GPUs share one prompt
REWARDS = """
def share_of_e(prompts, completions, answer, completion_ids, **columns):
    assert all(prompt == f"say {right}" for prompt, right in zip(prompts, answer))
    assert all(len(ids) >= len(text.encode("ascii", "ignore")) for ids, text in zip(completion_ids, completions))
    return [text.count("e") / max(1, len(text)) for text in completions]

calls = []

def fails(completions, **columns):
    calls.append(completions)
    return [1 / (2 - len(calls))] * len(completions)
"""


OWN_REWARD = """
from pathlib import Path
from subprocess import CompletedProcess

def share_of_e(completions, **columns):
    at_work = Path(__file__).parent / "rewarding" / "now"
    at_work.touch()
    sum(range(3_000_000))  # long enough to be met
    at_work.unlink(missing_ok=True)
    return [text.count("e") / max(1, len(text)) for text in completions]
"""


def prepare(tmp_path: Path, name: str, **changes: Any) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    prompts = [{"prompt": f"say {'xyz'[n % 3]}", "answer": "xyz"[n % 3]} for n in range(6)]
    for file, records in (("prompts", prompts), ("held_out", prompts[:HELD_OUT])):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = config(tmp_path / name, build_tiny(tmp_path / "model"), save_every=0, eval_every=7, save_best=True)
    tree["data"] = {
        "kind": "prompts", "path": str(tmp_path / "prompts.jsonl"), "eval_path": str(tmp_path / "held_out.jsonl"),
        "tokenizer": "bytes", "seq_len": 132,
    }  # fmt: skip
    tree["train"] = {
        "steps": STEPS, "batch_size": 2 * GROUP, "micro_batch_size": GROUP, "accumulate": 2, "lr": 0.02,
        "schedule": "constant", "precision": "fp32", "objective": "grpo",
        "policy": {"beta": 0.01, "correction": "token_truncate"},
        "rollouts": {
            "rewards": [f"{tmp_path / 'rewards.py'}:share_of_e", "exact"], "reward_weights": [1.0, 0.5],
            "group_size": GROUP, "steps": EVERY, "max_new_tokens": 8, "keep": KEPT,
        },
    }  # fmt: skip
    for key, value in changes.items():
        tree["train"]["rollouts"][key] = value
    return write_config(tmp_path / f"{name}.yaml", tree)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def evaluations_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the rows by step, without what took how long."""
    found = {row["step"]: row for row in read(run_dir / "evaluations.jsonl")}
    return {step: {key: value for key, value in row.items() if key != "eval_s"} for step, row in found.items()}


def evaluated(train: Train, run_dir: Path, step: int) -> set[tuple[str, Any]]:
    """Return the items of what `megatrain eval` prints of a save."""
    with train.actors():
        done = cli_here("eval", str(run_dir), "--step", str(step), "--json")
    assert done.returncode == 0, done.stderr
    return {*json.loads(done.stdout).items()}


def assert_logprobs(model: Path, records: list[dict[str, Any]], *, is_first: bool) -> None:
    """Check that the reference's are plain Transformers', and those before the updates about the sampler's."""
    plain = load_model(model, torch.float32).eval()
    for record in records:
        prompt, answer = record["prompt_ids"], record["completion_ids"]
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)[range(len(answer)), answer].tolist()
        assert record["reference_logprobs"] == pytest.approx(logprobs, abs=2e-5)
        assert record["old_logprobs"] == pytest.approx(record["logprobs"], abs=2e-5)
        assert (record["old_logprobs"] == record["reference_logprobs"]) == is_first


class Whole(NamedTuple):
    """Holds a run without an interruption, and the folder of its files."""

    folder: Path
    done: CompletedProcess[str]

    @property
    def run_dir(self) -> Path:
        return self.folder / "whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Whole:
    folder = tmp_path_factory.mktemp("rollouts")
    done = train(str(prepare(folder, "whole")))
    assert done.returncode == 0, done.stderr
    return Whole(folder, done)


def test_a_plan_says_what_samplings_take(tmp_path: Path) -> None:
    planned = cli_here("plan", str(prepare(tmp_path, "run"))).stdout
    # Of an answer 132 tokens × 2 × 3 layers × 2 heads × 16 values × 4 B, and 257 logits; of the reference a block.
    assert re.search(
        "sampling  32 answers at once, 3.16 MiB for cache and logits; predicted 0.00.* for 32 answers of 8 tokens "
        rf"every {EVERY} steps\nreference 184.00 KiB of RAM and as much .*; predicted \S+ s of computing each time",
        planned,
    )


def test_a_run_learns_what_is_rewarded(whole: Whole, train: Train) -> None:
    found = rows(whole.run_dir)
    assert found[0]["rollouts"]["reward"] < 0.1 < 0.5 < found[-1]["rollouts"]["reward"]
    assert found[0]["rollouts"] == found[1]["rollouts"] != found[2]["rollouts"]
    assert found[0]["ratio_max"] == pytest.approx(1, abs=1e-3), "the first update has the sampler's probabilities"
    assert found[0]["kl"] == 0.0 < found[1]["kl"] < found[-1]["kl"], "the reference is the model before any update"
    assert whole.done.stdout.count("sampled tokens/s") == STEPS // EVERY
    assert f"{HELD_OUT} record held out" in whole.done.stderr
    evaluations = evaluations_of(whole.run_dir)
    assert [*evaluations] == [0, 7, STEPS]
    for row in evaluations.values():
        assert row["eval_reward"] == -row["eval_loss"] == row["eval_reward/share_of_e"] + 0.5 * row["eval_reward/exact"]
    assert evaluations[0]["eval_reward"] < 0.1 and evaluations[STEPS]["eval_reward"] > 0.5
    best = max((7, STEPS), key=lambda step: evaluations[step]["eval_reward"])
    assert f"after step {best}" in cli_here("inspect", str(whole.run_dir)).stdout
    assert evaluations[7].items() - evaluated(train, whole.run_dir, 7) == {("epoch", evaluations[7]["epoch"])}


def test_rollouts_are_kept_as_long_as_a_save_may_need_them(whole: Whole) -> None:
    folder = whole.run_dir / "rollouts"
    files = sorted(folder.glob("*.jsonl"))
    kept = {"step_6", "step_8", "step_10", "step_12"}  # the save of step 7 learns from the oldest next
    assert {file.stem for file in files} == kept
    assert {file.name for file in folder.iterdir()} == {*(f.name for f in files), *(f.stem for f in files)}
    records = read(folder / "step_12.jsonl")
    assert [record["group"] for record in records] == [group for group in range(2 * EVERY) for _ in range(GROUP)]
    for record in records:
        assert record["reward"] == pytest.approx(record["rewards"]["share_of_e"] + 0.5 * record["rewards"]["exact"])
        assert len(record["logprobs"]) == len(record["completion_ids"]) <= 8
        assert record["ended"] == (record["completion_ids"][-1] == 256)
    assert rows(whole.run_dir)[-1]["rollouts"]["reward"] == pytest.approx(
        sum(r["reward"] for r in records) / len(records)
    )


def test_a_run_is_resumed_in_mid_sampling(whole: Whole, train: Train) -> None:
    """Two GPUs sample the same answers, and the reference may be a save of another run."""
    folder, evaluations = whole.folder, evaluations_of(whole.run_dir)
    parts = prepare(folder, "parts")
    begun = folder / "begun"
    for steps, run_dir in ((5, begun), (STEPS, folder / "parts")):  # both starts learn from the rollouts after step 4
        if steps == STEPS:  # a copy goes on, whose rollouts are other files than those that were tokenised
            (begun / "rollouts" / "step_6.jsonl").write_text("{}")
            shutil.copytree(begun, run_dir)
        part = train(str(parts), f"run_dir={run_dir}", f"train.steps={steps}", f"train.rollouts.timeout_s={steps}")
        assert part.returncode == 0, part.stderr
    for first in (0, 4):
        assert_logprobs(folder / "model", read(begun / "rollouts" / f"step_{first}.jsonl"), is_first=not first)
    assert losses(folder / "parts") == losses(whole.run_dir)
    assert_same_masters(folder / "parts", whole.run_dir)
    assert evaluations.items() <= evaluations_of(folder / "parts").items()
    for name in ("step_8.jsonl", "step_12.jsonl"):
        assert (folder / "parts" / "rollouts" / name).read_text() == (whole.run_dir / "rollouts" / name).read_text()
    two = ("train.steps=1", "hardware.num_gpus=2", "train.accumulate=1", f"train.reference={folder / 'whole'}")
    done = train(str(parts), f"run_dir={folder / 'two'}", *two)
    assert done.returncode == 0, done.stderr
    assert rows(folder / "two")[0]["kl"] > 0.1, "the reference is the save of another run"
    for own, alone in zip(*(read(path / "rollouts" / "step_0.jsonl") for path in (folder / "two", begun)), strict=True):
        assert (own["completion_ids"], own["ended"]) == (alone["completion_ids"], alone["ended"])
        for key in ("logprobs", "old_logprobs"):
            assert own[key] == pytest.approx(alone[key], abs=1e-5)
    assert evaluations_of(folder / "two")[0] == evaluations[0]


def test_what_is_wrong_is_told_before_a_process_starts(tmp_path: Path) -> None:
    own = str(tmp_path / "rewards.py")
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rewards": [f"{own}:absent"]}, "rewards.0: " + own + " has no function absent"),
        ({"max_new_tokens": 80}, "the prompt of record 1 has 55 tokens (6 prompts too long), and data.seq_len"),
        ({"rewards": ["length"]}, "train.rollouts.rewards: expected exact, math, format, {regex: PATTERN}"),
        ({"group_size": 3}, "train.batch_size: 16 answers are no whole groups of train.rollouts.group_size: 3"),
    )
    for changes, message in cases:
        path = str(prepare(tmp_path, "bad", reward_weights=None, **changes))
        for command in ("train", "plan")[: 1 if "max_new_tokens" in changes else 2]:  # a plan reads no data
            done = cli_here(command, path)
            assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    build_tiny(tmp_path / "other", tied=True)
    for name, message in (("other", "other has tie_word_embeddings: True, and the"), ("absent", "absent is no folder")):
        beside = ("train.policy.beta=0.1", f"train.reference={tmp_path / name}")
        for command in ("plan", "train"):
            done = cli_here(command, str(prepare(tmp_path, "bad")), *beside)
            assert done.returncode == 2 and f"train.reference: {tmp_path}" in done.stderr and message in done.stderr
            assert "starting" not in done.stderr and not (tmp_path / "bad").exists()


def test_what_was_trained_before_a_reward_function_failed_is_saved(tmp_path: Path, train: Train) -> None:
    path = prepare(tmp_path, "failing", reward_weights=None, rewards=[f"{tmp_path / 'rewards.py'}:fails"])
    done = train(str(path), "eval_every=0", "save_best=false")
    assert done.returncode == 1
    assert "reward function fails failed: ZeroDivisionError: division by zero (" in done.stderr
    assert done.stderr.rstrip().endswith(f"saved at step {EVERY}; the same command resumes")
    assert list_saves(tmp_path / "failing" / "saves") == [EVERY]
    assert [file.name for file in (tmp_path / "failing" / "rollouts").glob("*.jsonl")] == ["step_0.jsonl"]


SAMPLING = by_title("sampling", "GpuActor.sample", GPU, early=False)
SCORING = by_title("scoring", "GpuActor.score", GPU, early=False)


@pytest.mark.long
@pytest.mark.ray
def test_processes_that_die_change_no_digit(tmp_path: Path) -> None:
    """The GPU worker dies while it samples and scores and in a backward, the driver in a sampling and in rewards."""
    (tmp_path / "rewarding").mkdir()
    rewarding = replace(by_folder("rewarding", tmp_path / "rewarding", bool), early=False)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(9)))
    (tmp_path / "rewards.py").write_text(OWN_REWARD)
    tree, _ = fault_injection.prepare(tmp_path, save_every=3, max_failures=4)
    tree["data"] = {"kind": "prompts", "path": str(tmp_path / "prompts.jsonl"), "tokenizer": "bytes", "seq_len": 64}
    tree["train"] |= {
        "steps": 24, "batch_size": 8, "micro_batch_size": 4, "accumulate": 2, "objective": "grpo",
        "policy": {"beta": 0.01, "correction": "token_truncate"},
        "rollouts": {
            "rewards": [f"{tmp_path / 'rewards.py'}:share_of_e"], "group_size": 4, "steps": 2, "max_new_tokens": 8,
        },
    }  # fmt: skip
    calm, path = tmp_path / "calm", write_config(tmp_path / "config.yaml", tree)
    assert cli("train", str(path), f"run_dir={calm}").returncode == 0
    with fault_injection.training(tmp_path, path) as run:
        for phase in (SAMPLING, SCORING, BACKWARD):
            fault_injection.kill(run, phase, GPU)
        fault_injection.kill(run, SAMPLING, DRIVER)
        assert run.text().count("GPU worker died and was replaced") == 3
    (tmp_path / "rewarding" / "now").unlink(missing_ok=True)  # of the run that was killed
    with fault_injection.training(tmp_path, path) as run:
        fault_injection.kill(run, rewarding, DRIVER)
    again = cli("train", str(path))
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "run") == losses(calm)
    assert [row["rollouts"]["reward"] for row in rows(tmp_path / "run")] == [
        row["rollouts"]["reward"] for row in rows(calm)
    ]
    assert_same_masters(tmp_path / "run", calm)
