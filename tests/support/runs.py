"""Makes runs as a user starts them, and checks what they must equal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatrain_ray.cli import main
from megatrain_ray.config.train_groups import LABELLED
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from tests.support.kto_losses import Kto
from tests.support.pair_losses import Preference
from tests.support.reference import MuonRecipe, Own, Recipe, Result, train_reference
from tests.support.teacher import Distil
from tests.support.tiny import TEXT, text_batches

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def config(run_dir: Path, model: Path | Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a configuration of ten steps of 4 × 32 bytes.

    There are four micro-batches unless `changes` say otherwise: what plans choose would depend on rates.

    changes: values by dotted keys, with __ for dots.
    """
    tree: dict[str, Any] = {
        "model": {"path": str(model)} if isinstance(model, Path) else {"config": dict(model)},
        "data": {"path": str(TEXT), "tokenizer": "bytes", "seq_len": 32},
        "train": {"steps": 10, "batch_size": 4, "lr": 1e-3, "precision": "fp32"},
        "hardware": {"device": "cpu"},
        "run_dir": str(run_dir),
    }
    for key, value in changes.items():
        *groups, name = key.split("__")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    if not {"train__batch_size", "train__micro_batch_size", "train__accumulate"} & changes.keys():
        tree["train"] |= {"micro_batch_size": 1, "accumulate": 4}
    return tree


def write_config(path: Path, tree: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(tree)))
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megatrain_ray", *arguments]


def cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in a process of its own."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        env={**os.environ, **environment},
    )


def cli_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process, which saves the seconds of its imports.

    A command that trains needs the fixture ray_address, and runs on its cluster.
    """
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())


def rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")  # the last line may be cut off
    return [json.loads(line) for line in whole.splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(run_dir)]


def plan_of(run_dir: Path) -> Plan:
    return Plan.from_json((run_dir / "plan.json").read_text())


def reference_of(run_dir: Path, tree: Mapping[str, Any], batches: Iterable[Batch] | None = None) -> Result:
    """Train the reference under the run's settings. `batches`: those of the run; None: of the shipped text."""
    plan, train = plan_of(run_dir), tree["train"]
    if batches is None:
        batches = text_batches(
            train["steps"], plan.step.micro_batch_size * plan.step.num_micro_batches, plan.step.seq_len
        )
    return train_reference(Path(tree["model"]["path"]), batches, recipe_of(run_dir, tree))


def recipe_of(run_dir: Path, tree: Mapping[str, Any]) -> Recipe:
    """Return the run's settings as a recipe, with the threads and loss chunks of its plan."""
    plan, train = plan_of(run_dir), tree["train"]
    kto = Kto(train["objective"], **train["preference"]) if train.get("objective") in LABELLED else None
    return Recipe(
        steps=train["steps"],
        lr=train["lr"],
        schedule=train.get("schedule", "cosine"),
        trainable=tuple(train.get("trainable", ())),
        freeze=tuple(train.get("freeze", ())),
        groups=tuple(_own(group) for group in train.get("groups", ())),
        muon=MuonRecipe(**train.get("muon", {})) if train.get("optimizer") == "muon" else None,
        adapter=Path(tree["lora"]["path"]) if tree.get("lora") else None,
        clip=train.get("clip", 1.0),
        preference=Preference(train["objective"], **train["preference"]) if "preference" in train and not kto else None,
        kto=kto,
        distil=_distil(**train["distillation"]) if "distillation" in train else None,
        seed=train.get("seed", 0),
        precision=train["precision"],
        compute=train.get("compute"),
        moments=train.get("moments", "fp32"),
        grad_dtype=train.get("grad_dtype", "fp32"),
        micro_batch_size=plan.step.micro_batch_size,
        loss_chunk_tokens=plan.compute.loss_chunk_tokens,
        num_threads=plan.compute.num_threads,
    )


def _distil(teacher: str, top_k: int = 64, **numbers: float) -> Distil:
    return Distil(**numbers)


def _own(group: Mapping[str, Any]) -> Own:
    muon = group["optimizer"] == "muon" if "optimizer" in group else None
    return Own(**{key: value for key, value in group.items() if key != "optimizer"}, muon=muon)


def exported_masters(run_dir: Path, out: Path) -> dict[str, Tensor]:
    """Export the newest save with `megatrain export`, and return its FP32 masters by name, each 1-D."""
    done = cli_here("export", str(run_dir), str(out), "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    folder = WeightFolder.open(out)
    return {name: folder.read(name, 0, torch.Size(folder.shape(name)).numel()) for name in folder.names}


def assert_equals_reference(
    run_dir: Path, tree: Mapping[str, Any], out: Path, batches: Iterable[Batch] | None = None
) -> None:
    """Assert that losses, norms, rates and final masters have the reference's bits. `batches`: as for reference_of."""
    theirs = reference_of(run_dir, tree, batches)
    assert losses(run_dir) == theirs.losses
    assert [row["grad_norm"] for row in rows(run_dir)] == theirs.grad_norms
    assert [row["lr"] for row in rows(run_dir)] == theirs.learning_rates
    ours = exported_masters(run_dir, out)
    for name, master in theirs.masters.items():
        assert torch.equal(ours[name], master.flatten()), name


def assert_same_masters(run_dir: Path, other: Path, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Assert that the newest saves of two runs have the same masters: bit-equal, unless more is allowed."""
    ours, theirs = (exported_masters(path, path.with_name(f"{path.name}_masters")) for path in (run_dir, other))
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
