"""Finds the images of a record of chats, and reads their bytes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from megatrain_ray.io.files.file_identity import file_identity
from megatrain_ray.io.records.read_records import RecordError, as_mapping
from megatrain_ray.io.tokens.image_files import StoredImage, identity_if_there
from megatrain_ray.read_file import regular_file

IMAGE = "m3gaimage"  # stands in a turn for an image: text that no template and no turn contains
UNREAD = "read with data.kind: sft and data.images: true only; set these, or remove it"  # of an image
TAG = "<image>"  # stands there in records that list their images
LIST_KEYS = ("images", "image")  # of records
PART_TYPES = ("image", "image_url")
SOURCE_KEYS = (
    "image",
    "image_url",
    "url",
    "path",
    "base64",
    "bytes",
)  # of a part, or of what stands under one of these
FILE_URL = "file://"
MOST_BYTES = 256 << 20  # of a file


def without_images(record: Any, folder: Path) -> tuple[dict[str, Any], list[StoredImage]]:
    """Return a record with IMAGE in place of each image of its turns, and the images. Raises RecordError.

    folder: where relative paths start.
    """
    turns, sources = take_images(record)
    images = []
    for number, source in enumerate(sources, 1):
        try:
            images.append(read_image(source, folder))
        except RecordError as error:
            raise RecordError(f"image {number}: {error}") from None
    return turns, images


def take_images(record: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return a record with IMAGE in place of each image of its turns, and what it says of each image, in order.

    An image is a part of a turn, `{"type": "image", "path": …}`. A part without a source, and `<image>` in a text, are
    the next of those that the record lists under `images`. Raises RecordError.
    """
    fields = as_mapping(record)
    given = [fields[key] for key in LIST_KEYS if fields.get(key) not in (None, [], "")]
    if len(given) > 1:
        raise RecordError("both image and images name images; keep one of the two keys")
    listed = given[0] if given and isinstance(given[0], list) else given
    finder = _Finder(listed)
    turns = {key: finder.placed(value) for key, value in fields.items() if key not in LIST_KEYS}
    if finder.num_taken != len(listed):
        raise RecordError(
            f"it lists {len(listed)} images, and its turns have places for {finder.num_taken}: write {TAG} in a text "
            'where an image stands, or {"type": "image"} among the parts of a turn'
        )
    return turns, finder.images


class _Finder:
    def __init__(self, listed: list[Any]) -> None:
        self._listed = listed
        self.num_taken = 0  # of the listed ones
        self.images: list[Any] = []

    def placed(self, value: Any) -> Any:
        """Return a value of a record with its images replaced."""
        if isinstance(value, list):
            return [self.placed(part) for part in value]
        if isinstance(value, dict):
            return (
                self._part(value) if value.get("type") in PART_TYPES else {k: self.placed(v) for k, v in value.items()}
            )
        if isinstance(value, str):
            return self._text(value)
        return value

    def _text(self, text: str) -> str:
        if IMAGE in text:
            raise RecordError(f"a text holds {IMAGE}, by which this program marks images; write it otherwise")
        if not self._listed:
            return text
        first, *others = text.split(TAG)
        for _ in others:
            self._take()
        return IMAGE.join([first, *others])

    def _part(self, part: Mapping[str, Any]) -> dict[str, str]:
        if part.get("text"):
            raise RecordError(f"a part is both an image and the text {part['text']!r:.40}; make two of it")
        sources = [part[key] for key in SOURCE_KEYS if part.get(key) not in (None, "")]
        if len(sources) > 1:
            raise RecordError("a part names its image twice; keep one of its keys")
        if sources:
            self.images.append(sources[0])
        else:
            self._take()
        return {"type": "text", "text": IMAGE}

    def _take(self) -> None:
        if self.num_taken < len(self._listed):
            self.images.append(self._listed[self.num_taken])
        elif not self._listed:
            raise RecordError("a part is an image without a source; give path, url or base64, or list it under images")
        self.num_taken += 1


def named_files(record: Any, folder: Path) -> list[list[Any]]:
    """Return path and identity of each image file that a record names, the path only of one that is not there."""
    try:
        sources = take_images(record)[1]
    except RecordError:
        return []
    found = []
    while sources:
        if isinstance(source := sources.pop(), Mapping):
            sources += [source[key] for key in SOURCE_KEYS if source.get(key)]
        elif isinstance(source, str) and not source.startswith("data:"):
            path = _path_of(source, folder).absolute()
            found.append([str(path), *identity_if_there(path)])
    return found


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
        named = [source[key] for key in SOURCE_KEYS if source.get(key) not in (None, "", b"")]
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
        raise RecordError(f"cannot read {path}: {error.strerror} (relative paths start at {folder})") from None


def _decoded(url: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise RecordError(f"expected data:image/…;base64,…, got {url!r:.40}")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise RecordError(f"its base64 text cannot be decoded: {error}") from None
