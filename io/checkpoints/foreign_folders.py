"""Says what a folder holds instead of a Hugging Face model in safetensors, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

PICKLED = (
    "of pickled weights, those under the names of Transformers are read: pytorch_model.bin, or the files that "
    "pytorch_model.bin.index.json names"
)
ADVICE = (  # by file names that such folders hold, first the surest sign
    ("adapter_config.json", "it holds an adapter: name its base as model.path, and this folder as lora.path"),
    ("*.gguf", "its weights are in GGUF, which is not read: use the repository that they were converted from"),
    ("model-*-of-*.safetensors", "the index of its files is missing: fetch model.safetensors.index.json as well"),
    ("pytorch_model-*-of-*.bin", "the index of its files is missing: fetch pytorch_model.bin.index.json as well"),
    (
        "model.*.safetensors*",
        "its weights are a variant, as the middle of their names says: rename them to model.safetensors, or use the "
        "repository's main files",
    ),
    (
        "consolidated*",
        "its weights are in the maker's own format: use the repository's files for Transformers (config.json and "
        "model*.safetensors)",
    ),
    ("*/config.json", "a folder within it has one: name that"),
    ("*/*.safetensors", "a folder within it holds weights: move them beside config.json"),
    ("*.bin", PICKLED),
    ("*.pt", PICKLED),
)


def advice_on(names: Iterable[str]) -> str | None:
    """Return what to do about a folder that is no model, by the names of its files; None if they say nothing.

    names: relative to the folder, with those of folders within it.
    """
    found = list(names)
    return next((advice for sign, advice in ADVICE if any(fnmatch(name, sign) for name in found)), None)


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder's files, and of those in folders within it; none if it cannot be read."""
    names: list[str] = []
    with suppress(OSError):
        names += [str(path.relative_to(folder)) for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(names)
