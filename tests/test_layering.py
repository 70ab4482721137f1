"""Rooms import only rooms before them; Ray is known to few; no await inside a torch context manager."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import the rooms that stand before its own, and its own. `__version__` is no module: anybody may read it.
FOUNDATION = (
    "__version__", "escapes", "read_file", "time_limit", "errors", "units", "spans", "virtual_clock", "config",
)  # fmt: skip
IO = (
    "io.files", "io.words", "io.storage", "io.arenas", "io.saves", "io.checkpoints", "io.records", "io.tokens",
    "io.images", "io.chat", "io.rollouts", "io.batching",
)  # fmt: skip
ENGINE = (
    # What the optimizer computes knows elements and no models.
    "engine.layout", "engine.optimizer", "engine.objectives", "engine.model", "engine.device", "engine.layer_calls",
    "engine.discovery", "engine.weights", "engine.plan", "engine.spill", "engine.host", "engine.shards",
    "engine.activations", "engine.gradients", "engine.weights_stream", "engine.step", "engine.measure",
    # What runs a plan does not know how it was made.
    "engine.planner", "engine.planner.memory", "engine.planner.cost", "engine.planner.search",
)  # fmt: skip
ORCHESTRATION = (
    "machine", "model", "accounting", "console", "run", "data", "rollouts", "convert", "profiling", "planning",
    "metrics", "workers", "crew", "driver", "export", "generate", "report", "start_of_run", "training_run",
    "trainer", "bench", "commands", "command_line", "cli", "__main__", "__init__",
)  # fmt: skip
ORDER = (*FOUNDATION, *IO, *ENGINE, *ORCHESTRATION)
WITH_RAY = {"crew", "driver", "metrics.ray_sink"}  # rooms and modules that may import it
MAX_FILES = 12  # of a room, its __init__.py not counted


def room_of(module: str) -> str:
    """Return the room of a dotted name: the longest room that the name is or begins with.

    Names of the package itself, such as megatrain_ray.Trainer, are in the room of its __init__.py.
    """
    name = module.removeprefix("megatrain_ray").lstrip(".")
    rooms = [room for room in ORDER if name == room or name.startswith(f"{room}.")]
    return max(rooms, key=len, default="__init__")


def sources() -> list[Path]:
    """Return the real files, not those that links lead to."""
    return sorted(file for folder in ("megatrain_ray", "io", "engine") for file in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "megatrain_ray" else ("megatrain_ray", *parts))


def imports(code: str) -> Iterator[str]:
    """Dotted names of the modules that the code imports. A name from a package may be a module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            if node.module in PACKAGES:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def packages() -> set[str]:
    folders = {path.parent for path in sources()} | {ROOT / "io", ROOT / "engine"}
    return {module_name(folder / "x.py").removesuffix(".x") for folder in folders}


PACKAGES = packages()


def upwards(module: str, code: str) -> list[str]:
    """Modules of rooms behind that of `module` which it imports."""
    own = ORDER.index(room_of(module))
    ours = (name for name in imports(code) if name.split(".")[0] == "megatrain_ray")
    return [name for name in ours if ORDER.index(room_of(name)) > own]


def test_imports_point_downwards() -> None:
    found = {module_name(path): upwards(module_name(path), path.read_text()) for path in sources()}
    offenders = {f"{module} imports {name}" for module, names in found.items() for name in names}
    assert sorted(offenders) == []


@pytest.mark.parametrize(
    "code",
    [
        "from megatrain_ray import trainer",
        "import megatrain_ray.trainer",
        "from megatrain_ray.trainer import Trainer",
        "from megatrain_ray import Trainer",
        "from megatrain_ray.engine.planner import request",
        "from megatrain_ray.engine.planner.request import Machine",
    ],
)
def test_an_import_upwards_would_be_seen(code: str) -> None:
    assert len(upwards("megatrain_ray.engine.step.engine", code)) == 1
    assert upwards("megatrain_ray.cli", code.replace("import Trainer", "import trainer")) == []


