"""The GPU workers, the data process that feeds them, and others in their place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from megatrain_ray.crew.actor_role import Check, actor_id, answer, await_begin
from megatrain_ray.crew.placement import Placement
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.errors import LostProcessError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.run.process_names import DATA, gpu_name
from megatrain_ray.workers.gpu_worker import Progress, Seat

log = logging.getLogger(__name__)

Holders = Callable[[int], Sequence[Handles]]  # of the arenas of a host
Until = Callable[[Mapping[Any, str], float], None]  # calls, how each is called when late, their bound in seconds


class GpuSide:
    """The driver's side of them. `data_arguments`: of a data process that goes on from where training stands now.

    All GPU workers are asked the same, and the first one answers for all; a step of which one dies none of them can
    end, so another one takes the place of each.
    """

    def __init__(
        self, prepared: Prepared, place: Placement, data_arguments: Callable[[], Mapping[str, Any]], check: Check
    ) -> None:
        """Takes the data process, which begins to open its files. `check`: called in every wait, as of `answer`."""
        self._prepared = prepared
        self._place = place
        self._check = check
        self._data_arguments = data_arguments
        self._gpus: list[Any] = []
        self.handles: dict[int, Handles] = {}  # of each host's arenas, which its first GPU worker keeps alive, too
        self.pids: dict[str, int] = {}
        self._watching: list[Any] = []
        self._asked: list[Any] = []  # of the others, while the first one's answer is waited for
        self._begin_data()

    @property
    def gpu(self) -> Any:
        """The first GPU worker; None before there is one."""
        return self._gpus[0] if self._gpus else None

    @property
    def actors(self) -> dict[str, Any]:
        """All of them, by name."""
        return {gpu_name(rank): gpu for rank, gpu in enumerate(self._gpus)} | {DATA: self.data}

    @property
    def pids_here(self) -> dict[str, int]:
        """Of those on the first host."""
        names = (DATA, *map(gpu_name, range(self._prepared.plan.host_gpus)))
        return {name: self.pids[name] for name in names if name in self.pids}

    @property
    def pids_on_hosts(self) -> list[tuple[int, int | None]]:
        """Of the GPU workers, and the host of each."""
        ranks = range(self._prepared.plan.num_gpus)
        return [(rank // self._prepared.plan.host_gpus, self.pids.get(gpu_name(rank))) for rank in ranks]

    @property
    def gpu_ids(self) -> set[str]:
        """By which Ray tells of the present GPU workers."""
        return set(map(actor_id, self._gpus))

    @property
    def watched(self) -> list[Any]:
        """Calls that end when one of them has died, or what the GPU workers beside the first one were asked. None
        before `watch`."""
        return [*self._watching, *self._asked]

    def ask(self, method: str, *arguments: Any) -> Any:
        """Has all GPU workers do the same; the first one's call. Those of the others are watched."""
        first, *others = self.ask_each(method, *arguments)
        self._asked += others
        return first

    def ask_each(self, method: str, *arguments: Any) -> list[Any]:
        """The same: the calls of all."""
        return [getattr(gpu, method).remote(*arguments) for gpu in self._gpus]

    def heard(self, call: Any) -> bool:
        """One of `watched` has ended well. Whether that was asked of a GPU worker: else the data process is dead."""
        if call not in self._asked:
            return False
        self._asked.remove(call)
        return True

    def take_gpus(self, holders: Holders) -> list[Any]:
        """Has GPU workers attach, once those before have ended; what it returns ends when that is done."""
        plan, before = self._prepared.plan, self.pids_on_hosts
        self._gpus = [self._place.take(gpu_name(rank)) for rank in range(plan.num_gpus)]
        seats: list[Seat | None] = [None]
        if plan.num_gpus > 1:
            addresses = self._place.addresses
            meeting = self.gpu.open_meeting.remote(addresses[0])
            place = answer("the GPU workers found no place to meet", meeting, self._check)
            seats = [Seat(rank, place, addresses[rank // plan.host_gpus]) for rank in range(plan.num_gpus)]
        return [
            gpu.take_up.remote(
                self._prepared,
                holders(rank // plan.host_gpus),
                self.data,
                # Of all on its host: whose GPU it gets is up to Ray.
                [pid for host, pid in before if pid is not None and host == rank // plan.host_gpus],
                seats[rank],
            )
            for rank, gpu in enumerate(self._gpus)
        ]

    def introduce(self, attaching: Sequence[Any]) -> None:
        """Waits until all have begun. `attaching`: what `take_gpus` returned."""
        self._introduce_data()
        self._introduce_gpus(attaching)

    def _introduce_data(self) -> None:
        await_begin("the data process", self._drawing, self._check)
        self.pids[DATA] = answer("the data process did not start", self.data.pid.remote(), self._check)

    def _introduce_gpus(self, attaching: Sequence[Any]) -> None:
        for rank, (call, gpu) in enumerate(zip(attaching, self._gpus, strict=True)):
            await_begin(f"the {gpu_name(rank)}", call, self._check)
            handles = answer(f"the {gpu_name(rank)} did not start", gpu.handles.remote(), self._check)
            self.pids[gpu_name(rank)] = next(iter(handles.values())).pid
            self.handles.setdefault(rank // self._prepared.plan.host_gpus, handles)

    def watch(self) -> None:
        """From the first step on."""
        self._watching = self.ask_each("until_data_dies")

    def stop_watching(self) -> None:
        """Before the end: who dies now is not missed."""
        self._watching, self._asked = [], []

    def is_data(self, died: str | None) -> bool:
        """Whether that id is of the present data process."""
        return self.data is not None and actor_id(self.data) == died

    def replace_data(self) -> None:
        """Another one goes on from where training stands. Raises RayActorError where that one dies as well, or a GPU
        worker has."""
        ray.kill(self.data)
        self._begin_data()
        self._introduce_data()
        for call in self.ask_each("take_data", self.data):
            answer("a GPU worker did not take the data process", call, self._check)
        self.watch()

    def replace_gpus(
        self, holders: Holders, progress: Callable[[], Progress], until: Until, begun: Callable[[], None]
    ) -> None:
        """Others build their engines and stand where training does. `holders`: others than they. `begun`: their process
        ids are known, from before they have what takes long to give back.
        Raises LostProcessError where the step cannot be made once more, and RayActorError where one dies as well."""
        for gpu in self._gpus:
            ray.kill(gpu)
        self._watching, self._asked, self.handles = [], [], {}
        if not self._prepared.plan.repeats_steps:
            raise LostProcessError("the GPU worker died with what lives on the device, or an update under way")
        self._introduce_gpus(self.take_gpus(holders))
        begun()
        filled = self.ask_each("fill", None, None)  # nothing lives on the device
        self.all_of(self.ask_each("build"), until, "did not build its engine")
        for call in filled:
            answer("a GPU worker was not filled", call, self._check)
        try:
            self.begin("resume", progress, until, "did not take up training")
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, LostProcessError) else error from None
        self.watch()

    def begin(self, method: str, progress: Callable[[], Progress], until: Until, late: str) -> None:
        """Has the GPU workers begin, the others behind the first one, which sets the signal words."""
        for rank, gpu in enumerate(self._gpus):
            until({getattr(gpu, method).remote(progress()): f"the {gpu_name(rank)} {late}"}, STEP_DEADLINE_S)

    def all_of(self, calls: Sequence[Any], until: Until, late: str) -> None:
        """Waits for calls of all GPU workers at once: while one waits for another that dies, the death is told."""
        until({call: f"the {gpu_name(rank)} {late}" for rank, call in enumerate(calls)}, STEP_DEADLINE_S)

    def _begin_data(self) -> None:
        self.data = self._place.take(DATA)
        self._drawing = self.data.take_up.remote(**self._data_arguments())
