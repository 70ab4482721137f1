"""Finds the images of a record of chats, and reads their bytes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.records.read_records import RecordError, as_mapping
from megatrain_ray.io.tokens.image_files import StoredImage, identity_if_there
from megatrain_ray.read_file import regular_file

IMAGE = "m3gaimage"  # stands in a turn for an image: text that no template and no turn contains
# What is said of an image that is not read.
UNREAD = "read with data.images: true only (data.kind: sft, pairs or unpaired); set that, or remove it"
NEXT_MARK = f"{IMAGE};"  # stands for the next image that the record lists, until it is taken
_MARK = re.compile(rf"{IMAGE}(\d*);")  # with a number: of the record's other images
TAG = "<image>"  # stands there in records that list their images
LIST_KEYS = ("images", "image")  # of records
PART_TYPES = ("image", "image_url")
# Of a part, or of what stands under one of these.
SOURCE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
FILE_URL = "file://"
MOST_BYTES = 256 << 20  # of a file


class RecordImages:
    """Finds the images that a record names.

    An image is a part of a turn, `{"type": "image", "path": …}`. A part without a source, and `<image>` in a text, are
    the next of those that the record lists under `images`.

    fields: the record with a mark in place of each image. Those of equal sources are equal, so that conversations of a
        preference can be compared.
    """

    def __init__(self, record: Any, folder: Path, key: str | None = None) -> None:
        """Mark the images. Raises RecordError for two lists, and for a text that is a mark.

        folder: where relative paths start.
        key: under which the record lists images; None: one of LIST_KEYS.
        """
        fields = as_mapping(record)
        list_keys = LIST_KEYS if key is None else (key,)
        given = [fields[name] for name in list_keys if fields.get(name) not in (None, [], "")]
        if len(given) > 1:
            raise RecordError("both image and images name images; keep one of the two keys")
        self._folder = folder
        self._listed = given[0] if given and isinstance(given[0], list) else given
        self._own: list[Any] = []  # sources of parts, or what is wrong with one; equal ones once
        self._read: dict[int, StoredImage] = {}  # by number: of `_listed`, then of `_own`
        self.fields = {name: self._marked(value) for name, value in fields.items() if name not in list_keys}

    def take(
        self, messages: Iterable[Mapping[str, Any]], tools: object = ()
    ) -> tuple[tuple[dict[str, Any], ...], list[StoredImage]]:
        """Return the messages of a conversation with IMAGE in place of each mark, and its images. Raises RecordError.

        All that the record lists must be in it.
        """
        numbers: list[int] = []
        num_taken = 0

        def note(found: re.Match[str]) -> str:
            nonlocal num_taken
            if found[1]:
                numbers.append(len(self._listed) + int(found[1]))
            else:
                numbers.append(num_taken)
                num_taken += 1
            return IMAGE

        taken = tuple({**m, "content": _MARK.sub(note, m["content"])} if m.get("content") else {**m} for m in messages)
        if IMAGE in repr([tools, *({**message, "content": ""} for message in taken)]):
            raise RecordError("an image may stand in the content of a turn only")
        if num_taken and not self._listed:
            raise RecordError("a part is an image without a source; give path, url or base64, or list it under images")
        if num_taken != len(self._listed):
            raise RecordError(
                f"it lists {len(self._listed)} images, and its turns have places for {num_taken}: write {TAG} in a "
                'text where an image stands, or {"type": "image"} among the parts of a turn'
            )
        return taken, [self._image(number, place) for place, number in enumerate(numbers, 1)]

    def _image(self, number: int, place: int) -> StoredImage:
        source = [*self._listed, *self._own][number]
        if isinstance(source, RecordError):
            raise source
        try:
            if number not in self._read:
                self._read[number] = read_image(source, self._folder)
            return self._read[number]
        except RecordError as error:
            raise RecordError(f"image {place}: {error}") from None

    def named_files(self) -> list[list[Any]]:
        """Return path and identity of each image file that the record names, the path only of one that is missing."""
        sources, found = [*self._listed, *self._own], []
        while sources:
            if isinstance(source := sources.pop(), Mapping):
                sources += _sources(source)
            elif isinstance(source, str) and not source.startswith("data:"):
                path = _path_of(source, self._folder).absolute()
                found.append([str(path), *identity_if_there(path)])
        return found

    def _marked(self, value: Any) -> Any:
        """Return a value of the record with marks in place of its images."""
        if isinstance(value, list):
            return [self._marked(part) for part in value]
        if isinstance(value, dict):
            if value.get("type") in PART_TYPES:
                return {"type": "text", "text": self._mark_of(value)}
            return {key: self._marked(inner) for key, inner in value.items()}
        if not isinstance(value, str):
            return value
        if IMAGE in value:
            raise RecordError(f"a text holds {IMAGE}, by which this program marks images; write it otherwise")
        return value.replace(TAG, NEXT_MARK) if self._listed else value

    def _mark_of(self, part: Mapping[str, Any]) -> str:
        named = _sources(part)
        if not named and not part.get("text"):
            return NEXT_MARK
        source = named[0] if named else None
        if part.get("text"):
            source = RecordError(f"a part is both an image and the text {part['text']!r:.40}; make two of it")
        elif len(named) > 1:
            source = RecordError("a part names its image twice; keep one of its keys")
        if source not in self._own:
            self._own.append(source)
        return f"{IMAGE}{self._own.index(source)};"


def _sources(fields: Mapping[str, Any]) -> list[Any]:
    """Return what stands under SOURCE_KEYS in a part, or in what a part names."""
    found = {key: fields[key] for key in SOURCE_KEYS if fields.get(key) not in (None, "", b"")}
    if isinstance(text := found.get("base64"), str) and not text.startswith("data:"):
        found["base64"] = f"data:image;base64,{text}"
    return list(found.values())


def _path_of(source: str, folder: Path) -> Path:
    is_url = source.startswith(FILE_URL)
    return folder / (unquote(source.removeprefix(FILE_URL).removeprefix("localhost")) if is_url else source)


def read_image(source: Any, folder: Path) -> StoredImage:
    """Return the bytes of an image. Raises RecordError.

    source: bytes, a path, a file: or data: URL, or a mapping with one of these under a key of SOURCE_KEYS.
    folder: where relative paths start.
    """
    if isinstance(source, Mapping):
        content = source.get("bytes")
        named = _sources(source)
        if not named:
            raise RecordError(f"expected a mapping with path, url, base64 or bytes, got {dict(source)!r:.60}")
        return read_image(content or named[0], folder)
    if isinstance(source, bytes):
        return StoredImage(source)
    if not isinstance(source, str) or not source:
        raise RecordError(f"expected a path, a URL, or a mapping with bytes, got {source!r:.60}")
    if source.startswith("data:"):
        return StoredImage(_decoded(source))
    if "://" in source and not source.startswith(FILE_URL):
        raise RecordError(f"{source:.60} is on the net, which is not read while data are; download it and give a path")
    path = _path_of(source, folder)
    try:
        identity = file_identity(regular_file(path))
        if identity[1] > MOST_BYTES:
            raise RecordError(
                f"{path} has {identity[1] >> 20} MiB, and {MOST_BYTES >> 20} are the most; make it smaller"
            )
        return StoredImage(path.read_bytes(), [str(path.absolute()), *identity])
    except OSError as error:
        fetched = "; of an object store or the hub only records are fetched, so give bytes there"
        raise RecordError(
            f"cannot read {path}: {error.strerror} (relative paths start at {folder.absolute()}"
            f"{fetched if isinstance(error, FileNotFoundError) else ''})"
        ) from None


def _decoded(url: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise RecordError(f"expected data:image/…;base64,…, got {url!r:.40}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise RecordError(f"its base64 text cannot be decoded: {error}") from None
