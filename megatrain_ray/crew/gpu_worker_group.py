"""Drives the GPU workers and the data process that feeds them, and replaces them."""

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

Holders = Callable[[int], Sequence[Handles]]  # returns the processes that hold the arenas of a host
Until = Callable[[Mapping[Any, str], float], None]  # waits for calls, {call: text if late}, within seconds


class GpuSide:
    """Drives all GPU workers and the data process.

    All GPU workers get the same calls, and the answer of rank 0 stands for all. If one dies during a step, none of them
    can end it, so all are replaced.
    """

    def __init__(
        self, prepared: Prepared, place: Placement, data_arguments: Callable[[], Mapping[str, Any]], check: Check
    ) -> None:
        """Start the data process, which begins to open its files.

        data_arguments: returns the arguments of a data process that continues from where training stands at that
            moment.
        check: called in every wait, as in `answer`.
        """
        self._prepared = prepared
        self._place = place
        self._check = check
        self._data_arguments = data_arguments
        self._gpus: list[Any] = []
        self.handles: dict[int, Handles] = {}  # by host: of its arenas, which its first GPU worker also keeps alive
        self.pids: dict[str, int] = {}
        self._watching: list[Any] = []
        self._asked: list[Any] = []  # open calls of ranks above 0, while the driver waits for rank 0
        self._begin_data()

    @property
    def gpu(self) -> Any:
        """Return the GPU worker of rank 0, or None before there is one."""
        return self._gpus[0] if self._gpus else None

    @property
    def actors(self) -> dict[str, Any]:
        """Return the actors of all GPU workers and of the data process, by name."""
        return {gpu_name(rank): gpu for rank, gpu in enumerate(self._gpus)} | {DATA: self.data}

    @property
    def pids_here(self) -> dict[str, int]:
        """Return the process ids of those on the first host, by name."""
        names = (DATA, *map(gpu_name, range(self._prepared.plan.hosts.gpus_per_host)))
        return {name: self.pids[name] for name in names if name in self.pids}

    @property
    def pids_on_hosts(self) -> list[tuple[int, int | None]]:
        """Return the host and the process id of each GPU worker, by rank. The id is None before it is known."""
        ranks = range(self._prepared.plan.hosts.num_gpus)
        return [(rank // self._prepared.plan.hosts.gpus_per_host, self.pids.get(gpu_name(rank))) for rank in ranks]

    @property
    def gpu_ids(self) -> set[str]:
        """Return the ids by which Ray's errors name the current GPU workers."""
        return set(map(actor_id, self._gpus))

    @property
    def watched(self) -> list[Any]:
        """Return calls for the driver to watch: they end when a process has died, or when a rank above 0 is done.

        A watch ends when its GPU worker died, or when the data process died and a batch is wanted. Watches exist after
        `watch`.
        """
        return [*self._watching, *self._asked]

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of all GPU workers and return the call of rank 0. The calls of the others are watched."""
        first, *others = self.ask_each(method, *arguments)
        self._asked += others
        return first

    def ask_each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all GPU workers and return all calls, by rank."""
        return [getattr(gpu, method).remote(*arguments) for gpu in self._gpus]

    def heard(self, call: Any) -> bool:
        """Note that a call of `watched` has ended without an error, and return whether `ask` made it.

        If not, that call is a watch, and its end means that the data process is dead.
        """
        if call not in self._asked:
            return False
        self._asked.remove(call)
        return True

    def take_gpus(self, holders: Holders) -> list[Any]:
        """Start GPU workers, which attach the arenas once earlier workers have ended; return the calls of `take_up`."""
        plan, before = self._prepared.plan, self.pids_on_hosts
        self._gpus = [self._place.take(gpu_name(rank)) for rank in range(plan.hosts.num_gpus)]
        seats: list[Seat | None] = [None]
        if plan.hosts.num_gpus > 1:
            addresses = self._place.addresses
            meeting = self.gpu.open_meeting.remote(addresses[0])
            place = answer("the GPU workers found no place to meet", meeting, self._check)
            seats = [
                Seat(rank, place, addresses[rank // plan.hosts.gpus_per_host]) for rank in range(plan.hosts.num_gpus)
            ]
        return [
            gpu.take_up.remote(
                self._prepared,
                holders(rank // plan.hosts.gpus_per_host),
                self.data,
                # All earlier workers of its host: Ray decides whose GPU it gets.
                [pid for host, pid in before if pid is not None and host == rank // plan.hosts.gpus_per_host],
                seats[rank],
            )
            for rank, gpu in enumerate(self._gpus)
        ]

    def introduce(self, attaching: Sequence[Any]) -> None:
        """Wait until the data process and all GPU workers have started.

        attaching: the calls that `take_gpus` returned.
        """
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
            self.handles.setdefault(rank // self._prepared.plan.hosts.gpus_per_host, handles)

    def watch(self) -> None:
        """Watch for deaths. Call it before the first step."""
        self._watching = self.ask_each("until_data_dies")

    def stop_watching(self) -> None:
        """Stop watching for deaths. Call it at the end of the run, when a process that dies needs no replacement."""
        self._watching, self._asked = [], []

    def is_data(self, died: str | None) -> bool:
        """Return whether an actor id is that of the current data process."""
        return self.data is not None and actor_id(self.data) == died

    def replace_data(self) -> None:
        """Replace the data process by another one, which continues from where training stands.

        Raises RayActorError if that one also dies, or if a GPU worker has died.
        """
        ray.kill(self.data)
        self._begin_data()
        self._introduce_data()
        for call in self.ask_each("take_data", self.data):
            answer("a GPU worker did not take the data process", call, self._check)
        self.watch()

    def replace_gpus(
        self, holders: Holders, progress: Callable[[], Progress], until: Until, begun: Callable[[], None]
    ) -> None:
        """Replace all GPU workers by others, which build their engines and continue from where training stands.

        holders: returns processes that hold the arenas, other than the GPU workers.
        begun: called when the new process ids are known, and before they hold what takes long to give back.

        Raises LostProcessError if the step cannot be repeated, and RayActorError if a new process also dies.
        """
        for gpu in self._gpus:
            ray.kill(gpu)
        self._watching, self._asked, self.handles = [], [], {}
        if not self._prepared.plan.repeats_steps:
            raise LostProcessError("the GPU worker died with what lives on the device, or an update under way")
        self._introduce_gpus(self.take_gpus(holders))
        begun()
        filled = self.ask_each("fill", None, None)  # loads nothing: nothing lives on the device
        self.all_of(self.ask_each("build"), until, "did not build its engine")
        for call in filled:
            answer("a GPU worker was not filled", call, self._check)
        try:
            self.begin("resume", progress, until, "did not take up training")
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, LostProcessError) else error from None
        self.watch()

    def begin(self, method: str, progress: Callable[[], Progress], until: Until, late: str) -> None:
        """Call `method` (`start` or `resume`) of one GPU worker after the other, by rank.

        The first worker of a host sets the signal words, so the others must follow it.
        """
        for rank, gpu in enumerate(self._gpus):
            until({getattr(gpu, method).remote(progress()): f"the {gpu_name(rank)} {late}"}, STEP_DEADLINE_S)

    def all_of(self, calls: Sequence[Any], until: Until, late: str) -> None:
        """Wait for calls of all GPU workers at once.

        So a death is noticed even while another worker waits for the one that died.
        """
        until({call: f"the {gpu_name(rank)} {late}" for rank, call in enumerate(calls)}, STEP_DEADLINE_S)

    def _begin_data(self) -> None:
        self.data = self._place.take(DATA)
        self._drawing = self.data.take_up.remote(**self._data_arguments())
