"""Drives the actors of a run: starts them, loads their state, and has them step, save and stop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import AGAIN, ActorRole, answer, ask_each, hold_arenas, result_or_cause
from megatrain_ray.crew.host_roles import check_run_dir, warn_of_memory
from megatrain_ray.crew.supervisor import Supervisor
from megatrain_ray.engine.device.deadlines import transfer_deadline_s
from megatrain_ray.engine.shards.save_gate import NO_ATTEMPT, SaveAttempt
from megatrain_ray.engine.step.sampler import Prompt, SamplingParams
from megatrain_ray.engine.weights.frozen_checksums import source_checksums, unread_checksums
from megatrain_ray.engine.weights.saved_values import names_of
from megatrain_ray.errors import DeadlineError, LostProcessError, MegatrainError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.rollouts.answer_scores import SampledAnswer
from megatrain_ray.run.run_processes import DATA, GPU
from megatrain_ray.workers.messages import Progress

log = logging.getLogger(__name__)


class WorkerGroup(Supervisor):
    """Drives all actors of a run from the driver."""

    kernel_names: Sequence[str] = ()  # of the kernels that updates run as; set by `start`
    # Of each layer's frozen part (None: it has none), if saves leave these out; set by `load`.
    base_checksums: Sequence[int | None] = ()
    _newest_save = NO_ATTEMPT
    _building: Sequence[Any] = ()  # pending calls of GPU workers that build their engines

    @property
    def gpu(self) -> Any:
        """Return the handle of the current GPU worker, of several that of rank 0. Valid after `start`."""
        return self.group.gpu

    @property
    def data(self) -> Any:
        """Return the handle of the current data process. Valid after `start`."""
        return self.group.data.actor

    def start(self, data_arguments: Mapping[str, Any]) -> None:
        """Place and start all actors. Weights are not loaded yet."""
        self._place.wait(check=self.check)
        self.group.data_arguments = data_arguments
        self.group.data.start(())
        for owner in self._owners:
            owner.start(())
            self._wait_ready(owner)
            owner.assign(lambda actor: actor.run.remote(), serves=True)
        if len(self._owners) > 1:
            check_run_dir(self._run_spec, self._place, self._owners, self.check)
            warn_of_memory(self._owners, self.check)
        with hold_arenas(self._owners[0].handles) as self._own_handles:  # so far only their owner holds them
            self._start_others()
        self._own_handles = {}
        self._record(self.pids)

    def _start_others(self) -> None:
        """Start shards and GPU workers, which attach the owner's arenas."""
        for shard in self._shards:  # all attach at the same time
            shard.start(self.holders(shard.host))
        self.group.start(self.holders)
        for shard in self._shards:
            self._wait_ready(shard)
        self.kernel_names = sorted(set(self.ask_shards("kernel_name")))
        log.info("updates run as %s", ", ".join(self.kernel_names))
        self.group.data.wait_ready(self.check)
        self.group.wait_ready()
        self._warn_of_homes()

    def _wait_ready(self, role: ActorRole) -> None:
        """Wait until an actor is ready, or another one in its place."""
        try:
            role.wait_ready(self.check)
        except RayActorError as error:
            self.recover(error)
        self._record(self.pids)

    def _warn_of_homes(self) -> None:
        """Print one warning about all threads and memory that are not where the plan put them. Training goes on."""
        if not self._run_spec.plan.shards.homes:
            return
        calls = ask_each(self.group.workers, "home_problems")
        of_gpus = [answer("a GPU worker did not start", call, self.check) for call in calls]
        problems = {problem for found in (*self.ask_shards("home_problems"), *of_gpus) for problem in found}
        if problems:
            say(f"warning: {'; '.join(sorted(problems))}; updates may be slower (docs/numa.md)")

    def load(self, save_folder: Path | None, manifest: Manifest | None) -> None:
        """Fill all state from a save, or from the model's source. The engine is built meanwhile.

        save_folder, manifest: of the save; None: the model's source.

        Raises what the actors raised, and ConfigError if a save leaves out frozen parameters and these have changed.
        """

        def task(actor: Any) -> Any:
            return actor.initialize.remote() if save_folder is None else actor.restore.remote(save_folder, manifest)

        for shard in self._shards:
            shard.assign(task, serves=False)
        filling = ask_each(self.group.workers, "fill", save_folder, manifest)
        self._building = ask_each(self.group.workers, "build")
        plan = self._run_spec.plan
        limit_s = transfer_deadline_s(plan.updated_bytes + plan.frozen_bytes)
        self._await_shards([*filling, *self._building], limit_s)
        for call in filling:
            self.until(call, "the layers on the device were not filled", limit_s)
        if not plan.saves.includes_frozen:
            self.base_checksums = self._find_base_checksums(limit_s)
            if manifest is not None:
                manifest.check_base(self._base_checksums_by_layers_of(manifest))

    def _await_shards(self, calls: list[Any], limit_s: float) -> None:
        """Wait until the shards have loaded their weights, or one of `calls` fails: shards may take minutes more."""
        deadline_s = time.monotonic() + limit_s
        while busy := [shard.name for shard in self._shards if shard.call is not None]:
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{', '.join(busy)} did not load its weights within {limit_s:.0f} s; {AGAIN}")
            for call in self.wait(calls, 1.0):
                calls.remove(call)
                result_or_cause(call, calls, self.check)

    def _find_base_checksums(self, limit_s: float) -> Sequence[int | None]:
        run_spec = self._run_spec
        if run_spec.plan.hosts.num_hosts > 1:  # no process has all of a layer, so the weights are read again
            base, layout = run_spec.source.base_weights(), run_spec.structure.layout()
            return unread_checksums(base, layout, is_split=run_spec.plan.precision.is_split)
        found: Sequence[int | None] = self.until(self.gpu.base_checksums.remote(), "the base was not read", limit_s)
        return found

    def _base_checksums_by_layers_of(self, manifest: Manifest) -> Sequence[int | None]:
        """Return the checksums by the layers of a save, which may have divided blocks differently."""
        layers = self._run_spec.structure.layout().layers
        if names_of(manifest.layers) == [[part.name for part in layer.segments] for layer in layers]:
            return self.base_checksums
        return source_checksums(self._run_spec.source.base_weights(), manifest)

    def copy_bytes_per_s(self) -> float:
        """Return the rate at which all shards together copy layers aside for a save. Known once weights are loaded."""
        rates = self.ask_shards("copy_bytes_per_s")
        return sum(rates) * len(self._shards) / len(rates) if rates else math.inf

    def begin(self, progress: Callable[[], Progress]) -> None:
        """Start the engine, which `load` began to build, and then the shards, which obey the words that it resets.

        progress: returns where training stands at that moment.
        """
        self.group.wait_built(self._building)
        self.group.begin("start", progress, "did not start its engine")
        for shard in self._shards:
            shard.assign(lambda actor: actor.run.remote(self._newest_save), serves=True)
        self.group.watch()
        self._progress = progress

    def step(self, step: int, save: bool) -> Any:
        """Submit a step to all GPU workers, and return the call of rank 0, whose result is that of all.

        save: a save wants the state after this step.
        """
        return self.group.ask("step", step, save)

    def evaluate(self, step: int, index: int) -> Any:
        """Submit batch number `index` of the held-out data, in the same way as a step."""
        return self.group.ask("evaluate", step, index)

    def sample(self, step: int, prompts: list[Prompt], sampling: SamplingParams) -> Any:
        """Submit prompts to be answered after a step; the result answers the first of them, as many as fit."""
        return self.group.ask("sample", step, prompts, sampling)

    def score(self, step: int, answers: list[SampledAnswer]) -> Any:
        """Submit answers whose log-probabilities are to be computed after a step, in the same way."""
        return self.group.ask("score", step, answers)

    def position_after(self, step: int) -> Any:
        """Ask the data process for the position of the data after the batch of a step; return the call."""
        return self.data.position_after.remote(step)

    def ask_prepared(self, submitted: int) -> Any:
        """Ask the data process for the last step whose data are there, after `submitted` ones; return the call."""
        return self.data.prepared.remote(submitted)

    def write_parts(self, save_folder: Path, step: int, compression: SaveCompression) -> list[Any]:
        """Let all processes that hold state write their parts of a step's save; return the calls. Training goes on."""
        attempt = self._newest_save = SaveAttempt(step, self._newest_save.number + 1)
        writers = [shard.actor for shard in self._shards] + [self.gpu] * bool(self._run_spec.plan.hbm_layers)
        return [writer.write_part.remote(save_folder, attempt, compression) for writer in writers]

    def abandon_save(self) -> None:
        """Abandon the newest save: no update waits for it any more."""
        late = "a save could not be abandoned"
        with suppress(RayActorError):  # its replacement waits for no save up to this one
            answer(late, self.gpu.abandon_save.remote(self._newest_save), self.check)
        for shard in self._shards:
            try:
                answer(late, shard.actor.abandon_save.remote(self._newest_save), self.check)
            except RayActorError as error:  # its replacement waits for no save up to this one
                self.recover(error)

    def spans(self, last: int) -> dict[str, Any]:
        """Ask all processes for their spans up to step `last` and its update; return the calls by name."""
        roles = [*self.group.workers, *self._shards]
        calls = zip(roles, ask_each(roles, "spans", last), strict=True)
        return {**{role.name: call for role, call in calls}, DATA: self.data.spans.remote()}

    def update_times(self) -> list[tuple[int, float]]:
        """Return for each shard of the first host how many updates it has made, and seconds of its kernel in them."""
        return self.ask_shards("update_time")[: self._run_spec.plan.shards.num_shards]

    def current_phase(self) -> str:
        """Return what the GPU worker is doing, for the message about a step that does not end."""
        try:
            where: str = ray.get(self.gpu.current_phase.remote(), timeout=10.0)
        except (GetTimeoutError, RayError):
            return f"the GPU worker (process {self.pids.get(GPU)}) does not answer"
        return f"the GPU worker is at: {where}"

    def stop(self) -> None:
        """End a run that went well: all actors close what they hold, then the processes end."""
        self.group.stop_watching()
        assert self._progress is not None
        for closing in ask_each(self.group.workers, "close", self._progress().step):
            with suppress(RayActorError, LostProcessError):  # everything is saved
                self.until(closing, "the GPU worker did not close", self._run_spec.plan.update_deadline_s)
        with suppress(RayActorError):
            answer("the data process did not close", self.data.close.remote(), self.check)
        for role in (*self._owners, *self._shards):
            role.serves = False
            with suppress(RayActorError):  # everything is saved: a death does no harm
                answer(f"{role.name} did not stop", role.actor.stop.remote(), self.check)
                answer(f"{role.name} did not end", role.call, self.check)

    def kill(self) -> None:
        """Kill the processes whatever their state, unless their cluster is gone and ends with them. Idempotent."""
        with suppress(MegatrainError):
            self._check_cluster()
            for role in self._roles:
                if role.actor is not None:
                    ray.kill(role.actor)
            self._place.clear()
