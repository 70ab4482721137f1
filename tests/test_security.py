"""What a run writes is its owner's, what it reads cannot run code, and it listens to nobody else (test_loopback.py)."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_ray.io.storage.disk_io import create_spill_file
from megatrain_ray.run.run_dir import RunDir
from tests.support.run_folders import begin, in_folder
from tests.support.runs import ROOT

SOURCES = [file for folder in ("megatrain_ray", "io", "engine") for file in sorted((ROOT / folder).rglob("*.py"))]
# Calls that make code, or objects of any class, of what they read.
UNSAFE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "joblib.load", "dill.load",
    "cloudpickle.load", "cloudpickle.loads", "torch.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec",
}  # fmt: skip
# A child that this process started, on their pipe, and nothing that ever was a file.
ON_A_PIPE = {"process_map.py": {"pickle.loads"}}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_directory_is_its_owners_only(tmp_path: Path, open_umask: None, is_there: bool) -> None:
    """One that is made is so from the start, one that was there from the run's begin on."""
    folder = tmp_path / "runs" / "mine"
    if is_there:
        folder.mkdir(parents=True)
        folder.chmod(0o775)
    begin(folder)
    assert mode_of(folder) == 0o700
    assert mode_of(tmp_path / "runs") != 0o700  # where it lies is not a run's


def test_one_that_is_made_is_never_open(tmp_path: Path, open_umask: None) -> None:
    """Tokens and a model of Python's come before the begin."""
    with RunDir.open(in_folder(tmp_path / "run")):
        assert mode_of(tmp_path / "run") == 0o700


def test_whoever_opens_it_finds_it_open_on_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    folder.chmod(0o750)
    begin(folder)
    assert mode_of(folder) == 0o750


def test_what_spills_has_no_name_and_no_other_reader(tmp_path: Path, open_umask: None) -> None:
    fd = create_spill_file(tmp_path / "spill", "state", 4096)
    try:
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
        assert list((tmp_path / "spill").iterdir()) == []
    finally:
        os.close(fd)


def unsafe_calls(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        safe_load = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        pickled = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
        if pickled or (name in UNSAFE and not (name == "torch.load" and safe_load)):
            yield name
        elif name == "yaml.load":
            [_, loader] = node.args
            yield from [] if ast.unparse(loader) == "Loader" and "class Loader(yaml.SafeLoader)" in source else [name]


def imported_bare(source: str) -> Iterator[str]:
    """Yield unsafe functions that are imported by name: `from pickle import loads` would hide from the calls' check."""
    modules = {name.partition(".")[0] for name in UNSAFE}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in UNSAFE)


def test_nothing_pickled_is_read() -> None:
    found = {}
    for file in SOURCES:
        source = file.read_text()
        found[file.name] = {*unsafe_calls(source), *imported_bare(source)} - ON_A_PIPE.get(file.name, set())
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_an_unsafe_call_is_noticed() -> None:
    source = "import torch\ntorch.load('a')\ntorch.load('a', weights_only=True)\nnumpy.load('a', allow_pickle=True)\n"
    assert list(unsafe_calls(source)) == ["torch.load", "numpy.load"]
    assert list(imported_bare("from pickle import loads")) == ["pickle.loads"]
