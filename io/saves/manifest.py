"""Describes what a save consists of. docs/save_format.md documents the schema, which is versioned.

Positions of state are *logical*: they count elements of a layer without padding. So they mean the same for any number
of shards. The last key of the file is a checksum of everything before it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.config.groups import SaveCompression
from megatrain_ray.errors import ConfigError, DamagedSaveError, MegatrainError
from megatrain_ray.io.files.disk_errors import UnreadableError, explained
from megatrain_ray.read_file import parse_json, regular_file

FORMAT_VERSION: Final = 1
MANIFEST_NAME = "manifest.json"
WIDE_KIND = "wide"  # FP32 values of frozen parameters, where the working copy is bf16
WEIGHT_KINDS = ("working", "master", WIDE_KIND)  # all other kinds are optimizer state

ITEMSIZES = {"working": 2, "residual": 2, "master": 4, WIDE_KIND: 4}  # bytes of an element of weights, by kind
MOMENT_SIZES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class PieceEntry:
    """Locates elements [start, stop) of one kind of one layer: `nbytes` at `offset` in a blob.

    crc32: zlib's CRC-32 of the elements' bytes; if they are compressed, continued over the stored bytes.
    """

    layer: str
    start: int
    stop: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class BlobEntry:
    """Describes a blob: one kind of state, written by one optimizer shard (a part of the save).

    pieces: they lie one after the other, each at a multiple of 4096 bytes.
    """

    name: str
    kind: str
    compression: SaveCompression
    nbytes: int
    pieces: tuple[PieceEntry, ...]


@dataclass(frozen=True)
class PartManifest:
    """Lists what one optimizer shard wrote."""

    part: int
    blobs: tuple[BlobEntry, ...]


@dataclass(frozen=True)
class ParameterEntry:
    """Describes a parameter of a layer, whose elements begin at `start`.

    tied_to: the parameter whose elements it shares; None: it has its own.
    fp32: whether the model reads it in FP32 while others are bf16.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tied_to: str | None = None
    fp32: bool = False


@dataclass(frozen=True)
class LayerEntry:
    """Describes a layer and which of its state the save holds.

    logical_size: number of elements.
    num_frozen: how many elements, the last ones, are not trained. Only their weights are saved: `working` or `master`,
        and `wide` for those that are `fp32`, which come last.
    num_muon: how many of the trained elements, the last of them, have no `v`.
    base_crc32: if given, the save leaves out the weights of frozen elements too. They come from where the run began,
        and this is zlib's CRC-32 of their bytes.
    """

    name: str
    logical_size: int
    parameters: tuple[ParameterEntry, ...]
    num_frozen: int = 0
    num_muon: int = 0
    base_crc32: int | None = None

    def size_of(self, kind: str) -> int:
        """Return how many elements of one kind the save holds."""
        start, stop = self.span_of(kind)
        return stop - start

    def span_of(self, kind: str) -> tuple[int, int]:
        """Return which elements of one kind the save holds: from the first to the second one, exclusively."""
        if kind not in WEIGHT_KINDS:
            return 0, self.num_trained - (self.num_muon if kind == "v" else 0)
        stop = self.logical_size if self.base_crc32 is None else self.num_trained
        frozen = (p for p in self.parameters if p.tied_to is None and self.num_trained <= p.start < stop)
        wide = min([stop, *(p.start for p in frozen if p.fp32)])
        return (wide, stop) if kind == WIDE_KIND else (0, wide)

    @property
    def num_trained(self) -> int:
        return self.logical_size - self.num_frozen


@dataclass(frozen=True)
class SaveTiming:
    """Reports what a save cost.

    predicted_stall_s, stall_s: longest time that it held up updates, as predicted and as measured.
    write_s: time that it took to write.
    nbytes: its bytes on the disk.
    """

    predicted_stall_s: float
    stall_s: float
    write_s: float
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """Describes a whole save.

    step: completed updates. AdamW counted `optimizer_step` of them; `num_skipped` changed nothing.
    itemsize: bytes of an element, by kind.
    moments: type of `m` and `v`.
    data: the data position, as plain JSON.
    model: the model's configuration, as plain JSON.
    generation_config: the model's generation_config.json, if it came with one.
    config: the run's configuration, as plain JSON.
    run: the token of the run's directory (io/files/owned_folder.py); None in saves of earlier releases.
    """

    version: Literal[1]
    step: int
    optimizer_step: int
    num_skipped: int
    precision: str
    itemsize: dict[str, int]
    layers: tuple[LayerEntry, ...]
    data: dict[str, Any]
    model: dict[str, Any]
    config: dict[str, Any]
    parts: tuple[PartManifest, ...]
    generation_config: dict[str, Any] | None = None
    timing: SaveTiming | None = None
    moments: str = "fp32"
    run: str | None = None

    def to_json(self) -> bytes:
        """Return the bytes of the manifest file."""
        return _sealed(TypeAdapter(Manifest).dump_json(self))

    def blobs(self) -> Iterator[BlobEntry]:
        return (blob for part in self.parts for blob in part.blobs)

    def check_base(self, checksums: Sequence[int | None]) -> None:
        """Raise ConfigError unless the frozen weights that were loaded are those that the run began with.

        checksums: CRC-32 of the frozen elements of each layer, where the save leaves them out; else None.
        """
        pairs = zip(self.layers, checksums, strict=True)
        others = [layer.name for layer, found in pairs if layer.base_crc32 not in (None, found)]
        if others:
            raise ConfigError(
                f"the run's base model has changed: the frozen weights of {others[0]} (and {len(others) - 1} more "
                "layers) are not those that the run began with, and its saves hold adapters alone; put the model back "
                "to what it was, or export the adapter and go on from it (lora.path) in another run_dir"
            )

    def gaps(self) -> list[str]:
        """Return descriptions of what the parts leave out or hold twice; empty if all is there once."""
        wanted = {(layer.name, kind): layer.span_of(kind) for layer in self.layers for kind in self.itemsize}
        spans: dict[tuple[str, str], list[tuple[int, int]]] = {key: [] for key in wanted}
        for blob in self.blobs():
            for piece in blob.pieces:
                spans.setdefault((piece.layer, blob.kind), []).append((piece.start, piece.stop))
        return [
            f"{kind} of {layer}: expected each of {stop - start} elements once, got {sorted(found)[:4]}…"
            for (layer, kind), found in spans.items()
            for start, stop in [wanted.get((layer, kind), (0, 0))]
            if not _cover_once(sorted(found), start, stop)
        ]


