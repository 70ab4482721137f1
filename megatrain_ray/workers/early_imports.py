"""Imports slow modules before they are needed: actors while they wait for a plan, the driver while Ray starts."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from megatrain_ray.console.interrupts import ENDINGS
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError
from megatrain_ray.machine.no_collections import no_collections

# All that `open_model` imports from Transformers 5.23, except the model's own file: 2.8 of 2.9 s.
TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.generation.utils",
)
# Imported when a layer is traced, and when it is compiled.
TRACER = ("torch._dynamo.backends.common", "torch._inductor.decomposition", "torch._functorch.partitioners")
COMPILER = (*TRACER, "torch._inductor.compile_fx")


def import_all(modules: Sequence[str], stopped: threading.Event | None = None) -> None:
    """Import modules one after the other, until `stopped` is set.

    A module that cannot be imported is skipped here, and fails where it is used.
    """
    for module in modules:
        if stopped is not None and stopped.is_set():
            return
        with suppress(Exception):
            importlib.import_module(module)


def waiting(kind: type, modules: Sequence[str] = (), before: Callable[[], None] = lambda: None) -> type:
    """Return a class for actors that start before the arguments of `kind`'s constructor are known.

    Its constructor calls `before`, and imports the module of `kind` and then `modules`. Its `setup` takes the arguments
    of `kind`'s constructor and returns the process id, unless `kind` has a `setup` of its own. Its other methods are
    those of `kind`, and may be called when `setup` has returned.

    The class knows `kind` by name only. Otherwise Ray would import that module as it reads the class, with garbage
    collections, which take a third of the time.
    """
    module, name = kind.__module__, kind.__name__

    def begin(self: Any) -> None:
        before()
        import_first((module, *modules))
        there = getattr(importlib.import_module(module), name)
        self.worker = there.__new__(there)

    def setup(self: Any, *args: Any, **kwargs: Any) -> int:
        self.worker.__init__(*args, **kwargs)
        return os.getpid()

    methods = {key: _forwarded(key, method) for key, method in inspect.getmembers(kind, inspect.isfunction)}
    public = {key: method for key, method in methods.items() if not key.startswith("_")}
    return type(name, (), {"setup": setup, **public, "__init__": begin, "__module__": module})


def _forwarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls that of `self.worker`. Ray wants to know from it whether it is a coroutine."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.worker, name)(*args, **kwargs)

    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.worker, name)(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def import_first(modules: Sequence[str]) -> None:
    """Import modules as the first thing that a process does."""
    with no_collections():
        import_all(modules)
        gc.freeze()


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Import modules in a thread while the block runs. They are imported when it ends.

    The block must not import the same modules. If it fails, the module that is being imported is the last one. Raises
    DeadlineError if the modules are not imported DEADLINE_S seconds after the end of the block.
    """
    stopped = threading.Event()

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)  # the main thread decides when it handles one
        import_all(modules, stopped)

    # A daemon: a process whose file system hangs must still be able to exit.
    thread = threading.Thread(target=work, name="imports", daemon=True)
    thread.start()
    try:
        with no_collections():
            yield
    except BaseException:
        stopped.set()
        raise
    finally:
        thread.join(DEADLINE_S)
    if thread.is_alive():
        raise DeadlineError(f"{', '.join(modules)} were not imported within {DEADLINE_S:.0f} s: is their disk stuck?")