def test_every_module_has_a_room_and_every_room_a_module() -> None:
    rooms = {room_of(module_name(path)) for path in sources()}
    assert rooms == set(ORDER) - {"__version__"}
    inside = [path for path in sources() if path.parent != ROOT / "megatrain_ray"]
    assert [module_name(path) for path in inside if room_of(module_name(path)) == "__init__"] == []


def test_rooms_are_small() -> None:
    folders = {path.parent for path in sources()} - {ROOT / "megatrain_ray"}
    sizes = {
        folder.relative_to(ROOT).as_posix(): sum(f.is_file() and f.suffix != ".pyc" for f in folder.iterdir()) - 1
        for folder in folders
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FILES} == {}


def test_the_coarse_layers_are_those_of_the_design() -> None:
    levels = [(FOUNDATION, IO, ENGINE, ORCHESTRATION).index(group) for group in map(group_of, ORDER)]
    assert all(a <= b for a, b in pairwise(levels))
    assert len(set(ORDER)) == len(ORDER)


def group_of(room: str) -> tuple[str, ...]:
    by_folder = {"io": IO, "engine": ENGINE}
    return by_folder.get(room.split(".")[0], FOUNDATION if room in FOUNDATION else ORCHESTRATION)


def test_few_modules_know_ray() -> None:
    with_ray = [module_name(p) for p in sources() if any(n.split(".")[0] == "ray" for n in imports(p.read_text()))]
    names = [name.removeprefix("megatrain_ray.") for name in with_ray]
    assert [name for name in names if name not in WITH_RAY and room_of(name) not in WITH_RAY] == []


def test_nobody_imports_from_the_checkout() -> None:
    """`engine` and `io` are top-level names only there, and `io` is the standard library's."""
    found = {(module_name(path), name) for path in sources() for name in imports(path.read_text())}
    assert [pair for pair in found if pair[1].split(".")[0] in ("engine", "io") and pair[1] != "io"] == []


def test_what_takes_long_to_import_is_imported_when_it_is_needed() -> None:
    """Engine and io run without Ray. A start imports Transformers, which takes 3 s, while Ray starts."""
    without = set() if find_spec("triton") else {"triton_kernel", "triton_sums"}  # Triton comes with the torch of a GPU
    below = [p for p in sources() if p.relative_to(ROOT).parts[0] in ("io", "engine")]
    modules = [module_name(p) for p in below if p.stem not in without]
    code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)\nassert 'ray' not in sys.modules\n"
    code += "import megatrain_ray.trainer\nassert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *modules], check=True, cwd=ROOT)


def test_the_linked_folders_are_no_packages() -> None:
    """With an __init__.py a Python started in the checkout would take io/ for the standard library's io."""
    for folder in ("io", "engine"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "megatrain_ray" / folder).is_symlink()
        standard = {path.stem for path in (ROOT / folder).rglob("*")} & set(sys.stdlib_module_names)
        assert not standard


def test_every_room_says_what_it_is_for_and_nothing_else() -> None:
    """Its __init__.py is one sentence."""
    rooms = {path.parent for path in sources()} - {ROOT / "megatrain_ray"}
    assert rooms
    for room in rooms:
        tree = ast.parse((room / "__init__.py").read_text())
        assert len(tree.body) == 1, room
        sentence = ast.get_docstring(tree) or ""
        assert sentence.endswith("."), room
        assert "\n" not in sentence, room


CUDA_FILES = {f"engine/device/{name}.py" for name in ("cuda_device", "cuda_info")}


@pytest.mark.parametrize(("needle", "owners"), [("torch.cuda", CUDA_FILES), ("kvikio", {"io/storage/kvikio_store.py"})])
def test_one_owner(needle: str, owners: set[str]) -> None:
    code = [
        p.relative_to(ROOT).as_posix()
        for p in sources()
        if any(_mentions(node, needle) for node in ast.walk(ast.parse(p.read_text())))
    ]
    assert set(code) <= owners


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
    """Yield the lines where an exit stack enters a torch context and the function is suspended later.

    A stack may outlive its block, so every suspension of the function counts that comes after.
    """
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


def test_no_await_inside_a_torch_context() -> None:
    found = {module_name(path): awaits_in_torch_contexts(ast.parse(path.read_text())) for path in sources()}
    assert {module: lines for module, lines in found.items() if lines} == {}


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
