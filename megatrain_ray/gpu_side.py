"""The GPU worker and the data process that feeds it, and others in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from megatrain_ray.actors import Placement
from megatrain_ray.engine.deadlines import STEP_DEADLINE_S
from megatrain_ray.errors import LostProcessError
from megatrain_ray.gpu_worker import Progress
from megatrain_ray.io.arena_holder import Handles
from megatrain_ray.planning import Prepared
from megatrain_ray.post import actor_id, answer, await_begin
from megatrain_ray.roles import DATA, GPU

log = logging.getLogger(__name__)

Until = Callable[[Any, str, float], Any]  # the answer of a call, how it is called when late, its bound in seconds


class GpuSide:
    """The driver's side of the two. `data_arguments`: of a data process that goes on from where training stands now."""

    def __init__(self, prepared: Prepared, place: Placement, data_arguments: Callable[[], Mapping[str, Any]]) -> None:
        """Takes the data process, which begins to open its files."""
        self._prepared = prepared
        self._place = place
        self._data_arguments = data_arguments
        self.gpu: Any = None
        self.handles: Handles = {}  # of the arenas, which the GPU worker keeps alive, too
        self.pids: dict[str, int] = {}
        self._call: Any = None
        self._begin_data()

    @property
    def watched(self) -> list[Any]:
        """Calls that end when one of the two has died. None before `watch`."""
        return [] if self._call is None else [self._call]

    def take_gpu(self, holders: Sequence[Handles], after_pid: int | None = None) -> Any:
        """Has a GPU worker attach; what it returns ends when that is done. `after_pid`: of the one before."""
        self.gpu = self._place.take(GPU)
        return self.gpu.take_up.remote(self._prepared, holders, self.data, after_pid)

    def introduce(self, attaching: Any) -> None:
        """Waits until both have begun. `attaching`: what `take_gpu` returned."""
        self._introduce_data()
        self._introduce_gpu(attaching)

    def _introduce_data(self) -> None:
        await_begin("the data process", self._drawing)
        self.pids[DATA] = answer("the data process did not start", self.data.pid.remote())

    def _introduce_gpu(self, attaching: Any) -> None:
        await_begin("the GPU worker", attaching)
        self.handles = answer("the GPU worker did not start", self.gpu.handles.remote())
        self.pids[GPU] = next(iter(self.handles.values())).pid

    def watch(self) -> None:
        """From the first step on."""
        self._call = self.gpu.until_data_dies.remote()

    def stop_watching(self) -> None:
        """Before the end: who dies now is not missed."""
        self._call = None

    def is_data(self, died: str | None) -> bool:
        """Whether that id is of the present data process."""
        return self.data is not None and actor_id(self.data) == died

    def is_gpu(self, died: str | None) -> bool:
        """Whether that id is of the present GPU worker."""
        return self.gpu is not None and actor_id(self.gpu) == died

    def replace_data(self) -> None:
        """Another one goes on from where training stands. Raises RayActorError where that one dies as well, or the GPU
        worker has."""
        ray.kill(self.data)
        self._begin_data()
        self._introduce_data()
        answer("the GPU worker did not take the data process", self.gpu.take_data.remote(self.data))
        self.watch()

    def replace_gpu(self, holders: Sequence[Handles], progress: Callable[[], Progress], until: Until) -> None:
        """Another one builds its engine and stands where training does. `holders`: of the arenas, others than it.
        Raises LostProcessError where the step cannot be made once more, and RayActorError where it dies as well."""
        ray.kill(self.gpu)
        self._call, self.handles = None, {}
        if not self._prepared.plan.repeats_steps:
            raise LostProcessError("the GPU worker died with what lives on the device, or an update under way")
        self._introduce_gpu(self.take_gpu(holders, self.pids[GPU]))
        filled = self.gpu.fill.remote(None, None)  # nothing lives on the device
        until(self.gpu.build.remote(), "the GPU worker did not build its engine", STEP_DEADLINE_S)
        answer("the GPU worker was not filled", filled)
        try:
            until(self.gpu.resume.remote(progress()), "the GPU worker did not take up training", STEP_DEADLINE_S)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, LostProcessError) else error from None
        self.watch()

    def _begin_data(self) -> None:
        self.data = self._place.take(DATA)
        self._drawing = self.data.take_up.remote(**self._data_arguments())
