"""Who keeps a run's arenas alive: any process that holds their descriptors, whether it maps the memory or not."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence

from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.arena import Arena, ArenaHandle, create_memfd, open_held

Handles = Mapping[str, ArenaHandle]


class ArenaHolder:
    """Descriptors of all arenas of a run, by what they hold. As long as one holder lives the others can attach."""

    def __init__(self, handles: Handles) -> None:
        """`handles`: of this process. Use `create` or `adopt`."""
        self._handles = dict(handles)

    @classmethod
    def create(cls, sizes: Mapping[str, int]) -> ArenaHolder:
        """New arenas of these sizes in bytes, all zeros. Raises MegatrainError."""
        # A name that no other run has: a descriptor number that was given out again cannot be taken for ours.
        run = f"megatrain-{secrets.token_hex(4)}"
        return cls({name: _create(f"{run}-{name}", nbytes) for name, nbytes in sizes.items()})

    @classmethod
    def adopt(cls, holders: Sequence[Handles]) -> ArenaHolder:
        """Holds what others hold too; they may be dead, but for one. Raises MegatrainError when all are."""
        holder = cls({})
        try:
            for name in holders[0]:
                fd, handle = _open_first([handles[name] for handles in holders])
                holder._handles[name] = ArenaHandle(os.getpid(), fd, handle.nbytes, handle.name)
        except MegatrainError:
            holder.close()
            raise
        return holder

    @property
    def handles(self) -> dict[str, ArenaHandle]:
        """For `adopt` in any process of this machine."""
        return dict(self._handles)

    def map(self, name: str) -> Arena:
        """The arena's memory in this process; it stays mapped when the holder is closed."""
        handle = self._handles[name]
        return Arena(handle.fd, handle)

    def close(self) -> None:
        """Gives the descriptors up. Idempotent."""
        for handle in self._handles.values():
            os.close(handle.fd)
        self._handles = {}


def _create(name: str, nbytes: int) -> ArenaHandle:
    return ArenaHandle(os.getpid(), create_memfd(name, nbytes), nbytes, name)


def _open_first(handles: Iterable[ArenaHandle]) -> tuple[int, ArenaHandle]:
    errors = []
    for handle in handles:
        try:
            return open_held(handle), handle
        except MegatrainError as error:
            errors.append(str(error))
    raise MegatrainError("; ".join(errors))
