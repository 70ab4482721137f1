"""Every way in which a folder of weights can be wrong: refused before anything starts, and the file named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, SINGLE_NAME, WeightFolder

DAMAGED = rf"/{SINGLE_NAME} is damaged or no safetensors file: .*; download the model again"


def tensor(start: int, stop: int, shape: tuple[int, ...] = (4,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


def file(header: Any, num_bytes: int, length: int | None = None) -> bytes:
    """Return a safetensors file written by hand. `length`: what it says is the length of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(num_bytes)


def test_what_the_hand_writes_can_be_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(file({"a": tensor(0, 16), "b": tensor(16, 32)}, 32))
    assert WeightFolder.open(tmp_path).read("b", 1, 3).tolist() == [0, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        file({}, 0, length=1 << 62),
        file({}, 100, length=200 << 20),
        file({}, 100, length=1),
        file(b"hello", 0),
        file(b"[1, 2]", 0),
        file(b"[" * 100_000, 0),
        file(b'{"a": "\xff"}', 0),
        file({"a": {"dtype": "F32"}}, 16),
        file({"a": tensor(0, 16, (-4,))}, 16),
        file({"a": tensor(0, 16, (1 << 62, 4))}, 16),
        file({"a": tensor(0, 16, (5,))}, 16),
        file({"a": tensor(16, 0)}, 16),
        file({"a": tensor(0, 16)}, 8),
        file({"a": tensor(0, 16)}, 24),
        file({"a": tensor(0, 16), "b": tensor(8, 24)}, 24),
        file({"a": tensor(0, 16), "b": tensor(20, 36)}, 36),
        file(json.dumps({"a": tensor(0, 16), "twin": tensor(16, 32)}).replace("twin", "a").encode(), 32),
    ],
    ids=[
        "empty", "shorter than a length", "absurd length", "length beyond the file", "length within the header",
        "no JSON", "a list", "deep", "no UTF-8", "no offsets", "negative shape", "huge shape", "shape of another size",
        "stop before start", "data cut off", "data too long", "overlapping", "with a gap", "a name twice",
    ],
)  # fmt: skip
def test_a_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=DAMAGED):
        WeightFolder.open(tmp_path)


UNREADABLE: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.mkdir(), "Is a directory"),
    (lambda path: path.symlink_to(path.parent / "gone"), "No such file or directory"),
    (lambda path: path.symlink_to("/proc/self/mem"), "(Input/output error|No such device)"),  # even to root
]


@pytest.mark.parametrize(("make", "reason"), UNREADABLE)
@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME, "part.safetensors"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path / name)
    if name == "part.safetensors":
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path / name}: {reason}"):
        WeightFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x.safetensors", "/etc/passwd", "x" * 300, "x\0y"])
def test_an_index_names_files_beside_it(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=r"index\.json names .*, which is not in its folder"):
        WeightFolder.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"3", b'{"weight_map": 3}', b"[" * 100_000])
def test_a_damaged_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / INDEX_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path / INDEX_NAME} is no index of weights"):
        WeightFolder.open(tmp_path)


def test_an_index_alone_and_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=f"{index} names model-00001-of-00002.safetensors, which is not in"):
        WeightFolder.open(tmp_path)
    with pytest.raises(ConfigError, match="json is no folder"):
        WeightFolder.open(index)
