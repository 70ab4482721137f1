"""Containers through which layers hand tensors to later ones: a mapping that a layer is given and writes to.

Keys and values that several layers share travel so. What a layer adds is an output of it; what a layer finds there is
an input.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

Place = int | str  # position among the arguments, or keyword


class Stores:
    """The mappings among a call's own arguments (not inside of others)."""

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
        """The arguments themselves."""
        return self._args, self._kwargs

    def contents(self) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with a plain dict of what it holds now in each container's place."""
        args, kwargs = list(self._args), dict(self._kwargs)
        for place, container in self._containers.items():
            _put(args, kwargs, place, dict(container))
        return args, kwargs

    def refilled(
        self, contents: tuple[list[Any], dict[str, Any]]
    ) -> tuple[list[Any], dict[str, Any], list[MutableMapping[Any, Any]]]:
        """Arguments for a call from such `contents`, and the containers in them: copies that the call may write to."""
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
        """What a call wrote to each of its containers."""
        before = [_get(*contents, place) for place in self._containers]
        return [
            {key: value for key, value in twin.items() if key not in held or held[key] is not value}
            for twin, held in zip(fresh, before, strict=True)
        ]

    def write(self, added: Sequence[dict[Any, Any]]) -> None:
        """Brings what a call added to the model's own containers."""
        for container, entries in zip(self._containers.values(), added, strict=True):
            container.update(entries)


def _get(args: Sequence[Any], kwargs: dict[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _put(args: list[Any], kwargs: dict[str, Any], place: Place, value: Any) -> None:
    if isinstance(place, int):
        args[place] = value
    else:
        kwargs[place] = value
