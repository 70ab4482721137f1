"""The step calls its hooks at fixed points, each point for all hooks in the order of the list."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.gradients.gradient_offloader import OffloadGradient
from megatrain_ray.engine.gradients.interfaces import LayerForward, StepHooks
from megatrain_ray.engine.measure.resident_model import ResidentModel
from megatrain_ray.engine.model.chunked_loss import Objective
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.engine.plan.activation_moves import Stop
from megatrain_ray.engine.plan.schedule import Visit
from tests.support.recipes import step_input
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.tiny import build_tiny, tiny_batches


class Recording(StepHooks):
    def __init__(self, name: str, events: list[tuple[str, str, object]]) -> None:
        self.name = name
        self.events = events

    def begin_step(self, visits: Sequence[Visit]) -> None:
        self.events.append((self.name, "begin_step", len(visits)))

    def before_visit(self, visit: Visit) -> None:
        self.events.append((self.name, "before_visit", visit.layer))

    def after_forward(self, forward: LayerForward) -> None:
        self.events.append((self.name, "after_forward", forward.layer))

    def before_backward(self, stop: Stop) -> None:
        self.events.append((self.name, "before_backward", stop.layer))

    def gradient_ready(self, layer: int, offload: OffloadGradient | None, params: UpdateParams | None) -> None:
        self.events.append((self.name, "gradient_ready", layer))

    def after_visit(self, visit: Visit) -> None:
        self.events.append((self.name, "after_visit", visit.layer))

    def scale_known(self, params: UpdateParams) -> None:
        self.events.append((self.name, "scale_known", params.update))

    def end_step(self, update: int) -> None:
        self.events.append((self.name, "end_step", update))


def test_points_of_a_step(tmp_path: Path) -> None:
    """Of an embedding, one block and the head."""
    [batch], recipe, events = tiny_batches(1), Recipe(1, micro_batch_size=4), list[tuple[str, str, object]]()
    factory = folder_source(build_tiny(tmp_path, num_layers=1)).factory
    structure, plan = plan_for(factory, recipe, Mode(), (4, 32))
    device = CpuDevice(num_threads=1)
    with device.activate():
        runner = ResidentModel(factory, structure, plan, device).with_micro_batch(4, Objective())
        runner._hooks = [Recording("first", events), Recording("second", events)]
        runner.read(runner.submit(step_input(1, batch, recipe)))
        runner.apply_scale(UpdateParams(1, 1, 1e-3))
        runner.end(1)
    device.close()
    assert [event for name, *event in events if name == "first"] == [
        ["begin_step", 5],
        *(["before_visit", 0], ["after_forward", 0], ["after_visit", 0]),
        *(["before_visit", 1], ["after_forward", 1], ["after_visit", 1]),
        *(["before_visit", 2], ["after_forward", 2]),
        *(["before_backward", 2], ["gradient_ready", 2], ["after_visit", 2]),
        *(["before_visit", 1], ["before_backward", 1], ["gradient_ready", 1], ["after_visit", 1]),
        *(["before_visit", 0], ["before_backward", 0], ["gradient_ready", 0], ["after_visit", 0]),
        ["scale_known", 1],
        ["end_step", 1],
    ]
    assert [name for name, *_ in events] == ["first", "second"] * (len(events) // 2)
