"""docs/code.md lists every room with its sentence, in the order of imports, and tests that pages name are there."""

from __future__ import annotations

import ast
import re

from tests.test_layering import ORDER, ROOT, module_name, room_of

PAGE = ROOT / "docs" / "code.md"


def test_every_room_is_listed_with_its_sentence() -> None:
    rows = dict(re.findall(r"^\* \[(\S+)/\]\(\S+\): (.+)$", PAGE.read_text(), re.MULTILINE))
    folders = [path.parent for top in ("io", "engine", "megatrain_ray") for path in (ROOT / top).rglob("__init__.py")]
    rooms = [folder for folder in folders if folder.name != "megatrain_ray"]
    sentences = {
        room.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        for room in rooms
    }
    assert rows == sentences
    places = [ORDER.index(room_of(module_name(ROOT / name / "x.py"))) for name in rows]
    assert places == sorted(places)


def test_files_to_read_are_there() -> None:
    paths = re.findall(r"\]\(\.\./(\S+?)\)", PAGE.read_text())
    assert len(paths) > 50
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_tests_that_hold_what_peers_had_wrong_are_there() -> None:
    page = (ROOT / "docs" / "peers_faults.md").read_text()
    named = re.findall(r" \| `(\S+)::(\w+)` \| (?:[\w-]+#\d+(?:, )?)+$", page, re.MULTILINE)
    assert len(named) == len(page.splitlines()) - page.splitlines().index("---|---|---|---") - 1 >= 40
    missing = [(file, name) for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []
