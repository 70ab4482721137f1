"""Makes the tables of settings in docs/configuration.md from the configuration's own classes.

Run as a module it writes the tables into the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BeforeValidator

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.values import Group
from megatrain_ray.units import parse_size

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN, END = "<!-- made by python -m tests.support.configuration_reference -->\n", "<!-- end -->\n"
MORE = {
    "model.attention": "data.md", "data.kind": "data.md", "data.path": "data.md", "data.dataset": "sft_data.md",
    "data.eval_path": "data.md#held-out-data", "data.eval_fraction": "data.md#held-out-data",
    "data.images": "images.md", "data.chat_format": "sft_data.md", "data.chat_template": "sft_data.md",
    "data.truncation": "sft_data.md", "data.packing": "data.md",
    "data.stream": "data.md#streams-sources-larger-than-the-disk", "train.trainable": "freezing.md",
    "train.vision": "images.md", "train.freeze": "freezing.md", "train.groups": "freezing.md",
    "train.optimizer": "muon.md", "train.compute": "less_precise.md", "train.moments": "less_precise.md",
    "lora": "lora.md",
    "eval_every": "metrics.md#evaluationsjsonl", "log.wandb": "metrics.md", "log.mlflow": "metrics.md",
    "log.trace": "trace.md", "save_compress": "save_format.md", "save_mirror": "storage.md",
    "hardware.profile": "hardware_profile.md",
    "hardware.nodes": "numa.md", "hardware.num_gpus": "several_gpus.md",
    "hardware.num_hosts": "several_hosts.md",
    "spill.path": "hardware_profile.md#the-disk-of-spillpath",
}  # fmt: skip
RUN = "The run"
HEAD = "| key | values (default) | meaning |\n|---|---|---|\n"
NAMES = {"integer": "integer", "number": "number", "string": "text", "array": "list", "object": "mapping"}


def table() -> str:
    """Return a heading and a table for each group of keys, the keys without a group first."""
    schema = TrainConfig.model_json_schema()
    rows: dict[str, list[str]] = {RUN: []}
    for key, field in _fields(TrainConfig):
        more = f" ([{Path(MORE[key].split('#')[0]).stem}]({MORE[key]}))" if key in MORE else ""
        meaning = " ".join(field.description.split()).replace("|", "\\|")
        values = "size, null" if parse_size in _validators(field) else _values(_property(schema, key), schema)
        default = _default(field)
        if default == "null":
            values = values.replace(", null", "")
        group = key.partition(".")[0] if "." in key or key == "lora" else RUN
        rows.setdefault(group, []).append(f"| {key} | {values} ({default}) | {meaning}{more} |\n")
    return "\n".join(f"## {group}\n\n{HEAD}{''.join(lines)}" for group, lines in rows.items())


def _fields(group: type[Group], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in group.model_fields.items():
        inner = next((kind for kind in (field.annotation, *get_args(field.annotation)) if _is_group(kind)), None)
        if inner is not field.annotation:
            yield prefix + name, field
        if inner is not None and get_origin(field.annotation) is not tuple:  # a group, or one that may be null
            yield from _fields(inner, f"{prefix}{name}.")


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Group)


def _validators(field: Any) -> list[Any]:
    """Return the functions that read a key's value before validation, also of a key that may be null."""
    annotated = [field, *(part for part in get_args(field.annotation) if get_origin(part) is Annotated)]
    metadata = [item for part in annotated for item in (part.metadata if part is field else part.__metadata__)]
    return [item.func for item in metadata if isinstance(item, BeforeValidator)]


def _property(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """Return what the JSON schema says of a key."""
    node = schema
    for name in key.split("."):
        node = _resolved(node, schema)["properties"][name]
    return node


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    parts = (*node.get("allOf", ()), *node.get("anyOf", ()))
    reference = node.get("$ref") or next((part["$ref"] for part in parts if "$ref" in part), None)
    return schema["$defs"][reference.rpartition("/")[2]] if reference else node


def _values(node: dict[str, Any], schema: dict[str, Any]) -> str:
    if "anyOf" in node:
        return ", ".join(dict.fromkeys(_values(_resolved(part, schema), schema) for part in node["anyOf"]))
    if "enum" in node:
        return ", ".join(str(value).lower() if isinstance(value, bool) else value for value in node["enum"])
    if "const" in node:
        return str(node["const"])
    if node["type"] in ("boolean", "null"):
        return str(node["type"])
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {node[name]:g}" for name, sign in signs.items() if name in node and node[name] < 2**53]
    return " ".join([NAMES[node["type"]], " and ".join(bounds)]).strip()


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    if value is None:
        return "null"
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("...\n").strip()


def written(page: str) -> str:
    """Return the page with today's tables."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
