"""One word has one meaning, and docstrings of the product begin with a sentence (docs/words.md)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.test_layering import ROOT, module_name, sources

# A docstring that begins with one of these leaves out its subject or its verb. ruff's D401 looks at the verb's mood.
FRAGMENTS = frozenset(
    re.findall(
        r"\w+",
        """a all also an and another any as at both but by each every for from how if in it its no nobody not nothing of
        on one only or same so such that the their these they this those three two what when where which while who whose
        with""",
    )
)
PAGE = ROOT / "docs" / "words.md"


def definitions() -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every module, class and function of the product, with its module's name."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield module_name(path), node


def names() -> dict[str, set[str]]:
    """Return all names that the product gives to classes, functions, parameters and fields, and in which modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, node in definitions():
        if not isinstance(node, ast.Module):
            found[node.name].add(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                found[argument.arg].add(module)
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    found[line.target.id].add(module)
    return found


def rows() -> list[tuple[str, str, str]]:
    """Return the table of the page: word, meaning, and names that it replaces."""
    table = [line.split("|")[1:4] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(word.strip(), meaning.strip(), instead.strip()) for word, meaning, instead in table[1:]]


def test_each_class_name_is_defined_once() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    for module, node in definitions():
        if isinstance(node, ast.ClassDef):
            defined[node.name].append(module)
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_docstrings_begin_with_a_sentence() -> None:
    fragments = []
    for module, node in definitions():
        text = ast.get_docstring(node)
        if text and text.split()[0].strip("`,.:").lower() in FRAGMENTS:
            fragments.append(f"{module}: {text.splitlines()[0]}")
    assert fragments == []


def test_each_word_has_one_meaning() -> None:
    words = [word for word, _, _ in rows()]
    assert len(words) > 50
    assert sorted(set(words)) == sorted(words)


def test_replaced_names_stay_replaced() -> None:
    replaced = {name for _, _, instead in rows() for name in re.findall(r"`(\w+)`", instead)}
    assert len(replaced) > 20
    used = names()
    assert {name: used[name] for name in replaced if name in used} == {}
