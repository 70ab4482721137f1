"""The driver's part of the data: where tokens go, and what is told."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.io.files.disk_errors import DiskError
from megatrain_ray.io.tokens.token_files import read_meta
from tests.support.disk_faults import DiskCall, Moments, disk_calls
from tests.support.texts import tokens_of, write


def data(path: Any, **changes: Any) -> DataConfig:
    return DataConfig.model_validate({"path": path, "tokenizer": "bytes", "seq_len": 4, **changes})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain-ray" / "tokens"


def test_tokens_go_to_the_users_cache_a_folder_a_source(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, a="text a", b="text b")
    both = [{"path": str(tmp_path / f"{name}.txt"), "weight": 1} for name in "ab"]
    folders = tokens_of(data(both), tmp_path / "run")
    assert sorted(folders) == sorted(cache.iterdir())
    assert tokens_of(data(both[1]["path"]), tmp_path / "run") == (folders[1],)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("packing", "vocab_size", "add_eos", "num_tokens"),
    [(False, 257, None, 7), (False, 256, None, 6), (False, 257, False, 6), (True, 257, None, 6)],
)
def test_texts_alone_end_with_the_eos_token_if_the_model_has_it(
    tmp_path: Path, cache: Path, packing: bool, vocab_size: int, add_eos: bool | None, num_tokens: int
) -> None:
    settings = data(write(tmp_path, a="text a"), packing=packing, add_eos=add_eos)
    (folder,) = tokens_of(settings, tmp_path, vocab_size)
    meta = read_meta(folder)
    assert meta is not None
    assert meta.num_tokens == num_tokens


def test_it_says_once_what_it_made_and_skipped(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, a_jsonl='{"text": "abcdef"}\n{"text": ""}\n' + "{\n" * 7)
    settings = data(str(tmp_path / "a.jsonl"), bad_records="skip")
    tokens_of(settings, tmp_path)
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"tokenized {tmp_path / 'a.jsonl'}: 1 documents, 6 tokens in 0.")
    assert told[0].endswith(" tokens/s")
    assert told[1] == f"skipped 1 empty texts of {tmp_path / 'a.jsonl'}"
    assert told[2] == f"skipped 7 records of {tmp_path / 'a.jsonl'} that hold no text:"
    assert [line.partition("line ")[2].partition(":")[0] for line in told[3:-1]] == ["3", "4", "5", "6", "7"]
    assert told[-1] == "  and 2 more"
    tokens_of(settings, tmp_path)
    assert capsys.readouterr().err == ""


def test_without_a_cache_they_go_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write(tmp_path, a="text")
    (folder,) = tokens_of(data(str(tmp_path / "a.txt")), tmp_path)
    assert folder.parent == tmp_path / "tokens"
    assert read_meta(folder) is not None
    assert f"tokens are kept in {tmp_path / 'tokens'}: the user's cache cannot" in capsys.readouterr().err


def test_tokens_in_a_cache_that_cannot_be_written_to_are_used(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    write(tmp_path, a="text", b="other")
    settings = data(str(tmp_path / "a.txt"))
    folders = tokens_of(settings, tmp_path)
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert tokens_of(settings, tmp_path / "run") == folders
    assert tokens_of(data(str(tmp_path / "b.txt")), tmp_path)[0].parent == tmp_path / "tokens"
    assert sorted(cache.iterdir()) == sorted(folders)


def test_where_the_cache_fails_or_a_kill_came_is_told_or_unseen(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the cache fails once; and every state that a kill would leave of it is gone on from."""
    settings, home = data(write(tmp_path, a="text a")), tmp_path / "cache"
    home.mkdir()
    calls: list[DiskCall] = []
    moments = Moments(home, tmp_path / "moments")

    def see(call: DiskCall) -> None:
        calls.append(call)
        moments(call)

    with disk_calls(home, see):
        (made,) = tokens_of(settings, tmp_path)
    expected = read_meta(made)
    errors = cycle([errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
    for failing, number in zip(dict.fromkeys(calls), errors, strict=False):
        shutil.rmtree(home)
        home.mkdir()
        try:
            with disk_calls(home, failing_at(failing, number, home)):
                tokens_of(settings, tmp_path)
        except DiskError as error:
            assert str(home) in str(error), failing
            assert os.strerror(number) in str(error), failing
            assert "XDG_CACHE_HOME" in str(error), failing
        assert list(home.rglob("*.partial")) == [], failing
        assert read_meta(tokens_of(settings, tmp_path)[0]) == expected, failing
    for call, folder in moments.all:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        (again,) = tokens_of(settings, tmp_path)
        assert again.is_relative_to(folder), call
        assert read_meta(again) == expected, call
        assert list(folder.rglob("*.partial")) == [], call


def failing_at(failing: DiskCall, number: int, home: Path) -> Callable[[DiskCall], None]:
    def fail(call: DiskCall) -> None:
        if call == failing:
            raise OSError(number, os.strerror(number), str(home / call.path))

    return fail


def test_a_relative_cache_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG specification says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, a="text")
    (folder,) = tokens_of(data(str(tmp_path / "a.txt")), tmp_path)
    assert folder.parent == tmp_path / ".cache" / "megatrain-ray" / "tokens"
