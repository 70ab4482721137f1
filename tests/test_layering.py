"""Layers import only downwards; io and engine never bring ray in; no await inside a torch context manager."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUNDATION = {"config", "config_file", "config_problems", "errors", "units", "trace"}
LEVELS = {"foundation": 0, "io": 1, "engine": 2, "orchestration": 3}


def level_of(module: str) -> int:
    """Of a dotted name inside megatrain_ray."""
    first = module.removeprefix("megatrain_ray").lstrip(".").split(".")[0]
    if first in FOUNDATION:
        return LEVELS["foundation"]
    return LEVELS.get(first, LEVELS["orchestration"])


def sources() -> list[Path]:
    return sorted(
        [*(ROOT / "megatrain_ray").glob("*.py"), *(ROOT / "io").glob("*.py"), *(ROOT / "engine").glob("*.py")]
    )


def module_name(path: Path) -> str:
    folder = path.parent.name
    return f"megatrain_ray.{path.stem}" if folder == "megatrain_ray" else f"megatrain_ray.{folder}.{path.stem}"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    own = level_of(module_name(path))
    for name in imports(path):
        if name.startswith("megatrain_ray."):
            assert level_of(name) <= own, f"{module_name(path)} imports {name}"
        top = name.split(".")[0]
        if own < LEVELS["orchestration"]:
            assert top != "ray", f"{module_name(path)} imports ray"
        assert top not in ("engine", "io") or name == "io", f"{module_name(path)} imports {name} from the checkout"


def test_importing_engine_and_io_does_not_import_ray() -> None:
    modules = [module_name(p) for p in sources() if p.parent.name in ("io", "engine")]
    code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *modules], check=True, cwd=ROOT)


def test_the_linked_folders_are_no_packages() -> None:
    """With an __init__.py a Python started in the checkout would take io/ for the standard library's io."""
    for folder in ("io", "engine"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "megatrain_ray" / folder).is_symlink()
        standard = {p.stem for p in (ROOT / folder).glob("*.py")} & set(sys.stdlib_module_names)
        assert not standard


@pytest.mark.parametrize(("needle", "owner"), [("torch.cuda", "cuda_device.py"), ("kvikio", "kvikio_store.py")])
def test_one_owner(needle: str, owner: str) -> None:
    code = [p.name for p in sources() if any(_mentions(node, needle) for node in ast.walk(ast.parse(p.read_text())))]
    assert set(code) <= {owner}


def _mentions(node: ast.AST, needle: str) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) == needle
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == needle or alias.name == needle for alias in node.names)
    return False


# Grad mode, current stream and saved-tensor hooks belong to a thread: a task that is suspended inside one of these
# would leave it to whatever runs next.
TORCH_CONTEXTS = (
    "torch.",
    "saving",
    "activate",
    "sdpa_kernel",
    "bound",
    "no_grad",
    "enable_grad",
    "saved_tensors_hooks",
)


def awaits_in_torch_contexts(tree: ast.AST) -> list[int]:
    """Lines of `with` blocks over a torch context that contain an await or a yield to the event loop."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(
            any(name in ast.unparse(item.context_expr) for name in TORCH_CONTEXTS) for item in node.items
        ):
            inner = [n for statement in node.body for n in ast.walk(statement)]
            if any(isinstance(n, ast.Await | ast.AsyncWith | ast.AsyncFor) for n in inner):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_no_await_inside_a_torch_context(path: Path) -> None:
    assert awaits_in_torch_contexts(ast.parse(path.read_text())) == []


def test_an_await_inside_a_torch_context_would_be_seen() -> None:
    code = "async def f():\n    with torch.no_grad():\n        await g()\n"
    assert awaits_in_torch_contexts(ast.parse(code)) == [2]
