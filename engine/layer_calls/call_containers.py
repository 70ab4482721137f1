"""Handles containers through which layers pass tensors to later layers: mappings that a layer receives and writes to.

For example, keys and values that several layers share are passed in this way. An entry that a layer adds is an output
of the layer. An entry that it finds there is an input.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

Key = int | str  # position among the positional arguments, or keyword


class MutableContainers:
    """Holds a call's arguments, and the mappings among them (not those nested inside other arguments)."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = args, kwargs
        self._arguments: dict[Key, Any] = dict((*enumerate(args), *kwargs.items()))
        self._containers: dict[Key, MutableMapping[Any, Any]] = {
            key: value for key, value in self._arguments.items() if isinstance(value, dict | UserDict)
        }

    def __bool__(self) -> bool:
        return bool(self._containers)

    def contents(self) -> dict[Key, Any]:
        """Return the arguments with each container replaced by a plain dict of its current entries."""
        return self._arguments | {key: dict(container) for key, container in self._containers.items()}

    def refilled(
        self, contents: dict[Key, Any]
    ) -> tuple[list[Any], dict[str, Any], dict[Key, MutableMapping[Any, Any]]]:
        """Return arguments for another call, made from `contents`, and the new containers among them.

        The containers are copies that the call may write to.
        contents: as returned by the method `contents`; tensors in it may have been replaced.
        """
        fresh = {key: copy.copy(container) for key, container in self._containers.items()}
        for key, twin in fresh.items():
            twin.clear()
            twin.update(contents[key])
        arguments = contents | fresh
        args = [value for key, value in arguments.items() if isinstance(key, int)]
        return args, {key: value for key, value in arguments.items() if isinstance(key, str)}, fresh

    def added(self, contents: dict[Key, Any], fresh: dict[Key, MutableMapping[Any, Any]]) -> list[dict[Any, Any]]:
        """Return the entries that a call added or replaced, for each of its containers.

        contents: the contents before the call.
        fresh: the call's own containers, as returned by `refilled`.
        """
        return [
            {entry: value for entry, value in twin.items() if entry not in held or held[entry] is not value}
            for twin, held in ((twin, contents[key]) for key, twin in fresh.items())
        ]

    def write(self, added: Sequence[dict[Any, Any]]) -> None:
        """Write the entries that a call added to the model's own containers."""
        for container, entries in zip(self._containers.values(), added, strict=True):
            container.update(entries)