def read_manifest(save_folder: Path) -> Manifest:
    """Read the manifest of a save. Raises DamagedSaveError, or MegatrainError for another version."""
    path = save_folder / MANIFEST_NAME
    try:
        with explained("read", path):
            sealed = regular_file(path).read_bytes()
    except UnreadableError as error:
        raise DamagedSaveError(f"{error}; without it there is no save") from None
    return parse_manifest(sealed, path)


def parse_manifest(sealed: bytes, path: Path | str) -> Manifest:
    """Return the manifest that a file holds. `path`: of the file, for messages. Raises as read_manifest."""
    try:
        text = _unsealed(sealed)
        values = parse_json(text)
    except ValueError as error:
        raise DamagedSaveError(f"{path} is damaged: {error}") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise MegatrainError(f"{path} has format version {version!r}, this release reads version {FORMAT_VERSION}")
    try:
        manifest = TypeAdapter(Manifest).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DamagedSaveError(f"{path} is damaged: {where}: {first['msg']}") from None
    if problem := next(_problems(manifest), None):
        raise DamagedSaveError(f"{path} is damaged: {problem}")
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what of a manifest does not fit together, though its checksum is right: somebody has edited it."""
    counts = manifest.step, manifest.optimizer_step, manifest.num_skipped
    if min(counts) < 0 or manifest.step != manifest.optimizer_step + manifest.num_skipped:
        yield "step: {} is not optimizer_step + num_skipped: {} + {}".format(*counts)
    fitting = ("bf16",) if "working" in manifest.itemsize else ("fp32", "tf32")
    if manifest.precision not in fitting:
        yield f"precision: {manifest.precision}, though its kinds of state are those of {' or '.join(fitting)}"
    sizes = ITEMSIZES | dict.fromkeys(("m", "v"), MOMENT_SIZES.get(manifest.moments))
    for kind, itemsize in manifest.itemsize.items():
        if sizes.get(kind) != itemsize:
            yield f"itemsize: {kind}: {itemsize}, expected {sizes.get(kind, 'no such kind')}"
    if not manifest.layers:
        yield "layers: there are none"
    if len({layer.name for layer in manifest.layers}) < len(manifest.layers):
        yield "layers: two have one name"
    for layer in manifest.layers:
        yield from _problems_of_layer(layer)
    for blob in manifest.blobs():
        if Path(blob.name).name != blob.name or "\0" in blob.name:
            yield f"parts: {blob.name} is no name of a file in the folder"
    yield from manifest.gaps()


def _problems_of_layer(layer: LayerEntry) -> Iterator[str]:
    position = 0
    for p in layer.parameters:
        if p.start != position or min(p.shape, default=0) < 0:
            yield f"{layer.name}: {p.name} of shape {list(p.shape)} from element {p.start} on, expected from {position}"
        position += 0 if p.tied_to else math.prod(p.shape)
    if position != layer.logical_size:
        yield f"{layer.name}: its parameters have {position} elements, expected logical_size: {layer.logical_size}"
    if not 0 <= layer.num_frozen <= layer.logical_size or not 0 <= layer.num_muon <= layer.num_trained:
        yield f"{layer.name}: num_frozen: {layer.num_frozen} and num_muon: {layer.num_muon} of {position} elements"


def _sealed(text: bytes) -> bytes:
    """Return the JSON object `text` with a last key: a checksum of all its bytes except the last brace."""
    body = text.removesuffix(b"}")
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def _unsealed(sealed: bytes) -> bytes:
    """Return the JSON object that `_sealed` was given. Raises ValueError if it is not what was written."""
    match = re.fullmatch(rb'(.*),"crc32":"([0-9a-f]{8})"}\n', sealed, re.DOTALL)
    if match is None:
        raise ValueError("it does not end with its checksum")
    got = f"{zlib.crc32(match[1]):08x}"
    if got != match[2].decode():
        raise ValueError(f"expected checksum {match[2].decode()}, got {got}")
    return match[1] + b"}"


def _cover_once(spans: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Return whether ascending spans cover [start, stop) exactly once."""
    edges = [start, *(edge for span in spans for edge in span), stop]
    meet = all(before == after for before, after in zip(edges[::2], edges[1::2], strict=True))
    return meet and all(first < last for first, last in spans)
