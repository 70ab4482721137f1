"""Handles containers through which layers pass tensors to later layers: mappings that a layer receives and writes to.

For example, keys and values that several layers share are passed in this way. An entry that a layer adds is an output
of the layer. An entry that it finds there is an input.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

Place = int | str  # position among the positional arguments, or keyword


class Stores:
    """Holds the mappings among a call's arguments (not those nested inside other arguments)."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
        self._containers: dict[Place, MutableMapping[Any, Any]] = {
            place: value for place, value in places if isinstance(value, dict | UserDict)
        }

    def __bool__(self) -> bool:
        return bool(self._containers)

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the original arguments."""
        return self._args, self._kwargs

    def contents(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with each container replaced by a plain dict of its current entries."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, container in self._containers.items():
            _put(args, kwargs, place, dict(container))
        return args, kwargs

    def refilled(
        self, contents: tuple[list[Any], dict[str, Any]]
    ) -> tuple[list[Any], dict[str, Any], list[MutableMapping[Any, Any]]]:
        """Return arguments for another call, made from `contents`, and the new containers among them.

        The containers are copies that the call may write to.
        contents: as returned by the method `contents`; tensors in it may have been replaced.
        """
        args, kwargs = list(contents[0]), dict(contents[1])
        fresh: list[MutableMapping[Any, Any]] = []
        for place, container in self._containers.items():
            held = _get(args, kwargs, place)
            twin = copy.copy(container)
            twin.clear()
            twin.update(held)
            fresh.append(twin)
            _put(args, kwargs, place, twin)
        return args, kwargs, fresh

    def added(
        self, contents: tuple[list[Any], dict[str, Any]], fresh: Sequence[MutableMapping[Any, Any]]
    ) -> list[dict[Any, Any]]:
        """Return the entries that a call added or replaced, for each of its containers.

        contents: the contents before the call.
        fresh: the call's own containers, as returned by `refilled`.
        """
        before = [_get(*contents, place) for place in self._containers]
        return [
            {key: value for key, value in twin.items() if key not in held or held[key] is not value}
            for twin, held in zip(fresh, before, strict=True)
        ]

    def write(self, added: Sequence[dict[Any, Any]]) -> None:
        """Write the entries that a call added to the model's own containers."""
        for container, entries in zip(self._containers.values(), added, strict=True):
            container.update(entries)


def _get(args: Sequence[Any], kwargs: dict[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _put(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    if isinstance(place, int):
        args[place] = value
    else:
        kwargs[place] = value
