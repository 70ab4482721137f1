"""Implements `megatrain convert-config`: translates a configuration of LLaMA-Factory or Axolotl.

Keys are translated by tables. Data sets are translated by `llama_factory_data` and `axolotl_data`: they take the
configuration file and what the table has found so far, and add our settings of the data sets. They raise RefusedError
if data sets are missing or cannot be translated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.config.objective_checks import KIND_OF_OBJECTIVE
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import dump_settings, read_settings
from megatrain_ray.convert.conversions import RefusedError, names
from megatrain_ray.convert.images import IMAGE_TEMPLATES, set_stream, translate_images
from megatrain_ray.convert.key_tables import DataSetRules, Findings, Table, apply, by_reason, load_table
from megatrain_ray.convert.preferences import translate_preferences
from megatrain_ray.convert.resolve_settings import FREEZING, resolve
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.find_chats import FILE_NAME, Answers, read_dataset_info
from megatrain_ray.read_file import parse_json, regular_file

ANSWERS: Mapping[str, Answers] = {"pairs": "preferred", "unpaired": "labelled"}  # by data.kind
FIRST_RECORDS = re.compile(r"(?P<split>\w+)\[:(?P<number>\d+)\]")  # of the datasets library


@dataclass(frozen=True)
class Conversion:
    """Holds the result of a conversion.

    text: our YAML.
    report: lines about keys that set nothing.
    refused: whether some keys cannot be honoured.
    """

    text: str
    report: tuple[str, ...]
    refused: bool


def convert(path: Path, overrides: Sequence[str] = (), *, num_gpus: int = 1, lenient: bool = False) -> Conversion:
    """Translate the configuration file at `path`.

    num_gpus: number of GPUs that the file was meant for. An update gets that many times as many sequences.
    lenient: leave out keys that cannot be honoured. Otherwise, if there are any, `text` of the result is empty.

    Raises ConfigError if the file is from neither tool, or if the resulting configuration is invalid.
    """
    tree = read_settings(path)
    tables = {name: load_table(name) for name in DATA_SETS}
    name = next((name for name, table in tables.items() if table.recognised in tree), None)
    if name is None:
        marks = ", ".join(f"{table.recognised} ({table.tool})" for table in tables.values())
        raise ConfigError(f"{path}: is of no tool that is known here; expected one of the keys {marks}")
    table = tables[name]
    found = apply(table, tree)
    translate_preferences(table, found, tree)
    try:
        DATA_SETS[name](tree, found)
    except RefusedError as error:
        found.refused.append(str(error))
    translate_images(table, found, tree)
    _drop_unused_freezing(table, found, tree)
    refused = bool(found.refused)
    if refused and not lenient:
        return Conversion("", tuple(_report(found)), refused)
    settings = resolve(found.settings, table.default_warmup, overrides=overrides, num_gpus=num_gpus)
    TrainConfig.model_validate(settings)
    if found.settings.get("streaming"):
        set_stream(settings, found)
    head = f"# From {path.name} of {table.tool}, by megatrain convert-config.\n"
    return Conversion(head + dump_settings(settings), tuple(_report(found)), refused)


def _drop_unused_freezing(table: Table, found: Findings, tree: Mapping[str, Any]) -> None:
    """Drop LLaMA-Factory's keys on freezing unless finetuning_type is freeze: otherwise they have no effect."""
    if found.settings.get("method") == "freeze":
        return
    for target in FREEZING:
        found.settings.pop(target, None)
    keys = [key for key, rule in table.sets.items() if rule.target in FREEZING and tree.get(key)]
    found.meaningless |= dict.fromkeys(keys, "of finetuning_type: freeze")


def _report(found: Findings) -> list[str]:
    parts = {
        "done otherwise here": by_reason(found.otherwise),
        "without a meaning here": by_reason(found.meaningless),
        "cannot be honoured": found.refused,
    }
    return [line for title, lines in parts.items() if lines for line in (f"{title}:", *(f"  {line}" for line in lines))]


