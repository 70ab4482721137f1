"""Which files data.path means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.file_formats import RECORD_SUFFIXES
from megatrain_ray.io.records.find_files import describe_folders, find_files
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
        (
            "b/*",
            r"README.md is of no known format \(.md\); expected .*, .jsonl \(or .jsonl.gz, .zst\), ",
        ),
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


def save_to_disk(folder: Path, *names: str) -> Path:
    """Write the files that the datasets library leaves, without rows."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for name in (*names, "cache-0123.arrow", "dataset_info.json"):
        (folder / name).touch()
    return folder


def test_of_a_saved_data_set_the_files_are_those_that_its_state_names(tmp_path: Path) -> None:
    tables = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    train = save_to_disk(tmp_path / "all" / "train", *tables)
    assert find_files(str(train)) == find_files(str(train), RECORD_SUFFIXES) == tuple(train / name for name in tables)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert find_files(str(tmp_path / "all")) == find_files(str(train))
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"holds the splits train, test; name one of them, as in .*all/train"):
        find_files(str(tmp_path / "all"))
    (train / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="is no whole folder of save_to_disk"):
        find_files(str(train))


def test_files_that_are_passed_over_and_several_splits_are_named(tree: Path) -> None:
    assert list(describe_folders([str(tree / "c.txt"), str(tree / "b" / "deep")])) == []
    assert list(describe_folders(str(tree / "*"))) == [
        f"note: {tree / 'b'}: files of other formats are not read: README.md"
    ]
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "trainer.csv", "a.doc", "a.PDF", "a.c"):
        (tree / "b" / "deep" / name).touch()
    passed_over, splits = describe_folders(str(tree / "b" / "deep"))
    assert passed_over.endswith("are not read: a.PDF, a.c, a.doc")
    assert "several splits are read (test, train)" in splits
    assert splits.endswith(f"name its files: {tree / 'b' / 'deep' / 'train'}*")
    passed_over, _ = describe_folders(str(tree), RECORD_SUFFIXES)
    assert passed_over.endswith(": a.txt, b/README.md, b/deep/a.PDF and 3 more")
