"""Writes a model and data that a Python program holds into the run directory, once.

The run then reads them like any other files, so a run on objects is a run on files.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatrain_ray.config.objective_checks import KIND_OF_OBJECTIVE
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import TEMPLATE_NAME
from megatrain_ray.io.chat.conversation_formats import CHOSEN, REJECTED
from megatrain_ray.io.chat.token_records import ATTENDED, IDS, LABELS, LOSS_MASK, OTHER_MASKS, PACKED_KEYS, WEIGHTS
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.files.owned_folder import FolderKind, NotOwnedError, OwnedFolder, is_free, remove_owned
from megatrain_ray.io.files.partial_folder import complete_or_absent
from megatrain_ray.io.records.read_records import without_nulls
from megatrain_ray.model.open_model import GENERATION_NAME
from megatrain_ray.run.run_dir import RunDir

INPUTS_NAME = "inputs"
TOKEN_KEYS = (IDS, LABELS, ATTENDED, LOSS_MASK, WEIGHTS, *PACKED_KEYS, *OTHER_MASKS)
PRETRAINED = ("model", "processing_class")  # objects with save_pretrained; the others are records
# The setting (group, key) that each object replaces, and the file or folder that it is written to.
PLACES = {
    "model": ("model", "path", "model"),
    "train_dataset": ("data", "path", "train.jsonl"),
    "eval_dataset": ("data", "eval_path", "eval.jsonl"),
    "processing_class": ("data", "tokenizer", "tokenizer"),
}


@dataclass(frozen=True)
class Objects:
    """Holds objects that replace files of the configuration; None: no object.

    A text or Path instead of an object is the value of the setting itself.

    model: a PreTrainedModel.
    train_dataset, eval_dataset: records (mappings) in a list, a datasets.Dataset, a torch Dataset, or anything else
        that can be iterated more than once.
    processing_class: a tokenizer of Transformers.
    """

    model: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    processing_class: Any = None

    def fill(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a configuration with the paths of these objects filled in.

        If it is not set, data.kind is chosen by train.objective and the first record. Frozen parameters of a model
        object are added to train.freeze.
        Raises ConfigError for a setting that an object replaces as well, and for an object of a wrong type.
        """
        tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
        inputs = Path(str(tree.get("run_dir"))).absolute() / INPUTS_NAME
        for name, value in self._given():
            group, key, file = PLACES[name]
            node = tree.setdefault(group, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{group}: expected a mapping, got {node!r:.60}")
            if key in node or (name == "model" and "config" in node):
                raise ConfigError(f"{name} stands for {group}.{key}: give one of them")
            (_check_pretrained if name in PRETRAINED else _check_records)(name, value)
            node[key] = value if isinstance(value, str) else str(inputs / file)
        data = tree.get("data", {})
        if self.train_dataset is not None and not isinstance(self.train_dataset, (str, Path)):
            text_field, train = data.get("text_field", "text"), tree.get("train")
            data.setdefault("kind", _kind(self.train_dataset, text_field, train if isinstance(train, dict) else {}))
        is_object = not isinstance(self.model, (str, Path, type(None)))
        if is_object and "tokenizer" not in data and data.get("kind") != "tokens":
            raise ConfigError("processing_class: a model object comes without a tokenizer; give it, or data.tokenizer")
        if is_object:
            _freeze_likewise(tree.setdefault("train", {}), self.model)
        return tree

    @contextmanager
    def written(self, run: RunDir) -> Iterator[None]:
        """Write the objects as files of `run` for the block; they stay if the block has begun a run.

        A run that is resumed keeps the model that it has; held-out records may have changed. Raises ConfigError if its
        training records or tokenizer have changed, and for records that JSON cannot hold. Raises MegatrainError if the
        disk fails.
        """
        folder, is_new = run.path / INPUTS_NAME, not run.has_begun
        given = [(name, value) for name, value in self._given() if not isinstance(value, str)]
        try:
            if is_new and given:
                if not is_free(folder):  # left by a start that completed no step
                    remove_owned(folder, FolderKind.RUN_PART)
                OwnedFolder.make(folder, FolderKind.RUN_PART).release()
            for name, value in given:
                folder.mkdir(exist_ok=True)
                file = folder / PLACES[name][2]
                if name in PRETRAINED:
                    _write_pretrained(name, value, file)
                else:
                    _write_records(name, value, file, run.config.data)
            yield
        finally:
            if is_new and given and not run.holds_run:
                with suppress(NotOwnedError, OSError):
                    remove_owned(folder, FolderKind.RUN_PART)

    @property
    def is_empty(self) -> bool:
        return not any(self._given())

    def longest_row(self) -> int | None:
        """Return the inputs of the longest training record of ids; None if the records hold no ids or are files.

        The last id of a record is a target only.
        """
        dataset = self.train_dataset
        if dataset is None or isinstance(dataset, (str, Path)) or _kind(dataset, "") != "tokens":
            return None
        return max(1, max(len(record[IDS]) for record in _records("train_dataset", dataset)) - 1)

    def _given(self) -> Iterator[tuple[str, Any]]:
        for name in PLACES:
            if (value := getattr(self, name)) is not None:
                yield name, str(value) if isinstance(value, Path) else value


def with_held_out(config: TrainConfig, dataset: Any, folder: Path) -> TrainConfig:
    """Return the configuration with other held-out data: the file that `dataset` names, or its records.

    Records are written into `folder`. Raises ConfigError for other objects.
    """
    _check_records("eval_dataset", dataset)
    file = Path(dataset) if isinstance(dataset, (str, Path)) else folder / PLACES["eval_dataset"][2]
    if not isinstance(dataset, (str, Path)):
        _write_records("eval_dataset", dataset, file, config.data)
    held_out = {"eval_path": str(file), "eval_dataset": None, "eval_fraction": None}
    return config.model_copy(update={"data": config.data.model_copy(update=held_out)})


def _freeze_likewise(train: Any, model: Any) -> None:
    """Add what the model object has frozen to the parameters that the settings freeze."""
    frozen = [f"^{re.escape(name)}$" for name, p in model.named_parameters() if not p.requires_grad]
    given = train.get("freeze", ()) if isinstance(train, dict) else None
    if frozen and isinstance(given, (str, list, tuple)):  # other types are refused later, when the settings are checked
        train["freeze"] = [*((given,) if isinstance(given, str) else given), *frozen]


def _check_pretrained(name: str, value: Any) -> None:
    if isinstance(value, str):
        return
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    expected = PreTrainedModel if name == "model" else PreTrainedTokenizerBase
    if not isinstance(value, expected):
        raise ConfigError(f"{name}: expected a {expected.__name__} or a path, got a {type(value).__name__}")


def _check_records(name: str, value: Any) -> None:
    if isinstance(value, Iterator):
        raise ConfigError(
            f"{name}: a {type(value).__name__} can be gone over once only, and a resume must go over it again; give a "
            "list, or an object whose __iter__ begins anew"
        )
    if not isinstance(value, (str, Path, Iterable)) and not hasattr(value, "__getitem__"):
        raise ConfigError(f"{name}: expected records or a path, got a {type(value).__name__}")


def _records(name: str, dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the records in order. A torch Dataset has a length and items, and iterating over it need not stop."""
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, Iterable)
    for number, record in enumerate((dataset[at] for at in range(len(dataset))) if has_items else dataset, 1):
        if not isinstance(record, Mapping):
            raise ConfigError(f"{name}: record {number}: expected a mapping, got a {type(record).__name__}")
        yield record


def _kind(dataset: Any, text_field: str, train: Mapping[str, Any] = {}) -> str:
    """Return data.kind for these records. `train`: settings of `train`, as given."""
    if kind := KIND_OF_OBJECTIVE.get(str(train.get("objective"))):
        return "prompts" if kind == "rollouts" and "rollouts" in train else kind
    first = next(_records("train_dataset", dataset), None)
    if first is None:
        raise ConfigError("train_dataset: holds no record")
    if IDS in first:
        return "tokens"
    if isinstance(first.get(text_field), str):
        return "pretrain"
    return "pairs" if {CHOSEN, REJECTED} <= first.keys() else "sft"  # of which another line says what to set


def _write_pretrained(name: str, value: Any, folder: Path) -> None:
    if folder.exists():
        if name == "processing_class":
            _check_tokenizer(value, folder)
        return
    with complete_or_absent(folder) as partial:
        if name == "model":
            save_model(value, partial)
        else:
            value.save_pretrained(partial)


def save_model(model: Any, folder: Path) -> None:
    """Save a model with its generation configuration as it is, under the model's own names of its parameters.

    Transformers saves no generation configuration that it would warn of, such as a temperature without do_sample. Under
    a checkpoint's names it would quantise again what it dequantised, with other values or names.
    """
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        model.generation_config = type(generation)()
    try:
        model.save_pretrained(folder, save_original_format=False)
    finally:
        if generation is not None:
            model.generation_config = generation
    if generation is not None and model.can_generate():
        generation.to_json_file(folder / GENERATION_NAME, keys_to_pop=["compile_config"])


def _check_tokenizer(value: Any, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as now:
        value.save_pretrained(now)
        same = _meaning(Path(now)) == _meaning(folder)
    if not same:
        raise ConfigError(
            f"processing_class: is another tokenizer than the run began with ({folder}); give that, or another run_dir"
        )


def _meaning(folder: Path) -> list[Any]:
    """Return the parts of a tokenizer's files that decide ids. Truncation and padding are as the last call set them."""
    file, template = folder / "tokenizer.json", folder / TEMPLATE_NAME
    tree = json.loads(file.read_bytes()) if file.exists() else {}
    return [tree | {"truncation": None, "padding": None}, template.exists() and template.read_bytes()]


def _write_records(name: str, dataset: Any, file: Path, data: Any) -> None:
    """Write the records to `file`, unless it holds the same ones already.

    An unchanged file keeps its modification time, by which its tokens are found again. Raises ConfigError if training
    records differ from those of the file.
    """
    lines = partial(_lines, name, dataset, data.kind, data.text_field)
    if file.exists():
        number = _first_difference(file, lines())
        if number is None or _first_difference(file, lines(as_given=True)) is None:  # an earlier release wrote them so
            return
        if name == "train_dataset":
            raise ConfigError(
                f"{name}: record {number} is not that which the run began with ({file}); give the same records in the "
                "same order, or another run_dir"
            )
    write_atomically(file, lines())


def _first_difference(file: Path, lines: Iterator[str]) -> int | None:
    """Return the number, from 1, of the first line that differs; None if there is none."""
    with file.open(encoding="utf-8") as before:
        pairs = enumerate(zip_longest(before, lines), 1)
        return next((number for number, (there, here) in pairs if there != here), None)


def _lines(name: str, dataset: Any, kind: str, text_field: str, *, as_given: bool = False) -> Iterator[str]:
    """Yield a line of JSON for each record, with only the keys that the run reads.

    as_given: leave keys that the datasets library has filled with null in chats.
    """
    keys = {"pretrain": (text_field,), "tokens": TOKEN_KEYS}.get(kind)
    is_filled = hasattr(dataset, "features") and not as_given
    for number, record in enumerate(_records(name, dataset), 1):
        kept = dict(record) if keys is None else {key: record[key] for key in keys if key in record}
        kept = without_nulls(kept) if is_filled else kept
        try:
            yield json.dumps(kept, default=_as_json) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: record {number} cannot be written as JSON: {error}") from None


def _as_json(value: Any) -> Any:
    """Return an array or tensor as a list and a mapping as a dict. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")
