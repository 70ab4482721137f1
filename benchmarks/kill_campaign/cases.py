"""Lists what is killed and in which phase: the table of the campaign."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from benchmarks.kill_campaign.live_run import Moment, SaveSight
from benchmarks.kill_campaign.phases import (
    Phase,
    at_random,
    attaching,
    before_words,
    by_saves,
    by_stack,
    by_title,
    by_words,
)
from benchmarks.kill_campaign.processes import SCRIPTS, Actor, Role
from benchmarks.kill_campaign.strike import Blow

SAVE_KEEP = 2


class Variant(Enum):
    """Names the configurations. All killed runs of one must equal its one undisturbed run."""

    CLIPPED = "bf16, exact clipping: updates under the next step's forward"
    UNCLIPPED = "fp32, no clipping: updates under the backward"
    TIGHT = "bf16, little device memory: layers recomputed, sums of gradients wait on the host"
    TWO_GPUS = "bf16, exact clipping, two GPU workers that upload parts"

    @property
    def changes(self) -> dict[str, Any]:
        """Return the changes of the configuration, as `tests.support.runs.config` takes them."""
        changes: dict[str, Any] = {"train__precision": "bf16", "train__steps": 250}
        if self is Variant.UNCLIPPED:
            changes |= {"train__precision": "fp32", "train__clip": None, "train__steps": 120}
        elif self is Variant.TIGHT:
            changes |= {"hardware__hbm_limit": 52_000_000, "train__steps": 30, "data__seq_len": 128}
            # Without these the plan takes smaller micro-batches and recomputes nothing.
            changes |= {"train__batch_size": 32, "train__micro_batch_size": 4, "train__accumulate": 8}
        elif self is Variant.TWO_GPUS:
            changes |= {"hardware__num_gpus": 2, "hardware__all_gather": True, "train__steps": 60}
            changes |= {"train__batch_size": 4, "train__micro_batch_size": 1, "train__accumulate": 2}
        return changes


class Needs(Enum):
    """Says what the run directory must hold when the command starts."""

    ANYTHING = "the command may be running already"
    NO_SAVE = "no save: weights are made"
    A_SAVE = "a save: weights are restored"


class Outcome(Enum):
    """Says what a death must lead to."""

    REPLACED = "another one in its place within the run, or all of them from the last save"
    ENDED = "exit 1 with one clear message; the same command resumes"
    SILENT = "the same command resumes"
    GOES_ON = "the run goes on without it"
    EITHER = "replaced, or ended: while the actors start there may be nobody yet to attach to"


@dataclass(frozen=True)
class Case:
    """Describes one kill, or several in a row. `starting`: they come while the actors start."""

    blows: tuple[Blow, ...]
    variant: Variant = Variant.CLIPPED
    needs: Needs = Needs.ANYTHING
    starting: bool = False

    @property
    def name(self) -> str:
        return ", then ".join(f"{'+'.join(map(str, blow.actors))}/{blow.phase.name}" for blow in self.blows)

    @property
    def roles(self) -> set[Role]:
        return {actor.role for blow in self.blows for actor in blow.actors}

    @property
    def outcome(self) -> Outcome:
        if Role.DRIVER in self.roles:
            return Outcome.SILENT
        if self.roles <= set(SCRIPTS):
            return Outcome.GOES_ON
        if self.starting:
            return Outcome.EITHER
        if any(blow.phase.name in BEFORE_STEPS for blow in self.blows) and Role.GPU in self.roles:
            return Outcome.ENDED  # a data process is missed when the first batch is wanted
        return Outcome.REPLACED if self.roles <= {Role.SHARD, Role.OWNER, Role.GPU, Role.DATA} else Outcome.ENDED


SHARD_0, SHARD_1 = Actor(Role.SHARD, 0), Actor(Role.SHARD, 1)
NEW_SHARD, OWNER, GPU, DATA = Actor(Role.SHARD), Actor(Role.OWNER), Actor(Role.GPU), Actor(Role.DATA)
DRIVER, GCS, RAYLET = Actor(Role.DRIVER), Actor(Role.GCS), Actor(Role.RAYLET)
DASHBOARD_AGENT, RUNTIME_ENV_AGENT = Actor(Role.DASHBOARD_AGENT), Actor(Role.RUNTIME_ENV_AGENT)
LOG_MONITOR = Actor(Role.LOG_MONITOR)

IN_STEP = by_title("in a step", "GpuActor.step", GPU, early=False)
BACKWARD = by_words("backward, some gradients landed", lambda m: 0 < m.num_landed < len(m.landed))
LANDED = by_words("all gradients landed, update not committed", lambda m: m.num_landed == len(m.landed))
UPDATE = by_words("update committed, not done", lambda m: min(map(min, m.generation)) < m.committed)
FORWARD = by_words("forward, updates done", lambda m: m.num_landed == 0 and min(map(min, m.generation)) == m.committed)
SAVING = by_saves("a save being written", lambda s: s.writing and s.num_bytes > 0)
MAKING = by_title("weights being made", "ShardWorker.initialize", SHARD_0)
RESTORING = by_title("weights being restored", "ShardWorker.restore", SHARD_0)
SHARDS_ATTACHING = attaching(NEW_SHARD)
STARTING = by_title("the engine being built", "GpuActor.build", GPU)
BEFORE_STEPS = {phase.name for phase in (MAKING, RESTORING, STARTING)}


def mid_layer(shard: int, layer: int) -> Phase:
    return by_words(f"mid-update of layer {layer}", lambda m: m.torn(shard) == layer)


def between_layers(shard: int) -> Phase:
    def holds(moment: Moment) -> bool:
        generation = moment.generation[shard]
        return moment.torn(shard) is None and min(generation) < moment.committed == max(generation)

    return by_words("between two layers of an update", holds)


def save_lines(whole_bytes: int) -> Iterator[Phase]:
    """Yield the phases of a save, as its folder shows them. `whole_bytes`: bytes of all blobs of one save."""

    def of(name: str, holds: Callable[[SaveSight], bool]) -> Phase:
        return by_saves(f"save: {name}", holds)

    yield of("folder without blobs", lambda s: s.writing and s.num_blobs == 0)
    yield of("blobs growing", lambda s: s.writing and 0 < s.num_bytes < whole_bytes)
    yield of("blobs whole, no manifest", lambda s: s.num_bytes == whole_bytes and not s.partial_manifest)
    yield of("manifest not yet renamed", lambda s: s.partial_manifest)
    yield of("manifest there, older save not yet deleted", lambda s: len(s.committed) > SAVE_KEEP)
    yield of("older save half deleted", lambda s: s.num_blobs > 0 and not s.writing)


def table(source: random.Random, num_layers: int, whole_bytes: int, num_random: int) -> Iterator[Case]:
    """Yield all cases. `source` chooses updates, layers and the moments of the kills at random."""

    def case(*actors: Actor, at: Phase, **more: Any) -> Case:
        return Case((Blow(actors, at, source.randint(1, 6)),), **more)

    yield from _of_starts(case)
    yield from _of_steps(case, source, num_layers)
    yield from _of_saves(case, whole_bytes)
    yield from _of_others(case, num_layers)
    for k in range(num_random):
        actor = source.choice((DRIVER, GPU, DATA, OWNER, SHARD_0, SHARD_1))
        early = k % 4 == 3
        yield case(actor if not early else DRIVER, at=at_random(source.uniform(0, 12 if early else 4), early=early))
    yield from _of_ray(case)


def _of_ray(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield kills of Ray's own processes.

    They come last, so that the random choices of the other cases stay what they were. A case that a run survives stands
    before one that ends it, since the next start has those processes again.
    """
    for phase in (BACKWARD, SAVING):
        yield case(LOG_MONITOR, at=phase)
        for actor in (DASHBOARD_AGENT, RUNTIME_ENV_AGENT):
            yield case(actor, at=phase)
    for phase in (SHARDS_ATTACHING, RESTORING):
        yield case(LOG_MONITOR, at=phase, needs=Needs.A_SAVE)
        for actor in (GCS, RAYLET, DASHBOARD_AGENT, RUNTIME_ENV_AGENT):
            yield case(actor, at=phase, needs=Needs.A_SAVE)


