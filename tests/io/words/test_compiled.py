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
