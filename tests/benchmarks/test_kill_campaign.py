"""The kill campaign recognises phases by functions on the stack: they must exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_layering import ROOT, sources


def frames() -> Iterator[tuple[str, str]]:
    """Yield the file and the function of each phase that is recognised by a stack."""
    for path in (ROOT / "benchmarks" / "kill_campaign").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "by_stack":
                _, file, *functions = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                yield from ((str(file), str(function)) for function in functions)


def test_functions_of_phases_exist() -> None:
    defined = {
        (path.name, node.name)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    found = set(frames())
    assert len(found) > 10
    assert found - defined == set()
