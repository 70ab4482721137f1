"""The surface that users rely on, as a list: a new key or option needs an edit here that says so."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from megatrain_ray.command_line import make_parsers
from megatrain_ray.config.schema import TrainConfig

LIST = Path(__file__).with_name("surface.txt")


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the groups of settings that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def keys(model: type[BaseModel] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """Yield every key of a configuration, dotted; `[]` stands for the elements of a list of groups."""
    for name, field in model.model_fields.items():
        groups = list(models_in(field.annotation))
        is_list = "tuple" in str(field.annotation)
        yield f"{prefix}{name}"
        for group in groups:
            yield from keys(group, f"{prefix}{name}{'[]' if is_list else ''}.")


def options(parser: argparse.ArgumentParser, command: str = "megatrain") -> Iterator[str]:
    """Yield every command with each of its arguments and options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            choices: Mapping[str, argparse.ArgumentParser] = action.choices
            for name, sub_parser in choices.items():
                yield from options(sub_parser, f"{command} {name}")
        elif action.dest != "help":
            yield f"{command} {' '.join(action.option_strings) or action.metavar or action.dest}"


def test_keys_and_options_are_those_of_the_list() -> None:
    found = [*sorted(set(keys())), *sorted(set(options(make_parsers()[0])))]
    assert found == LIST.read_text().splitlines()
