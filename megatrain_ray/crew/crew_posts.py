"""Creates the posts of a run, an arena owner and optimizer shards on each host, and the arguments of their actors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatrain_ray.console.logs import say
from megatrain_ray.crew.actor_role import CHECK_S, Check, Post, answer
from megatrain_ray.crew.placement import Placement
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.arenas.arena_holder import Handles
from megatrain_ray.io.storage.disk_io import DiskIo
from megatrain_ray.planning.prepare import Prepared
from megatrain_ray.profiling.spill_folder import OtherHost
from megatrain_ray.run.process_names import owner_name, shard_name
from megatrain_ray.run.run_dir import RunFiles
from megatrain_ray.workers.arenas import arena_sizes, spill_files

SAME_S = 30.0  # seconds within which a file system that hosts share shows them a file that was just replaced


def owner_post(prepared: Prepared, place: Placement, host: int, left: Mapping[str, Sequence[int]]) -> Post:
    """Return the post of the arena owner of a host.

    left: ids of processes that an earlier attempt left on each Ray node, as Crew.elsewhere returns them.
    """
    name, left_there = owner_name(host), left.get(place.node_of(host), ())
    arguments = partial(owner_arguments, prepared, place, host, left_there)
    return Post(name, host, partial(place.take, name), arguments)


def shard_post(prepared: Prepared, place: Placement, number: int) -> Post:
    """Return the post of an optimizer shard.

    number: of the shard, counted over the shards of all hosts.
    """
    name, host = shard_name(number), number // prepared.plan.shards.num_shards
    return Post(name, host, partial(place.take, name), partial(shard_arguments, prepared, number))


def owner_arguments(
    prepared: Prepared,
    place: Placement,
    host: int,
    left: Sequence[int],
    holders: Sequence[Handles],
    after_pid: int | None,
) -> tuple[Any, ...]:
    """Return the arguments that an ArenaOwner takes.

    left: ids of processes on this host that must end first.
    holders: processes that still hold the arenas and spill files; if there are none, new ones are created.
    after_pid: unused.
    """
    plan = prepared.plan
    layout = prepared.structure.layout(plan.num_fragments).on_host(host, plan.hosts.num_hosts)
    files = spill_files(plan, layout, prepared.config.spill.path)
    folder = next((file.folder for file in files.values()), None)
    other = OtherHost(_called(place, host), folder, plan.disk.io is DiskIo.KVIKIO) if host else None
    return arena_sizes(plan, layout), holders, files, left, other


def _called(place: Placement, host: int) -> str:
    return f"{place.addresses[host]} (host {host})"


def shard_arguments(
    prepared: Prepared, index: int, holders: Sequence[Handles], after_pid: int | None
) -> tuple[Any, ...]:
    return prepared, index, holders, after_pid, True


def _who_sees_another(path: Path, owners: Sequence[Post], check: Check) -> list[int]:
    """Return the hosts that do not see the same file at `path` as the first host does."""
    seen = [answer(f"{post.name} did not answer", post.actor.digest_of.remote(str(path)), check) for post in owners]
    return [host for host, digest in enumerate(seen) if digest != seen[0]]


def check_run_dir(prepared: Prepared, place: Placement, owners: Sequence[Post], check: Check) -> None:
    """Raise ConfigError if another host does not see the run directory, into which all hosts save.

    Compares the plan file, again and again for at most SAME_S seconds. `check` is called as in `answer`.
    """
    path, deadline_s = RunFiles(Path(prepared.config.run_dir).absolute()).plan_file, time.monotonic() + SAME_S
    while others := _who_sees_another(path, owners, check):
        if time.monotonic() < deadline_s:
            time.sleep(CHECK_S)
            continue
        raise ConfigError(
            f"run_dir: {path.parent} on {_called(place, others[0])} is not the folder that it is here, and every host "
            "saves into it; give an absolute path on a file system that all share"
        )


def warn_of_memory(owners: Sequence[Post], check: Check) -> None:
    """Print a warning for every other host on which spill.path is in memory.

    The plan warned already of the driver's own host. `check` is called as in `answer`.
    """
    for post in owners:
        if text := answer(f"{post.name} did not answer", post.actor.memory_warning.remote(), check):
            say(f"warning: {text}")
