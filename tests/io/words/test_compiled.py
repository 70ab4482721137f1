"""C files that are compiled on first use: never a library of other sources than those that are there."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from megatrain_ray.io.words.compile_c import declare, load_compiled


def test_a_change_of_an_included_file_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    source, header = tmp_path / "source.c", tmp_path / "header.h"
    source.write_text('#include "header.h"\nint value(void) { return VALUE; }\n')
    for value in (1, 2):
        header.write_text(f"#define VALUE {value}\n")
        library = load_compiled(source, ("-shared", "-fPIC"), ctypes.CDLL, (header,))
        assert declare(library.value, ctypes.c_int)() == value


def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte counts: a flipped bit may load and give another number, or end the process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    source = tmp_path / "source.c"
    source.write_text("int value(void) { return 7; }\n")
    load_compiled(source, ("-shared", "-fPIC"), ctypes.CDLL)
    whole = b""
    for at in (100, -40, -1):
        (file,) = (tmp_path / ".cache").rglob("*.so")
        whole = whole or file.read_bytes()
        file.unlink()  # the one that is loaded stays as it is
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at:][1:])
        value = load_compiled(source, ("-shared", "-fPIC"), ctypes.CDLL).value
        (file,) = (tmp_path / ".cache").rglob("*.so")
        assert (file.read_bytes(), declare(value, ctypes.c_int)()) == (whole, 7)
