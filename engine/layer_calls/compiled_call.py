"""Runs a function as one graph for each kind of call, compiled in a rehearsal and never within a step."""

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
    """Return the options for `torch.compile`."""
    # Not at the top: the compiler takes a second to import, and most processes compile nothing.
    from megatrain_ray.engine.layer_calls.partition import Partitioner

    return {
        # Dropout draws the same numbers as uncompiled: they depend on the seed that the step sets, not on the
        # compiler's kernels.
        "fallback_random": True,
        # Compile in this process: a pool of processes would have to be ended in every way in which a worker can end.
        "compile_threads": 1,
        "custom_partitioner_fn": Partitioner(),
        # Sum up to 16 rows of a token's experts within one thread. As a reduction, which torch (2.11 to 2.13) takes for
        # 8 and more, it took 2.6 ms on an H100 instead of 0.8: 8 rows of 2048 for each of 65,536 tokens.
        "unroll_reductions_threshold": 17,
    }


def keep_compiled_graphs() -> None:
    """Keep compiled kernels of this process and its children in this package's cache folder, for a second start.

    Call it before the first compilation. A folder that the user has named in torch's own variable stays.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its default into the variable as soon as anything imports the compiler.
    if os.environ.get(CACHE_VARIABLE) in (None, default_cache_dir()):
        with suppress(RuntimeError):  # no home folder: keep torch's temporary folder
            os.environ[CACHE_VARIABLE] = str(cache_folder() / "compiled")


class CompiledCall:
    """Calls a function compiled if that kind of call was rehearsed, else uncompiled. Compute thread only."""

    def __init__(
        self, name: str, function: Callable[..., Any], activation_budget: float = 1.0, inner: CompiledCall | None = None
    ) -> None:
        """Prepare the compilation of `function`, named `name` in the log; nothing is compiled yet.

        activation_budget: share of the activations wanted by the backward that the forward keeps (LayerPlan).
        inner: a call made within this one that has graphs of its own; it is rehearsed and given up together with it.
        """
        self.function = function
        self.problem: str | None = None  # why it is not compiled
        self._name = name
        self._inner = inner
        self._budget = activation_budget
        self._compiled: Callable[..., Any] = torch.compile(
            own_code(_call), fullgraph=True, dynamic=False, options=compiler_options()
        )
        self._rehearses = False
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.problem is not None:
            return self.function(*args, **kwargs)
        if self._rehearses:
            with functorch_config.patch(activation_memory_budget=self._budget):  # read when a graph is partitioned
                return self._compiled(self, args, kwargs)
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(self, args, kwargs)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Compile the calls of the block, and backwards of their results, if no earlier call was of the same kind."""
        self._rehearses = True
        try:
            with self._inner.rehearsal() if self._inner else nullcontext():
                yield
        finally:
            self._rehearses = False

    def give_up(self, error: Exception) -> None:
        """Run uncompiled from now on, because of an error that a rehearsal raised."""
        self.problem = problem_in(error)
        if self._inner:
            self._inner.problem = self.problem
        log.warning("%s run uncompiled: %s", self._name, self.problem)

    def uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is unlike all rehearsed calls, and log a warning the first time."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s run uncompiled for a call unlike those compiled before the first step", self._name)
        with torch.compiler.set_stance("default"):  # functions that the model compiles itself (flex attention) stay so
            return self.function(*args, **kwargs)


def _call(call: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the call. This is what is compiled; the interpreter runs it only if no compiled graph fits the call."""
    if torch.compiler.is_compiling():
        return call.function(*args, **kwargs)
    return call.uncompiled(args, kwargs)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a code object of its own, by which the compiler stores and limits its graphs."""
    assert isinstance(function, types.FunctionType)
    return types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def problem_in(error: Exception) -> str:
    """Return the class, first sentence and explanation of a compiler error, whose message may be pages long."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if first.endswith(":"):
        first = f"{first} {''.join(others[:1])}"
    marked = [line.removeprefix("Explanation: ") for line in others if line.startswith("Explanation: ")]
    return f"{type(error).__name__}: {'. '.join([first, *marked[:1]])}"
