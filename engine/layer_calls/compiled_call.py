"""A function as one compiled graph for each kind of call: compiled at a rehearsal, never within a step."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch._functorch import config as functorch_config

from megatrain_ray.io.files.cache_folder import cache_folder

log = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_options() -> dict[str, Any]:
    """Of `torch.compile`."""
    # Not at the top: the compiler takes a second to import, and most processes compile nothing.
    from megatrain_ray.engine.layer_calls.partition import Partitioner

    return {
        # Dropout draws what it draws uncompiled: a function of the seed that the step sets, not of the compiler's
        # kernels.
        "fallback_random": True,
        # In this process: a pool of compiling processes would have to be ended with every end that a worker can have.
        "compile_threads": 1,
        "custom_partitioner_fn": Partitioner(),
    }


def keep_compiled_graphs() -> None:
    """Compiled kernels are kept in this package's cache folder, so that a second start finds them: in this process and
    its children, before the first is compiled. Where torch's own variable names a folder it stays that."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its default into the variable as soon as anything imports the compiler.
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        with suppress(RuntimeError):  # no home: it stays torch's temporary folder
            os.environ[CACHE_VARIABLE] = str(cache_folder() / "compiled")


class CompiledCall:
    """Calls `function` compiled where that kind of call was rehearsed, and uncompiled where not, with one line in the
    log. Compute thread only."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        activation_budget: float = 1.0,
        inner: CompiledCall | None = None,
    ) -> None:
        """`activation_budget`: share of what a backward wants that the forward keeps for it (LayerPlan). `inner`: what
        is called within and has graphs of its own; it is rehearsed, and given up, with this."""
        self.function = function
        self.problem: str | None = None  # why it is not compiled
        self._name = name
        self._inner = inner
        self._budget = activation_budget
        self._compiled: Callable[..., Any] = torch.compile(
            own_code(_call), fullgraph=True, dynamic=False, options=compiler_options()
        )
        self._rehearses = False
        self._told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.problem is not None:
            return self.function(*args, **kwargs)
        if self._rehearses:
            with functorch_config.patch(activation_memory_budget=self._budget):  # read when a graph is cut in two
                return self._compiled(self, args, kwargs)
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(self, args, kwargs)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Calls of the block, and backwards of what they return, are compiled if no earlier one was like them."""
        self._rehearses = True
        try:
            with self._inner.rehearsal() if self._inner else nullcontext():
                yield
        finally:
            self._rehearses = False

    def give_up(self, error: Exception) -> None:
        """From now on uncompiled, because of what a rehearsal raised."""
        self.problem = problem_in(error)
        if self._inner:
            self._inner.problem = self.problem
        log.warning("%s run uncompiled: %s", self._name, self.problem)

    def uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call unlike those rehearsed."""
        if not self._told:
            self._told = True
            log.warning("%s run uncompiled for a call unlike those compiled before the first step", self._name)
        with torch.compiler.set_stance("default"):  # what it may have compiled of its own (flex attention) still is
            return self.function(*args, **kwargs)


def _call(call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is compiled; run by the interpreter only where no compiled graph fits the call."""
    if torch.compiler.is_compiling():
        return call.function(*args, **kwargs)
    return call.uncompiled(args, kwargs)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: the compiler keeps, and limits the number of, its graphs by
    code object."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def problem_in(error: Exception) -> str:
    """Class, first sentence and explanation of what the compiler says, which may be pages."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if first.endswith(":"):
        first = f"{first} {''.join(others[:1])}"
    marked = [line.removeprefix("Explanation: ") for line in others if line.startswith("Explanation: ")]
    return f"{type(error).__name__}: {'. '.join([first, *marked[:1]])}"
