"""What goes from the cache of tokens, and that nothing goes which is wanted or in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.io.files.owned_folder import MARK_NAME
from megatrain_ray.io.tokens.cache_pruning import UNUSED_DAYS, held, mark_used, prune, size_of, without_mark
from tests.support.texts import tokens_of, write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatrain-ray" / "tokens"


def tokens(folder: Path, **texts: str) -> Path:
    """Return the tokens of one file, which is written if it is new."""
    ((name, text),) = texts.items()
    if not (folder / f"{name}.txt").exists():
        write(folder, **{name: text})
    path: dict[str, Any] = {"path": str(folder / f"{name}.txt"), "tokenizer": "bytes", "seq_len": 4}
    (made,) = tokens_of(DataConfig.model_validate(path), folder)
    return made


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(folder / "meta.json", (then, then))


def test_what_was_unused_for_long_goes_when_more_is_made(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, young = tokens(tmp_path, a="a" * 3000), tokens(tmp_path, b="b")
    age(old, UNUSED_DAYS + 1)
    age(young, UNUSED_DAYS - 1)
    capsys.readouterr()
    new = tokens(tmp_path, c="c")
    assert sorted(cache.iterdir()) == sorted([young, new])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{cache}: ")
    assert "of tokens deleted: their files have changed, or nothing used them for long" in last


def test_what_is_found_is_used(tmp_path: Path, cache: Path) -> None:
    old = tokens(tmp_path, a="a")
    age(old, UNUSED_DAYS + 1)
    assert tokens(tmp_path, a="a") == old
    tokens(tmp_path, b="b")
    assert old.exists()


def test_tokens_of_files_that_have_changed_go(tmp_path: Path, cache: Path) -> None:
    changed, gone, same = tokens(tmp_path, a="a"), tokens(tmp_path, b="b"), tokens(tmp_path, c="c")
    write(tmp_path, a="changed")
    (tmp_path / "b.txt").unlink()  # its disk may be away for a while
    new = tokens(tmp_path, a="changed")
    assert sorted(cache.iterdir()) == sorted([gone, same, new])
    assert new != changed


@pytest.mark.parametrize("spoilt", ["{", "{}", '{"provenance": 1}'])
def test_what_is_strange_stays_until_it_is_old(tmp_path: Path, cache: Path, spoilt: str) -> None:
    folder = tokens(tmp_path, a="a")
    (folder / "meta.json").write_text(spoilt)
    assert prune(cache) == 0
    assert folder.exists()
    age(folder, UNUSED_DAYS + 1)
    assert prune(cache) > 0
    assert list(cache.iterdir()) == []


def test_what_has_no_mark_or_is_linked_stays(tmp_path: Path, cache: Path) -> None:
    unmarked, linked, old = tokens(tmp_path, a="a"), tokens(tmp_path, b="b"), tokens(tmp_path, c="c")
    (unmarked / MARK_NAME).unlink()
    linked.rename(tmp_path / "moved")
    linked.symlink_to(tmp_path / "moved")
    for folder in (unmarked, linked, old):
        age(folder, UNUSED_DAYS + 1)
    assert without_mark(cache) == sorted([unmarked, linked])
    assert prune(cache) > 0
    assert sorted(cache.iterdir()) == sorted([unmarked, linked])
    assert (tmp_path / "moved" / "meta.json").exists()


def test_what_another_process_holds_stays(tmp_path: Path, cache: Path) -> None:
    folder = tokens(tmp_path, a="a")
    age(folder, UNUSED_DAYS + 1)
    code = (
        "import sys; from pathlib import Path; from megatrain_ray.io.tokens.cache_pruning import held\n"
        "with held([Path(sys.argv[1])]): print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert prune(cache) == 0
    child.communicate()
    size = size_of(cache)[1]
    assert prune(cache) == size > 0


def test_what_is_held_stays_and_locks_end_with_the_block(tmp_path: Path, cache: Path) -> None:
    folder = tokens(tmp_path, a="a")
    age(folder, UNUSED_DAYS + 1)
    with held([folder, folder]), held([folder, tmp_path / "absent"]):
        assert prune(cache) == 0
    assert prune(cache) > 0


def test_what_is_being_made_is_left_alone(tmp_path: Path, cache: Path) -> None:
    (cache / f".{'0' * 32}.partial").mkdir(parents=True)
    (cache / f".{'0' * 32}.partial" / "meta.json").write_text("{")
    age(cache / f".{'0' * 32}.partial", 99)
    assert prune(cache) == 0
    assert size_of(cache) == (0, 0)


def test_a_cache_that_can_only_be_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    folder = tokens(tmp_path, a="a")
    age(folder, UNUSED_DAYS + 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    mark_used(folder)
    assert prune(cache) == 0
    with held([folder]):
        pass
    assert folder.exists()
