"""Saves of whole runs: made while training goes on, damaged, without room. Through the command line."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatrain_ray.io.checkpoints.safetensors_folder import SINGLE_NAME
from tests.support.in_process import Train
from tests.support.runs import config, exported_masters, losses, rows, write_config
from tests.support.tiny import build_tiny

# 5M parameters, 60 MB of state: writing it takes longer than a step.
MODEL = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
STEPS = 12


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    base = {"train__steps": STEPS, "train__schedule": "constant", "train__precision": "bf16", "save_every": 3}
    return config(run_dir, MODEL, **{**base, "save_keep": 9, "hardware__num_shards": 2, **changes})


def numbers(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(run_dir)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    """Return the folder of a whole run with four saves, and its export. Tests copy it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write_config(folder / "config.yaml", settings(folder / "run"))
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    exported_masters(folder / "run", folder / "fp32")
    return folder


def copy_of(undisturbed: Path, folder: Path, *, saves: set[int]) -> Path:
    """Make a run directory as `undisturbed` left it, with only these saves; return its configuration file beside it."""
    shutil.copytree(undisturbed / "run", folder / "run")
    for save in (folder / "run" / "saves").iterdir():
        if int(save.name.removeprefix("step_")) not in saves:
            shutil.rmtree(save)
    return write_config(folder / "config.yaml", settings(folder / "run"))


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))


def assert_is_undisturbed(folder: Path, undisturbed: Path) -> None:
    """Assert that the run in `folder` went on as the undisturbed one had, to the last bit."""
    assert numbers(folder / "run") == numbers(undisturbed / "run")
    ours, theirs = exported_masters(folder / "run", folder / "ours"), load_file(undisturbed / "fp32" / SINGLE_NAME)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].flatten()) for name in theirs)


def test_a_save_made_under_training_is_one_generation(tmp_path: Path, train: Train, undisturbed: Path) -> None:
    """What follows from it is what followed when it was made. Of the save of step 6: the damaged one's test."""
    path = copy_of(undisturbed, tmp_path, saves={3})
    done = train(str(path), "save_compress=zstd")
    assert done.returncode == 0, done.stderr
    assert_is_undisturbed(tmp_path, undisturbed)


def test_the_log_tells_what_a_save_cost(undisturbed: Path) -> None:
    log = (undisturbed / "run" / "logs" / "driver.log").read_text()
    for step in (3, 6, 9, 12):
        assert f"saved step {step}: SaveTiming(predicted_stall_s=" in log


@pytest.mark.spread(1)
@pytest.mark.parametrize("damaged", ["part_1.residual", "manifest.json"])  # every kind: test_save_faults.py
def test_a_damaged_save_costs_the_steps_since_the_one_before(
    tmp_path: Path, train: Train, undisturbed: Path, damaged: str
) -> None:
    path = copy_of(undisturbed, tmp_path, saves={6, 9})
    flip_a_byte(tmp_path / "run" / "saves" / "step_9" / damaged)
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "warning" in line and "predicted" not in line]
    assert damaged in warning
    assert "kept as step_9.damaged, training goes on from the save of step 6" in warning
    assert_is_undisturbed(tmp_path, undisturbed)
    assert (tmp_path / "run" / "saves" / "step_9.damaged" / damaged).exists()


def test_the_only_save_damaged_is_an_error_that_loses_nothing(tmp_path: Path, train: Train, undisturbed: Path) -> None:
    path = copy_of(undisturbed, tmp_path, saves={9})
    flip_a_byte(tmp_path / "run" / "saves" / "step_9" / "part_1.m")
    done = train(str(path))
    assert done.returncode == 1
    assert "part_1.m is damaged" in done.stderr
    assert "there is no earlier save to go back to" in done.stderr
    assert (tmp_path / "run" / "saves" / "step_9" / "manifest.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_no_room_before_the_first_step(small_disk: Path, tmp_path: Path, train: Train) -> None:
    path = write_config(tmp_path / "config.yaml", settings(small_disk / "run"))
    done = train(str(path))
    assert done.returncode == 3, done.stderr
    assert "error: no room for 4 saves in" in done.stderr
    assert rows(small_disk / "run") == []


def fill_after_three_steps(disk: Path) -> None:
    deadline_s = time.monotonic() + 120
    while len(rows(disk / "run")) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)  # for the run, not for the test: any step will do
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass


def test_a_disk_that_fills_up_costs_the_steps_since_the_last_save(
    small_disk: Path, tmp_path: Path, train: Train
) -> None:
    """Somebody else takes the room while the run goes on; without them the same command resumes."""
    model = build_tiny(tmp_path / "model")
    tree = config(small_disk / "run", model, train__steps=2000, train__schedule="constant", save_every=1, save_keep=1)
    path = write_config(tmp_path / "config.yaml", tree)
    taker = threading.Thread(target=fill_after_three_steps, args=[small_disk])
    taker.start()
    done = train(str(path))
    taker.join()
    errors = done.stderr
    assert done.returncode == 1, errors
    message = [line for line in errors.splitlines() if line.startswith("error: ")]
    # Met by the check before a save, by a blob, a manifest or a row of metrics.
    assert len(message) == 1 and ("no room" in message[0] or "No space left" in message[0]), errors
    (small_disk / "filler").unlink()
    before = losses(small_disk / "run")
    done = train(str(path), f"train.steps={len(before)}")
    assert done.returncode == 0, done.stderr
    assert losses(small_disk / "run") == before
