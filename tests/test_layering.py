"""Layers import only downwards; io and engine never bring ray in; no await inside a torch context manager."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUNDATION = {
    "config", "config_file", "config_origins", "config_problems", "config_values", "errors", "spans", "units", "trace",
}  # fmt: skip
LEVELS = {"foundation": 0, "io": 1, "engine": 2, "orchestration": 3}


def level_of(module: str) -> int:
    """Of a dotted name inside megatrain_ray."""
    first = module.removeprefix("megatrain_ray").lstrip(".").split(".")[0]
    if first in FOUNDATION:
        return LEVELS["foundation"]
    return LEVELS.get(first, LEVELS["orchestration"])


def sources() -> list[Path]:
    return sorted(
        [*(ROOT / "megatrain_ray").glob("*.py"), *(ROOT / "io").glob("*.py"), *(ROOT / "engine").rglob("*.py")]
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "megatrain_ray" else ("megatrain_ray", *parts))


def imports(code: str) -> Iterator[str]:
    """Dotted names of the modules that the code imports. A name from the package itself may be a module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            if node.module == "megatrain_ray":
                yield from (f"megatrain_ray.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    own = level_of(module_name(path))
    for name in imports(path.read_text()):
        if name.startswith("megatrain_ray."):
            assert level_of(name) <= own, f"{module_name(path)} imports {name}"
        top = name.split(".")[0]
        if own < LEVELS["orchestration"]:
            assert top != "ray", f"{module_name(path)} imports ray"
        assert top not in ("engine", "io") or name == "io", f"{module_name(path)} imports {name} from the checkout"


@pytest.mark.parametrize(
    "code",
    ["from megatrain_ray import trainer", "import megatrain_ray.trainer", "from megatrain_ray.trainer import Trainer"],
)
def test_an_import_upwards_would_be_seen(code: str) -> None:
    assert list(imports(code)) == ["megatrain_ray.trainer"]
    assert level_of("megatrain_ray.trainer") > level_of("megatrain_ray.engine.step")


PLANNER = "megatrain_ray.engine.planner"


def test_what_runs_a_plan_does_not_know_how_it_was_made() -> None:
    """But for the host of tests and of models that no host holds, which has a simulated disk."""
    runs = [p for p in (ROOT / "engine").glob("*.py") if p.stem != "local_host"]
    assert any(p.name == "streamer.py" for p in runs)
    assert [p.name for p in runs if any(name.startswith(PLANNER) for name in imports(p.read_text()))] == []


def test_the_optimizer_s_arithmetic_knows_elements_and_no_models() -> None:
    below = {"flat_layout", "working_copy", "precision", "shard_layout"}
    for path in (ROOT / "engine" / "optimizer").glob("*.py"):
        engine = [name.split(".")[2] for name in imports(path.read_text()) if name.startswith("megatrain_ray.engine.")]
        assert set(engine) <= {"optimizer"} | below, path.name


def test_importing_engine_and_io_does_not_import_ray() -> None:
    without = set() if find_spec("triton") else {"triton_adamw", "triton_sums"}  # Triton comes with the torch of a GPU
    below = [p for p in sources() if p.relative_to(ROOT).parts[0] in ("io", "engine")]
    modules = [module_name(p) for p in below if p.stem not in without]
    code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nassert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *modules], check=True, cwd=ROOT)


def test_the_linked_folders_are_no_packages() -> None:
    """With an __init__.py a Python started in the checkout would take io/ for the standard library's io."""
    for folder in ("io", "engine"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "megatrain_ray" / folder).is_symlink()
        assert not list((ROOT / folder).rglob("__init__.py"))
        standard = {p.stem for p in (ROOT / folder).glob("*.py")} & set(sys.stdlib_module_names)
        assert not standard


@pytest.mark.parametrize(
    ("needle", "owner"), [("torch.cuda", "engine/cuda_device.py"), ("kvikio", "io/kvikio_store.py")]
)
def test_one_owner(needle: str, owner: str) -> None:
    code = [
        p.relative_to(ROOT).as_posix()
        for p in sources()
        if any(_mentions(node, needle) for node in ast.walk(ast.parse(p.read_text())))
    ]
    assert set(code) <= {owner}


def _mentions(node: ast.AST, needle: str) -> bool:
    names: list[str] = []
    if isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    return any(name == needle or name.startswith(f"{needle}.") for name in names)


@pytest.mark.parametrize(
    ("needle", "code"),
    [
        ("torch.cuda", "import torch.cuda.nvtx"),
        ("torch.cuda", "from torch import cuda"),
        ("torch.cuda", "from torch.cuda import Stream"),
        ("torch.cuda", "from torch.cuda.nvtx import range_push"),
        ("torch.cuda", "torch.cuda.synchronize()"),
        ("kvikio", "import kvikio"),
        ("kvikio", "import kvikio.defaults"),
        ("kvikio", "from kvikio import CuFile"),
    ],
)
def test_a_second_owner_would_be_seen(needle: str, code: str) -> None:
    assert any(_mentions(node, needle) for node in ast.walk(ast.parse(code)))
    assert not any(_mentions(node, f"{needle}x") for node in ast.walk(ast.parse(code)))


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
    """Lines where a torch context is entered that an await, or another suspension, follows in the same function."""
    return sorted({*_in_with_blocks(tree), *_in_exit_stacks(tree)})


def _in_with_blocks(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(_is_torch_context(item.context_expr) for item in node.items):
            inner = [n for statement in node.body for n in ast.walk(statement)]
            if any(_suspends(n) for n in inner):
                yield node.lineno


def _in_exit_stacks(tree: ast.AST) -> Iterator[int]:
    """A stack may outlive its block, so every suspension of the function counts that comes after."""
    for function in ast.walk(tree):
        if isinstance(function, ast.AsyncFunctionDef):
            inner = list(ast.walk(function))
            last = max((n.lineno for n in inner if _suspends(n)), default=0)  # type: ignore[attr-defined]
            entered = [n for n in inner if isinstance(n, ast.Call) and _enters_torch_context(n)]
            yield from (call.lineno for call in entered if call.lineno < last)


def _enters_torch_context(call: ast.Call) -> bool:
    entering = isinstance(call.func, ast.Attribute) and call.func.attr == "enter_context"
    return entering and any(_is_torch_context(argument) for argument in call.args)


def _is_torch_context(expression: ast.expr) -> bool:
    return any(name in ast.unparse(expression) for name in TORCH_CONTEXTS)


def _suspends(node: ast.AST) -> bool:
    return isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor)


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_no_await_inside_a_torch_context(path: Path) -> None:
    assert awaits_in_torch_contexts(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("block", "lines"),
    [
        ("with torch.no_grad():\n        await g()", [2]),
        ("with torch.no_grad():\n        async with g(): pass", [2]),
        ("with ExitStack() as stack:\n        stack.enter_context(torch.no_grad())\n        await g()", [3]),
        ("self.stack.enter_context(device.activate())\n    async for x in g(): pass", [2]),
        ("with torch.no_grad():\n        g()\n    await g()", []),
        ("stack.enter_context(open(path))\n    await g()", []),
    ],
)
def test_an_await_inside_a_torch_context_would_be_seen(block: str, lines: list[int]) -> None:
    assert awaits_in_torch_contexts(ast.parse(f"async def f():\n    {block}\n")) == lines
