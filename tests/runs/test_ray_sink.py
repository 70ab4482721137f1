"""Series of a run, scraped from Ray's metrics agent as Prometheus would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.metrics import ray_sink
from megatrain_ray.metrics.ray_sink import RaySink
from megatrain_ray.metrics.sink import DeathRecorder, MetricSinks
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.run.run_history import History
from tests.support.planned_steps import PROFILE, planned
from tests.support.runs import cli_here, config, plan_of, rows, write_config
from tests.support.scraping import await_series

SHAPE = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_run_can_be_scraped(tmp_path: Path, ray_address: str) -> None:
    folder = tmp_path / "scraped run"
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("A few words that are held out. " * 10)
    tree = config(folder, SHAPE, train__steps=5, data__eval_path=str(held_out), eval_every=5, save_every=None)
    done = cli_here("train", str(write_config(tmp_path / "config.yaml", tree)))
    assert done.returncode == 0, done.stderr
    made, last = rows(folder), rows(folder)[-1]
    (*_, evaluated) = RunFiles(folder).evaluations()
    waited_s = {cause: sum(row["exposed_s"][cause] for row in made) for cause in last["exposed_s"]}
    expected = {
        "ray_megatrain_loss": last["loss"],
        "ray_megatrain_eval_loss": evaluated["eval_loss"],
        "ray_megatrain_grad_norm": last["grad_norm"],
        "ray_megatrain_learning_rate": last["lr"],
        "ray_megatrain_tokens_per_second": 0.0,  # it has ended
        "ray_megatrain_model_tflops": 0.0,
        "ray_megatrain_step": 5,
        "ray_megatrain_planned_steps": 5,
        "ray_megatrain_steps_total": 5,
        "ray_megatrain_step_seconds_count": 5,
        "ray_megatrain_training_seconds_total": sum(row["step_s"] for row in made),
        "ray_megatrain_tier_bytes,tier=hbm": last["hbm_peak_bytes"],
        "ray_megatrain_tier_bytes,tier=host": last["host_bytes"],
        "ray_megatrain_planned_tier_bytes,tier=host": plan_of(folder).total_bytes(Tier.HOST),
        **{f"ray_megatrain_exposed_seconds_total,cause={cause}": s for cause, s in waited_s.items() if s},
    }
    await_series(expected, run="scraped run")


class Now:
    """A clock that stands still until a test moves it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture(scope="module", autouse=True)
def faulty(tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> tuple[MetricSinks, Plan]:
    """Write what a run with deaths and a disk writes, before another run: series can be scraped some seconds later."""
    plan, tmp_path = planned(PROFILE, spilled=True), tmp_path_factory.mktemp("faulty")
    sinks = MetricSinks({"Ray's metrics": RaySink("faulty", 9, plan)})
    faults = DeathRecorder(History(tmp_path), sinks, lambda: 1)
    faults.died("optimizer shard 0")
    faults.replaced("optimizer shard 0", 1.0)
    faults.died("GPU worker")
    for read, written in ((100, 10), (50, 20), (5, 6)):
        of_gpu = {"weights_read": 7, "activations_read": 1, "activations_written": 0}
        moved = {"shards_read": read, "shards_written": written, **of_gpu}
        sinks.write({"step": 1, "step_s": 1.0, "disk_bytes": moved, "spill_bytes": 4097})
    return sinks, plan


def test_faults_and_the_disk_can_be_scraped(faulty: tuple[MetricSinks, Plan]) -> None:
    sinks, plan = faulty
    expected = {
        "ray_megatrain_deaths_total,kind=optimizer shard": 1,
        "ray_megatrain_deaths_total,kind=GPU worker": 1,
        "ray_megatrain_replacements_total,kind=optimizer shard": 1,
        "ray_megatrain_disk_read_bytes_total,kind=optimizer shard": 155,
        "ray_megatrain_disk_written_bytes_total,kind=optimizer shard": 36,
        "ray_megatrain_disk_read_bytes_total,kind=GPU worker": 24,
        "ray_megatrain_tier_bytes,tier=nvme": 4097,
        "ray_megatrain_planned_tier_bytes,tier=nvme": plan.total_bytes(Tier.NVME),
    }
    series = await_series(expected, sinks.keep, run="faulty")
    for unheard in ("ray_megatrain_replacements_total", "ray_megatrain_disk_written_bytes_total"):
        assert series.value(unheard, run="faulty", kind="GPU worker") is None


class Gauge:
    """Ray's, which forgets what is not said again."""

    told: ClassVar[list[tuple[str, float, Mapping[str, str] | None]]] = []

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
        self.name = name

    def set_default_tags(self, tags: Mapping[str, str]) -> None:
        pass

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        self.told.append((self.name, value, tags))


def test_gauges_are_said_again_while_a_step_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_sink, "Gauge", Gauge)
    clock = Now()
    sink = RaySink("slow", 9, None, clock)
    sink.write(0, {"eval_loss": 2.5})
    sink.write(0, {"spill_bytes": 7})
    first = sorted(Gauge.told, key=str)
    Gauge.told.clear()
    sink.keep()
    assert Gauge.told == []
    clock.seconds += ray_sink.KEEP_S
    sink.keep()
    sink.keep()
    assert sorted(Gauge.told, key=str) == first
    assert ("megatrain_eval_loss", 2.5, {}) in first
    assert ("megatrain_tier_bytes", 7, {"tier": "nvme"}) in first


@pytest.mark.long
def test_without_the_switch_nothing_is_recorded(tmp_path: Path, ray_address: str) -> None:
    tree = config(tmp_path / "unrecorded", SHAPE, train__steps=1, save_every=None, log__prometheus=False)
    assert cli_here("train", str(write_config(tmp_path / "config.yaml", tree))).returncode == 0
    RaySink("recorded later", 1, None)
    series = await_series({"ray_megatrain_planned_steps": 1}, run="recorded later")
    assert series.value("ray_megatrain_step", run="unrecorded") is None
