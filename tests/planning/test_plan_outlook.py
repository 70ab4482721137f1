"""The end of what `megatrain plan` shows: the whole run, and what changes would make of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.cli import main
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import CapacityError
from megatrain_ray.planning import run_spec, what_if
from megatrain_ray.planning.run_spec import planning_problem
from megatrain_ray.planning.what_if import run_lines
from megatrain_ray.units import format_bytes
from tests.support.runs import cli_here, config, write_config

SHAPE = {
    "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 1024,
}  # fmt: skip
LIMITS = "hardware.hbm_limit=4GiB", "hardware.ram_limit=6GiB"


def write(folder: Path) -> Path:
    changes: dict[str, Any] = {
        "hardware__device": "cuda", "hardware__compile": False, "data__path": "/nowhere.txt", "data__seq_len": 1024,
        "train__batch_size": None, "train__micro_batch_size": 4, "train__accumulate": 2, "train__steps": 7200,
        "save_every": 100,
    }  # fmt: skip
    return write_config(folder / "config.yaml", config(folder / "run", SHAPE, **changes))


@pytest.fixture(scope="module", autouse=True)
def planned_once() -> Iterator[None]:
    """Make each plan once: most tests here look at what is printed of the same one."""
    make, made = run_spec.plan_with_compression, dict[object, Plan | CapacityError]()

    def once(structure: object, activations: object, machine: object, request: object) -> Plan:
        key = structure, activations, repr(machine), request
        if key not in made:
            try:
                made[key] = make(structure, activations, machine, request)  # type: ignore[arg-type]
            except CapacityError as error:
                made[key] = error
        answer = made[key]
        if isinstance(answer, CapacityError):
            raise answer
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_spec, "plan_with_compression", once)
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(shown(capsys, *arguments, "--json"))


CHANGES = {
    "as it is": (),
    "twice the RAM, 12.00 GiB": ("hardware.ram_limit=12GiB",),
    "half the RAM, 3.00 GiB": ("hardware.ram_limit=3GiB",),
    "twice the GPU's memory, 8.00 GiB": ("hardware.hbm_limit=8GiB",),
    "half the GPU's memory, 2.00 GiB": ("hardware.hbm_limit=2GiB",),
    "twice the tokens a step, 16384": ("train.accumulate=4",),
    "half the tokens a step, 4096": ("train.accumulate=1",),
    "a disk for spill.path, 3 GB/s": ("spill.path=/nowhere/spill",),
    "train.grad_dtype=bf16": ("train.grad_dtype=bf16",),
}


@pytest.fixture(scope="module")
def shown_plan(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `plan --what-if --json` prints."""
    done = cli_here("plan", str(write(tmp_path_factory.mktemp("plan"))), *LIMITS, "--what-if", "--json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_changes_are_compared_with_the_plan_as_it_is(
    shown_plan: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown_plan["plan"] == planned(capsys, str(path), *LIMITS)
    fit = {row["change"]: row["fits"] for row in shown_plan["what_if"]}
    assert fit.keys() == CHANGES.keys()
    assert not fit["half the RAM, 3.00 GiB"]
    assert all(fit[change] for change in fit if change.startswith(("as", "twice")))


@pytest.mark.spread(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_what_a_plan_with_it_says(
    shown_plan: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    row = next(row for row in shown_plan["what_if"] if row["change"] == change)
    if row["fits"]:
        alone = planned(capsys, str(path), *LIMITS, *CHANGES[change])
        tokens = math.prod(alone["step"][key] for key in ("num_micro_batches", "micro_batch_size", "seq_len"))
        assert row["step_s"] == alone["prediction"]["step_s"]
        assert row["tokens_per_s"] == tokens / alone["prediction"]["step_s"]
    else:
        assert main(["plan", str(path), *LIMITS, *CHANGES[change]]) == 3


def test_the_table_compares_speeds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, str(path), *LIMITS, "--what-if").partition("what if")[2].splitlines()
    assert max(map(len, lines)) <= 80
    assert any("half the RAM" in line and "does not fit" in line for line in lines)
    assert any("twice the GPU" in line and "%" in line for line in lines)


def test_where_nothing_fits_what_would_is_shown_all_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = "hardware.hbm_limit=4GiB", "hardware.ram_limit=4GiB"
    assert main(["plan", str(path), "train.micro_batch_size=1", *limits, "--what-if"]) == 3
    shown = capsys.readouterr()
    assert "of host RAM, 4.00 GiB available" in shown.err
    lines = shown.out.splitlines()
    assert any(line.startswith("as it is") and "does not fit" in line for line in lines)
    assert any(line.startswith("a disk for spill.path") and "bound by" not in line and "." in line for line in lines)


def test_an_odd_number_of_micro_batches_has_no_half(path: Path) -> None:
    question = planning_problem(load_config(path, [*LIMITS, "train.accumulate=3"]).resolve())
    names = [name for name, *_ in what_if._changes(question.machine, question.request)]
    assert [name for name in names if "tokens" in name] == ["twice the tokens a step, 24576"]


def test_the_whole_run_and_its_price(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7200 steps of s seconds are 2 × s hours."""
    found = planned(capsys, str(path), *LIMITS, "--price", "1.5")
    step_s = found["plan"]["prediction"]["step_s"]
    assert found["run"]["seconds"] == 7200 * step_s
    assert found["run"]["cost"] == pytest.approx(3 * step_s)
    assert (found["run"]["spilled_bytes_per_day"], found["run"]["drive_days"]) == (0, None)
    run, saves, stop = shown(capsys, str(path), *LIMITS, "--price", "1.5").splitlines()[-3:]
    assert run.startswith("run       7200 steps, 59.0M tokens in ")
    assert run.endswith(f", {3 * step_s:.2f} at 1.5 an hour")
    assert saves.startswith("saves     one of ")
    assert " every 100 steps: " in saves
    assert " written " in saves
    needed = found["run"]["stop_wait_s"]
    evaluates = load_config(path, ["train.steps=0", "data.eval_path=held.txt", "eval_every=1"])
    of_none = run_lines(evaluates, Plan.from_json(json.dumps(found["plan"])), None)
    assert list(of_none) == ["run       no updates: train.steps: 0 only evaluates"]
    assert stop.startswith(f"stop      up to {needed} s from a signal to the end of the last save, at 3 GB/s: ")
    assert stop.endswith(f"RAY_JOB_STOP_WAIT_TIME_S={needed}")
    without = shown(capsys, str(path), *LIMITS, "save_every=null").splitlines()[-1]
    assert without.startswith("run ")
    assert " an hour" not in without


def test_a_run_of_less_than_a_day_is_told_what_it_writes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = (str(path), *LIMITS, "train.steps=200", "save_mirror=s3://bucket/run")
    whole, saves, stop = shown(capsys, *short).splitlines()[-3:]
    assert whole.endswith(" tokens/s")
    run = planned(capsys, *short, "--price", "1")["run"]
    written = round(run["saved_bytes_per_day"] * run["seconds"] / (24 * 3600))
    rate = f"{format_bytes(int(run['saved_bytes_per_day'] / (24 * 3600)))}/s"
    mirrored = f"save_mirror keeps up if it takes {rate}"
    assert saves.endswith(f" every 100 steps: {format_bytes(written)} written in all; {mirrored}")
    assert stop.endswith(f", and {saves.split()[3]} {saves.split()[4]} more for save_mirror")


def test_a_plan_for_a_card_by_its_name(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name needs no limit. A limit without a name says whose rates were taken."""
    assert main(["plan", str(path), "hardware.profile=a100_40gb", "hardware.device=auto"]) == 0
    named = capsys.readouterr()
    assert re.match(r"fits: GPU [\d.]+ .iB of 39.20 GiB, RAM ", named.out)
    assert "built-in rates, as nobody measured this machine: A100 40 GB SXM, 16 × server core" in named.out
    assert "rates are those of" not in named.err
    assert main(["plan", str(path), "hardware.hbm_limit=24GiB"]) == 0
    limited = capsys.readouterr()
    assert "GeForce RTX 4090" in limited.out
    assert "note: rates are those of the GeForce RTX 4090, by the size of GPU memory; hardware.profile=" in limited.err
    assert main(["plan", str(path), "hardware.profile=rtx4080"]) == 2
    assert "or a card: rtx4090, " in capsys.readouterr().err


def test_what_spills_wears_a_drive(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = "hardware.hbm_limit=4GiB", "hardware.ram_limit=5880MiB"
    short = (*limits, "hardware.hbm_layers=0", "spill.path=/nowhere/spill", "train.steps=1000000")
    plan = planned(capsys, str(path), *short)
    spilled = sum(row["num_bytes"] for row in plan["memory_items"] if row["tier"] == "nvme")
    assert spilled
    of_day = spilled * 24 * 3600 / plan["prediction"]["step_s"]
    *_, saves, _stop, line = shown(capsys, str(path), *short).splitlines()
    assert saves.startswith("saves     one of ")
    assert line == (
        f"spilled   {format_bytes(spilled)} every step: {format_bytes(int(of_day))} written a day; a drive rated for "
        f"1 PB written lasts {1e15 / of_day:.1f} days"
    )
    roomy = shown(capsys, str(path), *LIMITS, "spill.path=/nowhere/spill")
    assert "spilled " not in roomy


@pytest.mark.parametrize("price", ["-1", "inf", "dear"])
def test_a_price_is_a_number(path: Path, price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), f"--price={price}"])
    assert ended.value.code == 2
    assert f"expected a number from 0 on, got '{price}'" in capsys.readouterr().err
