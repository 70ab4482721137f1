"""Finds what a folder of weights holds beyond the model that is trained. An export keeps it as it is."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path

import torch

from megatrain_ray.io.checkpoints.safetensors_folder import CONFIG_NAME, WeightFolder
from megatrain_ray.units import format_bytes, format_quantity

SAMPLED_ELEMENTS = 1024  # of each tensor, from its beginning: enough to tell other values
FILE_BYTES = 64 << 20  # larger files are no settings, code or vocabulary
# Files that people who load a model may need. Weights, their indexes and the model's page are none.
PATTERNS = (
    "*.json", "*.jinja", "*.py", "*.txt", "*.model", "*.tiktoken", "*.bpe", "*.spm", "*.yaml",
    "LICENSE*", "LICENCE*", "NOTICE*", "*POLICY*",
)  # fmt: skip
NOT_KEPT = (
    CONFIG_NAME, "generation_config.json", "*.index.json", "README*", "trainer_state.json", "*_results.json",
    "adapter_config.json",
)  # fmt: skip
SHOWN = 3


@dataclass(frozen=True)
class Leftovers:
    """Describes tensors of a folder that no parameter or buffer of a model accounts for, and other files.

    groups: the beginnings of the tensors' names that no name of the model has, such as mtp.*
    nbytes: of the tensors; of quantised ones, in FP32.
    crc32: of the tensors' names, types, shapes and first elements, by which a changed folder is noticed.
    left_out: names of tensors of types that torch lacks, which are not kept.
    """

    tensors: Sequence[str] = ()
    groups: Sequence[str] = ()
    nbytes: int = 0
    crc32: int = 0
    left_out: Sequence[str] = ()

    def __str__(self) -> str:
        more = f" and {len(self.groups) - SHOWN} more" if len(self.groups) > SHOWN else ""
        groups = f"{', '.join(self.groups[:SHOWN])}{more}"
        return f"{format_quantity(len(self.tensors), 'tensor')} ({groups}), {format_bytes(self.nbytes)}"


def find_leftovers(folder: WeightFolder, known: Iterable[str]) -> Leftovers:
    """Return what a folder holds beyond the model. `known`: all names of its parameters and buffers in checkpoints.

    Raises ConfigError for files that cannot be read.
    """
    known = folder.variants(known)
    beyond = sorted(folder.names - known)
    tensors = [name for name in beyond if folder.is_readable(name)]
    left_out = [name for name in beyond if not folder.is_readable(name)]
    prefixes = {prefix for name in known for prefix in _prefixes(name)}
    groups = dict.fromkeys(_group(name, prefixes) for name in tensors)
    nbytes = sum(folder.numel(name) * folder.dtype(name).itemsize for name in tensors)
    return Leftovers(tensors, list(groups), nbytes, checksum(folder, tensors), left_out)


def checksum(folder: WeightFolder, tensors: Iterable[str]) -> int:
    """Return the CRC-32 of the names, types, shapes and first elements of these tensors.

    Raises ConfigError for tensors that are missing and files that cannot be read.
    """
    crc32 = 0
    for name in tensors:
        crc32 = zlib.crc32(f"{name} {folder.dtype(name)} {folder.shape(name)}".encode(), crc32)
        sample = folder.part(name, 0, min(SAMPLED_ELEMENTS, folder.numel(name)))
        crc32 = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), crc32)
    return crc32


def leftover_files(folder: Path) -> list[Path]:
    """Return the files of a folder, not of folders in it, that an export copies if it does not write its own."""
    return sorted(file for file in folder.iterdir() if _is_kept(file))


def without_links(files: Iterable[Path], folder: Path) -> tuple[list[Path], str]:
    """Return those of a folder's files that may be published, and a note on the links among them that lead away."""
    there = list(files)
    away = [file.name for file in there if leads_away(file, folder)]
    note = f"note: links that lead out of {folder} are not exported: {', '.join(away)}; copy what they lead to"
    return [file for file in there if file.name not in away], note if away else ""


def leads_away(file: Path, folder: Path) -> bool:
    """Return whether a file of a folder is a link to a place outside of the folder and of the hub's cache.

    Snapshots of the cache, and folders that were downloaded with links, consist of links to blobs of the cache.
    """
    from huggingface_hub.constants import HF_HUB_CACHE  # reads the environment when it is imported

    target = file.resolve()
    home = folder.resolve()
    places = (home, Path(HF_HUB_CACHE).resolve(), *_repository(home))
    return not any(target.is_relative_to(place) for place in places)


def _repository(folder: Path) -> Iterator[Path]:
    """Yield the folder of a repository in a cache, of which `folder` is a snapshot."""
    if folder.parent.name == "snapshots":
        yield folder.parents[1]


def _is_kept(file: Path) -> bool:
    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch(file.name, pattern) for pattern in patterns)

    is_named = matches(PATTERNS) and not matches(NOT_KEPT) and not file.name.startswith(".")
    return is_named and file.is_file() and file.stat().st_size <= FILE_BYTES


def _prefixes(name: str) -> Iterator[str]:
    """Yield a, a.b and a.b.c for a.b.c."""
    return accumulate(name.split("."), lambda before, part: f"{before}.{part}")


def _group(name: str, prefixes: Set[str]) -> str:
    first = next((prefix for prefix in _prefixes(name) if prefix not in prefixes), name)
    return name if first == name else f"{first}.*"
