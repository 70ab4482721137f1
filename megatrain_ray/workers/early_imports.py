"""Imports slow modules before they are needed: actors while they wait for a plan, the driver while Ray starts."""

from __future__ import annotations

import gc
import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from megatrain_ray.console.interrupts import ENDINGS
from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError

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


@contextmanager
def no_collections() -> Iterator[None]:
    """Import in the block without garbage collections.

    They would visit objects that stay anyway: with them the imports of a GPU worker took 3.3 s, without 2.6 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
