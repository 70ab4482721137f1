"""Which files data.path means."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.find_files import find_files
from tests.support.texts import write


def names(folder: Path, *patterns: str) -> list[str]:
    return [str(file.relative_to(folder)) for file in find_files([str(folder / p) for p in patterns])]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "empty").mkdir()
    write(tmp_path, c="", a="")
    write(tmp_path / "b", x_jsonl="", README_md="")
    write(tmp_path / "b" / "deep", z_jsonl_zst="", y_PARQUET="")
    (tmp_path / ".hidden" / "h.txt").touch()
    (tmp_path / "b" / ".h.txt").touch()
    return tmp_path


def test_paths_globs_folders_and_lists_give_files_in_a_stable_order(tree: Path) -> None:
    deep = ["b/deep/y.PARQUET", "b/deep/z.jsonl.zst"]
    assert names(tree, "c.txt", "*.txt") == ["c.txt", "a.txt", "c.txt"]
    assert names(tree, ".") == ["a.txt", *deep, "b/x.jsonl", "c.txt"]
    assert names(tree, "b/deep", "a.txt") == [*deep, "a.txt"]
    assert names(tree, "b/[de]*") == deep
    assert names(tree, "b/**/*.jsonl*", "[bc]*") == ["b/deep/z.jsonl.zst", "b/x.jsonl", *deep, "b/x.jsonl", "c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    write(tmp_path, **{"part[1]": "x"})
    assert find_files(str(tmp_path / "part[1].txt")) == (tmp_path / "part[1].txt",)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nothing.txt", "no such file: .*nothing.txt"),
        ("no*.txt", "no file matches .*no\\*.txt"),
        ("b/*", r"README.md is of no known format \(.md\); expected one of .txt, .jsonl, .jsonl.zst, .parquet"),
        (".hidden/none", "no such file"),
        ("b/empty", "empty holds no file of a known format"),
        ("b/emp*", r"no file matches .*b/emp\*"),
    ],
)
def test_what_is_not_there_or_of_no_known_format_is_refused_by_name(tree: Path, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(tree, pattern)


def test_an_empty_list_and_a_folder_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least one"):
        find_files([])
    with pytest.raises(ConfigError, match="holds no file of a known format"):
        find_files(str(tmp_path))