def _of_starts(case: Callable[..., Case]) -> Iterator[Case]:
    for actor in (SHARD_0, GPU, DATA, OWNER, DRIVER):
        yield case(actor, at=MAKING, needs=Needs.NO_SAVE)
        yield case(actor, at=RESTORING, needs=Needs.A_SAVE)
    for actor in (GPU, DRIVER, OWNER, SHARD_1):
        yield case(actor, at=STARTING, needs=Needs.A_SAVE)
    yield case(DRIVER, at=by_stack("planning", "run_spec.py", "prepare", early=True), needs=Needs.A_SAVE)
    yield case(DRIVER, at=by_stack("starting Ray", "ray_cluster.py", "_init", early=True), needs=Needs.A_SAVE)
    yield case(DRIVER, at=by_stack("starting actors", "worker_group.py", "start", early=True), needs=Needs.A_SAVE)
    yield case(NEW_SHARD, at=attaching(), needs=Needs.A_SAVE)
    yield case(OWNER, at=SHARDS_ATTACHING, needs=Needs.A_SAVE, starting=True)
    yield case(SHARD_0, at=before_words(GPU), needs=Needs.A_SAVE, starting=True)


def _of_steps(case: Callable[..., Case], source: random.Random, num_layers: int) -> Iterator[Case]:
    for layer in (0, source.randrange(1, num_layers - 1), num_layers - 1):
        shard = source.randrange(2)
        yield case(Actor(Role.SHARD, shard), at=mid_layer(shard, layer))
    yield case(SHARD_0, at=between_layers(0))
    yield case(SHARD_1, at=FORWARD)
    yield case(SHARD_0, at=BACKWARD)
    yield case(SHARD_0, SHARD_1, at=mid_layer(0, source.randrange(num_layers)))
    for phase in (FORWARD, BACKWARD, UPDATE):
        yield case(OWNER, at=phase)
    yield case(OWNER, SHARD_1, at=mid_layer(1, source.randrange(num_layers)))
    yield case(OWNER, SHARD_0, SHARD_1, at=UPDATE)
    yield case(GPU, at=by_stack("forward", "step_runner.py", "_forward", near=IN_STEP))
    yield case(GPU, at=by_stack("loss", "chunked_loss.py", "chunked_loss", near=IN_STEP))
    yield case(GPU, at=by_stack("backward", "step_runner.py", "_backward", near=IN_STEP))
    yield case(GPU, at=by_stack("adding up gradients", "gradient_store.py", "add", near=IN_STEP))
    yield case(GPU, at=by_stack("norms", "gradient_store.py", "finalize", near=BACKWARD))
    yield case(GPU, at=by_stack("copy to the device", "cpu_device.py", "move", thread="h2d", near=IN_STEP))
    yield case(GPU, at=by_stack("copy to the host", "cpu_device.py", "move", thread="d2h", near=IN_STEP))
    for phase in (BACKWARD, LANDED, UPDATE):
        yield case(GPU, at=phase)