def llama_factory_data(tree: Mapping[str, Any], found: Findings) -> None:
    """Translate data sets that the file names as entries of a dataset_info.json, or as ids of the hub."""
    if tree.get("mix_strategy", "concat") != "concat":
        raise RefusedError(f"mix_strategy: {load_table('llama_factory').refused['mix_strategy']}")
    if not tree.get("dataset"):
        raise RefusedError("dataset: is missing, and data.path is required")
    folder, chosen, held_out = (
        Path(str(tree.get("dataset_dir", "data"))),
        names(tree["dataset"]),
        tree.get("eval_dataset"),
    )
    if str(folder).startswith("REMOTE"):
        raise RefusedError(
            f"dataset_dir: {folder}: download that folder (`hf download --repo-type dataset`), and name it"
        )
    of_files = str(folder) == "ONLINE" or tree.get("stage") == "pt"  # data.path then lists several as one source
    if of_files and len(chosen) > 1 and tree.get("max_samples"):
        raise RefusedError("max_samples: is of each data set there, and data.max_records of all in data.path together")
    if str(folder) == "ONLINE" and tree.get("stage", "sft") != "pt":
        found.settings |= {"data.path": [{"hub": name} for name in chosen], "data.chat_format": "alpaca"}
        return
    info = folder / FILE_NAME
    if tree.get("stage") == "pt":
        # Texts are packed unless the file says otherwise.
        found.settings |= {"data.packing": tree.get("packing", True), **_texts(info, folder, chosen)}
        return
    if info.exists():
        answers = ANSWERS.get(str(found.settings.get("data.kind")), "learned")
        found.settings["data.images"] = _hold_images(info, [*chosen, *(names(held_out) if held_out else ())], answers)
    else:
        found.settings["data.images"] = str(tree.get("template")).startswith(IMAGE_TEMPLATES)
    found.settings |= {"data.path": str(info), "data.dataset": _one_or_all(chosen)}
    if held_out:
        found.settings |= {"data.eval_path": str(info), "data.eval_dataset": names(held_out)}


def _hold_images(info: Path, chosen: list[str], answers: Answers) -> bool:
    """Return whether one of the entries names a column of images. Raises RefusedError if one cannot be read."""
    try:
        return any(entry.images for entry in read_dataset_info(info, chosen, answers))
    except ConfigError as error:
        raise RefusedError(str(error).replace("data.dataset", "dataset", 1)) from None


