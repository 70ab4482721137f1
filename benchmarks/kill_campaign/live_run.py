"""Runs a command, and shows what can be seen of it from outside: processes, signal words, files."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.kill_campaign.processes import MARK, Actor, Processes, Role, arenas, state
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arenas.arena_holder import ArenaHandle, ArenaHolder
from megatrain_ray.io.saves.save_folder import list_saves
from tests.support.runs import ROOT, plan_of

WORDS = "words"


@dataclass(frozen=True)
class Moment:
    """Holds what the words say at one time. `begun` and `generation` are indexed by shard, then by layer."""

    committed: int
    landed: tuple[int, ...]
    begun: tuple[tuple[int, ...], ...]
    generation: tuple[tuple[int, ...], ...]

    @property
    def update(self) -> int:
        """Return the number of the update that gradients are computed for."""
        return self.committed + 1

    @property
    def num_landed(self) -> int:
        return sum(landed >= self.update for landed in self.landed)

    def torn(self, shard: int) -> int | None:
        """Return the layer whose update the shard has begun and not finished, if there is one."""
        pairs = zip(self.begun[shard], self.generation[shard], strict=True)
        return next((layer for layer, (begun, generation) in enumerate(pairs) if begun > generation), None)

    def __str__(self) -> str:
        shards = "; ".join(f"shard {s} at {list(g)}" for s, g in enumerate(self.generation))
        return f"committed {self.committed}, landed {list(self.landed)}, {shards}"


def moment_of(words: SharedUpdateState) -> Moment:
    layers, shards, generations = range(words.num_layers), range(words.num_shards), words.generations
    return Moment(
        words.updates.committed,
        tuple(words.last_landed(layer) for layer in layers),
        tuple(tuple(generations.begun(shard, layer) for layer in layers) for shard in shards),
        tuple(tuple(generations.of_shard(shard, layer) for layer in layers) for shard in shards),
    )


class SaveSight(NamedTuple):
    """Holds what the files of a run's saves show.

    committed: steps of the saves with a manifest.
    unfinished: the newest step whose folder has no manifest; None if all have one.
    num_blobs, num_bytes, partial_manifest: what is in the folder of `unfinished`.
    """

    committed: tuple[int, ...]
    unfinished: int | None
    num_blobs: int
    num_bytes: int
    partial_manifest: bool

    @property
    def writing(self) -> bool:
        """Return whether the unfinished save is newer than the others; else it is being deleted."""
        return self.unfinished is not None and self.unfinished > max(self.committed, default=-1)

    def __str__(self) -> str:
        unfinished = ""
        if self.unfinished is not None:
            partial = " and manifest.json.partial" if self.partial_manifest else ""
            unfinished = f", unfinished {self.unfinished}: {self.num_blobs} blobs, {self.num_bytes} bytes{partial}"
        return f"saves {list(self.committed)}{unfinished}"


class LiveRun:
    """Runs a command in a process of its own, with its output in a file. `processes` shows what it leaves behind."""

    def __init__(self, command: Sequence[str], run_dir: Path, output: Path) -> None:
        self.run_dir = run_dir
        self.output = output
        self._words: SharedUpdateState | None = None
        self._words_pid = 0  # pid of the process whose words these are
        self.start_s = time.monotonic()
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, MARK: str(output)},
            )  # fmt: skip
        self.processes = Processes(self.process.pid, str(output))

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def moment(self) -> Moment | None:
        """Return what the words say; None until they exist and training has begun.

        If all actors start again there are new words. They are looked for once the process that had the old ones is
        dead.
        """
        if self._words is None or state(self._words_pid) in "ZX":
            self._words = self._attach()
        if self._words is None:
            return None
        moment = moment_of(self._words)
        return moment if moment.committed or max(moment.landed) else None

    def saves(self) -> SaveSight:
        folder = self.run_dir / "saves"
        committed = tuple(list_saves(folder))
        with suppress(OSError):
            steps = (int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))
            for unfinished in sorted(set(steps) - set(committed), reverse=True):
                files = {path.name: path.stat().st_size for path in (folder / f"step_{unfinished}").iterdir()}
                partial = files.pop("manifest.json.partial", None) is not None
                if "manifest.json" not in files:
                    return SaveSight(committed, unfinished, len(files), sum(files.values()), partial)
        return SaveSight(committed, None, 0, 0, False)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def last_words(self) -> str:
        """Return the end of what it printed, without Ray's paragraphs."""
        lines = [line for line in self.text().splitlines() if "raylet" not in line]
        return " | ".join(line[:300] for line in lines[-4:])

    def close(self) -> None:
        """Kill what still runs, and drop the words."""
        self.processes.kill_all()
        self.process.wait()
        self._words = None

    def _attach(self) -> SharedUpdateState | None:
        for actor in (Actor(Role.OWNER), Actor(Role.GPU)):
            pid = self.processes.find(actor)
            fd = arenas(pid, mapped=False).get(WORDS) if pid else None
            if pid is None or fd is None:
                continue
            with suppress(MegatrainError, OSError):
                plan = plan_of(self.run_dir)
                sizes = (len(plan.layers), plan.shards.num_shards, plan.hosts.gpus_per_host)
                nbytes = 8 * SharedUpdateState.num_words(*sizes)
                name = Path(f"/proc/{pid}/fd/{fd}").readlink().as_posix().removeprefix("/memfd:").split(" ")[0]
                self._words_pid = pid
                with closing(ArenaHolder.adopt([{WORDS: ArenaHandle(pid, fd, nbytes, name)}])) as holder:
                    return SharedUpdateState(holder.map(WORDS).buffer, *sizes)
        return None
