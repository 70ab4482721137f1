"""A plan, its run and its next plan, as a user has them: wrong rates are warned of, shown, refitted; limits change."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_ray.accounting.prediction_check import Comparison
from megatrain_ray.engine.device.hardware_profile import TYPICAL_CPU, HardwareProfile
from megatrain_ray.report.measured_starts import compare_starts
from megatrain_ray.run.run_files import RunFiles
from tests.support.in_process import Train
from tests.support.runs import assert_equals_reference, cli_here, config, plan_of, write_config
from tests.support.tiny import VOCAB_SIZE

LIMIT, LOWER, TOO_LOW = "1GB", "160MB", "100MB"


def far_too_fast() -> HardwareProfile:
    """Return a profile in which all but updates is far too fast, and updates are far too slow."""
    faster = tuple(replace(point, per_s=1e15) for point in TYPICAL_CPU.matmul["fp32"])
    updates = {"adamw_per_s": 1e7, "adamw_busy_per_s": 1e7}
    return replace(TYPICAL_CPU, matmul={"fp32": faster}, device_bytes_per_s=1e15, launch_s=0.0, **updates)


def settings(folder: Path) -> Mapping[str, Any]:
    """Return settings with steps that no machine makes in less than about 50 ms."""
    shape = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    (folder / "wrong.json").write_text(far_too_fast().to_json())
    return config(
        folder / "run", folder / "model", train__steps=10, data__seq_len=256, train__batch_size=8,
        train__micro_batch_size=8, train__schedule="constant", hardware__hbm_limit=LIMIT,
        hardware__profile=str(folder / "wrong.json"),
    )  # fmt: skip


def test_wrong_rates_are_refitted_and_a_lower_limit_is_planned_for(tmp_path: Path, train: Train) -> None:
    tree = settings(tmp_path)
    path, run_dir = str(write_config(tmp_path / "config.yaml", tree)), tmp_path / "run"
    done = train(path, "train.steps=5")
    assert done.returncode == 0, done.stderr
    assert "warning: predicted " in done.stderr and "; most of it in compute: " in done.stderr
    text = (run_dir / "plan.json").read_bytes()
    sha256, before = hashlib.sha256(text).hexdigest(), plan_of(run_dir)
    (found,) = compare_starts(RunFiles(run_dir))
    assert (found.first_step, found.last_step, found.plan_sha256) == (1, 5, sha256)
    log = (run_dir / "logs" / "driver.log").read_text()
    assert log.index(f"plan.json has the SHA-256 {sha256}") < log.index("step 1  ")
    assert before.prediction and before.prediction.profile == far_too_fast()
    assert_shown(run_dir, sha256, has_processes=train.has_processes)

    right = f"hardware.profile={tmp_path / 'right.json'}"
    assert_refitted(path, run_dir, found, right)

    # Exit 3 changes nothing of the run.
    refused = train(path, right, f"hardware.hbm_limit={TOO_LOW}")
    assert refused.returncode == 3
    assert re.search(r"needs \S+ \S+ of device memory, 95\.37 MiB available", refused.stderr)
    assert (run_dir / "plan.json").read_bytes() == text
    assert not (run_dir / "plans").exists()

    # The steps of another plan are those of plain PyTorch.
    done = train(path, right, f"hardware.hbm_limit={LOWER}")
    assert done.returncode == 0, done.stderr
    assert "the plan is another one than that of the start before: device memory 953.67 MiB → 152.59 MiB" in done.stderr
    assert (run_dir / "plans" / f"{sha256[:12]}.json").read_bytes() == text
    first, second = compare_starts(RunFiles(run_dir))
    assert first == found
    assert (second.first_step, second.last_step, second.plan_sha256) == (6, 10, plan_of(run_dir).sha256)
    assert_equals_reference(run_dir, tree, tmp_path / "out")


def assert_shown(run_dir: Path, sha256: str, *, has_processes: bool) -> None:
    shown = cli_here("inspect", str(run_dir)).stdout
    assert f"plan and measurement\n  steps 1 to 5, by the plan {sha256[:12]}\n" in shown
    memory = ("host memory",) if has_processes else ()  # else that of the tests
    for term in ("step", "compute", "shards at work", *memory):
        assert re.search(rf"^  {term} +\S+ \S+ +\S+ \S+  (\d+% too (much|little)|as measured)$", shown, re.MULTILINE), (
            term
        )


def assert_refitted(path: str, run_dir: Path, found: Comparison, right: str) -> None:
    done = cli_here("refit", str(run_dir), right.partition("=")[2])
    assert done.returncode == 0, done.stderr
    assert "AdamW         0.01 → " in done.stdout
    planned = json.loads(cli_here("plan", path, right, "--json").stdout)["prediction"]["step_s"]
    unpredicted = sum(term.measured for term in found.terms if term.name in ("data", "python"))
    assert 0.9 < planned / (found.step.measured - unpredicted) < 1.1