def _of_saves(case: Callable[..., Case], whole_bytes: int) -> Iterator[Case]:
    for phase in save_lines(whole_bytes):
        yield case(DRIVER, at=phase)
    for actor in (SHARD_0, SHARD_1, OWNER, GPU, DATA, GCS, RAYLET):
        yield case(actor, at=SAVING)
    letting_go = by_stack("letting a layer go that a save wants", "save_gate.py", "_await_change", "_copy", near=SAVING)
    yield case(SHARD_0, at=letting_go)


def _of_others(case: Callable[..., Case], num_layers: int) -> Iterator[Case]:
    yield case(DATA, at=by_title("making a batch", "DataWorker.batch", early=False))
    yield case(DATA, at=UPDATE)
    yield case(DRIVER, at=FORWARD)
    yield case(DRIVER, at=mid_layer(0, num_layers // 2))
    yield case(GCS, at=BACKWARD)
    yield case(RAYLET, at=BACKWARD)
    middle = mid_layer(0, num_layers // 2)
    yield Case((Blow((SHARD_0,), middle, 2), Blow((NEW_SHARD,), attaching())))
    yield Case((Blow((SHARD_1,), mid_layer(1, 1), 2), Blow((OWNER,), at_random(0.0))))
    yield Case((Blow((OWNER,), UPDATE, 2), Blow((SHARD_0,), at_random(0.0))))
    under_way = by_words("update under the backward", lambda m: min(m.landed) < m.committed and m.torn(0) is not None)
    yield case(SHARD_0, at=under_way, variant=Variant.UNCLIPPED)
    yield case(GPU, at=under_way, variant=Variant.UNCLIPPED)
    yield case(SHARD_1, at=SAVING, variant=Variant.UNCLIPPED)
    yield case(GPU, at=by_stack("recomputing", "layer_call.py", "recompute", near=IN_STEP), variant=Variant.TIGHT)
    waiting = by_stack(
        "sums waiting on the host", "gradient_store.py", "offload_partial", "load_partial", "_accumulator", near=IN_STEP
    )
    yield case(GPU, at=waiting, variant=Variant.TIGHT)
    yield case(SHARD_0, at=mid_layer(0, num_layers // 2), variant=Variant.TIGHT)
    for actor, phase in ((GPU, BACKWARD), (GPU, LANDED), (SHARD_0, middle), (OWNER, UPDATE), (DRIVER, BACKWARD)):
        yield case(actor, at=phase, variant=Variant.TWO_GPUS)
    steps = Variant.UNCLIPPED.changes["train__steps"]
    yield case(DRIVER, at=by_words("the end", lambda m: m.committed == steps), variant=Variant.UNCLIPPED)
