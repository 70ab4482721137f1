"""Drives the GPU workers and the data process that feeds them, and replaces them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray.exceptions import RayTaskError

from megatrain_ray.crew.actor_role import ActorRole, Check, answer, ask_each
from megatrain_ray.crew.placement import Placement
from megatrain_ray.crew.recovery import ProcessKind
from megatrain_ray.engine.device.deadlines import STEP_DEADLINE_S
from megatrain_ray.errors import LostProcessError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.planning.run_spec import RunSpec
from megatrain_ray.run.run_processes import DATA, gpu_name
from megatrain_ray.workers.messages import Progress, RankInfo

ASK_S = 0.2  # seconds between two questions of PreparedSteps
Holders = Callable[[int], Sequence[Handles]]  # returns the processes that hold the arenas of a host
Until = Callable[[Mapping[Any, str], float], None]  # waits for calls, {call: text if late}, within seconds


class PreparedSteps:
    """Tracks up to which step the data of a stream are there. Asks the data process while the next step is held back.

    Without a stream all data are there.
    """

    def __init__(self, ask: Callable[[int], Any], step: int, *, streamed: bool) -> None:
        """Know of no step after `step` yet. `ask`: submits the question, given the newest step that was submitted."""
        self._last: float = step if streamed else math.inf
        self._ask = ask
        self._call: Any = None
        self._asked_s = -math.inf

    def holds(self, submitted: int) -> bool:
        """Return whether the step after `submitted` must not begin yet."""
        return submitted >= self._last

    def calls(self, submitted: int) -> list[Any]:
        """Return the open question, which is asked now if it is due."""
        now_s = time.monotonic()
        if self.holds(submitted) and self._call is None and now_s - self._asked_s >= ASK_S:
            self._call, self._asked_s = self._ask(submitted), now_s
        return [] if self._call is None else [self._call]

    def record_answer(self, answer: Callable[[Any], int]) -> None:
        """Record the answer to the open question. `answer`: returns the result of a call, or raises."""
        call, self._call = self._call, None
        self._last = max(self._last, answer(call))


class GpuWorkerGroup:
    """Drives all GPU workers and the data process.

    All GPU workers get the same calls, and the answer of rank 0 stands for all. If one dies during a step, none of them
    can end it, so all are replaced.
    """

    # Of every data process of this attempt. It begins where the attempt began, and skips to the step that it is asked
    # for. Set them before the data process starts.
    data_arguments: Mapping[str, Any]

    def __init__(self, run_spec: RunSpec, place: Placement, check: Check, until_all: Until) -> None:
        """Start nothing yet. `check` and `until_all` are those of the Supervisor."""
        self._run_spec = run_spec
        self._place = place
        self._check = check
        self._until_all = until_all
        hosts = run_spec.plan.hosts
        self.workers = [
            ActorRole(
                ProcessKind.GPU, gpu_name(rank), rank // hosts.gpus_per_host, place.take, partial(self._arguments, rank)
            )
            for rank in range(hosts.num_gpus)
        ]
        self.data = ActorRole(ProcessKind.DATA, DATA, 0, place.take, lambda holders: self.data_arguments)
        self._ranks: list[RankInfo | None] = [None]
        self.asked: list[Any] = []  # open calls of ranks above 0, while the driver waits for rank 0

    @property
    def gpu(self) -> Any:
        """Return the GPU worker of rank 0, or None before there is one."""
        return self.workers[0].actor

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of all GPU workers and return the call of rank 0. The other calls are added to `asked`."""
        first, *others = ask_each(self.workers, method, *arguments)
        self.asked += others
        return first

    def start(self, holders: Holders) -> None:
        """Start GPU workers, which attach the arenas once earlier workers have ended. Does not wait for them."""
        for worker in self.workers:
            worker.actor = worker.take(worker.name)
        if len(self.workers) > 1:
            addresses = self._place.addresses
            meeting = self.gpu.open_meeting.remote(addresses[0])
            place = answer("the GPU workers found no place to meet", meeting, self._check)
            self._ranks = [RankInfo(rank, place, addresses[worker.host]) for rank, worker in enumerate(self.workers)]
        for worker in self.workers:
            worker.setup(holders(worker.host))

    def _arguments(self, rank: int, holders: Sequence[Handles]) -> dict[str, Any]:
        host = self.workers[rank].host
        return {
            "run_spec": self._run_spec,
            "holders": holders,
            "data": self.data.actor,
            # All earlier workers of its host: Ray decides whose GPU it gets.
            "after_pids": [worker.pid for worker in self.workers if worker.host == host and worker.pid is not None],
            "rank_info": self._ranks[rank],
        }

    def wait_ready(self) -> None:
        for worker in self.workers:
            worker.wait_ready(self._check)

    def watch(self) -> None:
        """Watch for deaths, from before the first step on.

        A pending call of each GPU worker fails if the worker dies, and returns if a batch is due and the data process
        is dead.
        """
        for worker in self.workers:
            worker.assign(lambda actor: actor.until_data_dies.remote(), serves=False)

    def stop_watching(self) -> None:
        """Stop watching for deaths, when a process that dies needs no replacement."""
        self.asked = []
        for worker in self.workers:
            worker.call = None

    def replace_data(self) -> None:
        """Replace the data process by another one, which continues from where training stands.

        Raises RayActorError if that one also dies, or if a GPU worker has died.
        """
        self.data.start(())
        self.data.wait_ready(self._check)
        for call in ask_each(self.workers, "take_data", self.data.actor):
            answer("a GPU worker did not take the data process", call, self._check)
        self.watch()

    def replace_gpus(self, holders: Holders, progress: Callable[[], Progress], ready: Callable[[], None]) -> None:
        """Replace all GPU workers by others, which build their engines and continue from where training stands.

        holders: returns processes that hold the arenas, other than the GPU workers.
        ready: called when the new process ids are known, and before they hold what takes long to give back.

        Raises LostProcessError if the step cannot be repeated, and RayActorError if a new process also dies.
        """
        self.stop_watching()
        for worker in self.workers:
            worker.handles = {}
        self.start(holders)
        self.wait_ready()
        ready()
        filled = ask_each(self.workers, "fill", None, None)  # loads nothing: nothing lives on the device
        self.wait_built(ask_each(self.workers, "build"))
        for call in filled:
            answer("a GPU worker was not filled", call, self._check)
        try:
            self.begin("resume", progress, "did not take up training")
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, LostProcessError) else error from None
        self.watch()

    def begin(self, method: str, progress: Callable[[], Progress], late: str) -> None:
        """Call `method` (`start` or `resume`) of one GPU worker after the other, by rank.

        The first worker of a host sets the signal words, so the others must follow it.
        """
        for worker in self.workers:
            [call] = ask_each([worker], method, progress())
            self._until_all({call: f"the {worker.name} {late}"}, STEP_DEADLINE_S)

    def wait_built(self, calls: Sequence[Any]) -> None:
        """Wait until all GPU workers have built their engines.

        Waits for all at once, so a death is noticed even while another waits for the dead.
        """
        named = zip(self.workers, calls, strict=True)
        self._until_all(
            {call: f"the {worker.name} did not build its engine" for worker, call in named}, STEP_DEADLINE_S
        )