def _texts(info: Path, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """Return settings with the files of texts themselves: our pretraining data do not use dataset_info.json."""
    try:
        entries = [parse_json(regular_file(info).read_text(encoding="utf-8"))[name] for name in chosen]
        files = [str(folder / entry["file_name"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"dataset: {', '.join(chosen)}: {info} does not tell its file ({error!r}); give data.path"
        ) from None
    fields = {entry.get("columns", {}).get("prompt", "text") for entry in entries}
    return {"data.path": _one_or_all(files), **_text_field(fields, "dataset")}


def axolotl_data(tree: Mapping[str, Any], found: Findings) -> None:
    """Translate data sets that the file lists, which must all be of one kind."""
    rules = load_table("axolotl").data_sets
    assert rules is not None
    texts = tree.get("pretraining_dataset")
    given = texts or tree.get("datasets")
    if not given:
        raise RefusedError("datasets: are missing, and data.path is required")
    listed = given if isinstance(given, list) else [given]
    entries = [{"path": item} if isinstance(item, str) else item for item in listed]
    if texts:
        entries = [{"type": "pretrain", **item} for item in entries]
    entries, limit = _first_records(tree, entries)
    objective = found.settings.get("train.objective", "")
    answers = objective if objective in rules.answers else KIND_OF_OBJECTIVE.get(objective)
    if answers and (template := _template(rules, answers, entries)):
        found.settings.setdefault("template", template)
    found.settings |= _common(rules, entries, answers) | limit | ({"data.packing": True} if texts else {})
    if found.settings.get("data.chat_format") == "alpaca":
        found.otherwise["datasets"] = rules.alpaca
    if tests := tree.get("test_datasets"):
        found.settings["data.eval_path"] = _common(rules, tests, answers)["data.path"]


def _first_records(tree: Mapping[str, Any], entries: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the entries without a slice (`train[:1000]`), and its number as a setting, if it means the same.

    data.max_records limits held-out data as well, and is of all data sets together.
    """
    if (
        len(entries) == 1
        and isinstance(entries[0], Mapping)
        and not (tree.get("test_datasets") or tree.get("val_set_size"))
    ):
        found = FIRST_RECORDS.fullmatch(str(entries[0].get("split")))
        if found:
            return [{**entries[0], "split": found["split"]}], {"data.max_records": int(found["number"])}
    return entries, {}


def _common(rules: DataSetRules, entries: list[Any], answers: str | None) -> dict[str, Any]:
    kinds = {_kind(rules, entry, answers) for entry in entries}
    if len(kinds) > 1:
        raise RefusedError("datasets: are of several types; data of one kind are read")
    ((kind, layout),) = kinds
    paths = [path for entry in entries for path in _paths(rules, entry)]
    found: dict[str, Any] = {"data.kind": kind, "data.path": _one_or_all(paths)}
    if kind == "pretrain":
        fields = {entry.get("field") or entry.get("text_column") or "text" for entry in entries}
        found |= _text_field(fields, "datasets")
    if layout:
        found["data.chat_format"] = layout
    return found


def _text_field(fields: set[str], key: str) -> dict[str, Any]:
    if len(fields) > 1:
        raise RefusedError(f"{key}: texts stand under several keys ({', '.join(sorted(fields))}); one is read")
    return {} if fields == {"text"} else {"data.text_field": fields.pop()}


def _template(rules: DataSetRules, kind: str, entries: list[Any]) -> str | None:
    """Return the template that the type of the first entry writes; None: the tokenizer's."""
    return rules.answers[kind].get(str(entries[0].get("type")).partition(".")[0]) if entries else None


def _kind(rules: DataSetRules, entry: Any, answers: str | None) -> tuple[str, str | None]:
    """Return data.kind and data.chat_format. Raises RefusedError for a type or key that cannot be followed.

    answers: key of rules.answers if records have preferred or labelled answers.
    """
    if not isinstance(entry, Mapping):
        raise RefusedError(f"datasets: expected a mapping, got {entry!r:.60}")
    where, types = f"datasets: {entry.get('path')}", rules.types
    kind = entry.get("type") or ""
    name = kind.partition(".")[0].partition(":")[0] if isinstance(kind, str) else None
    if answers is not None:
        types = dict.fromkeys(rules.answers[answers], (KIND_OF_OBJECTIVE.get(answers, answers), None))
        if isinstance(kind, str) and "." in kind and kind.partition(".")[2] not in rules.answer_formats:
            name = None
    if name not in types or (name == "alpaca" and kind != "alpaca"):
        raise RefusedError(f"{where}: type: {kind}: is not here; expected one of {', '.join(filter(None, types))}")
    for key, value in entry.items():
        if value in (None, [], {}, False):
            continue
        if key not in rules.accepted or ((accepted := rules.accepted[key]) is not None and value not in accepted):
            raise RefusedError(f"{where}: {key}: {value!r:.60}: cannot be followed; records are read as they stand")
    return types[name]


def _paths(rules: DataSetRules, entry: Mapping[str, Any]) -> list[Any]:
    """Return what an entry is in data.path: files, a folder, or a data set of the hub."""
    path, files = str(entry.get("path")), entry.get("data_files")
    chosen = [files] if isinstance(files, str) else list(files or [])
    if path in rules.file_formats and chosen:
        return chosen
    if Path(path).exists() or Path(path).suffix:
        return [str(Path(path) / file) for file in chosen] or [path]
    if chosen:
        raise RefusedError(
            f"datasets: {path}: data_files: single files of the hub are not read; download them "
            f"(`hf download --repo-type dataset {path}`), and name the folder"
        )
    if "[" in str(entry.get("split")):
        raise RefusedError(
            f"datasets: {path}: split: {entry['split']}: give the split alone, and as "
            "data.max_records how many of its first records are used (a share of them is not known here)"
        )
    return [{"hub": path, **{key: entry[key] for key in ("name", "split", "revision") if entry.get(key)}}]


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 and isinstance(values[0], str) else values


DATA_SETS = {"llama_factory": llama_factory_data, "axolotl": axolotl_data}  # by the name of the table
