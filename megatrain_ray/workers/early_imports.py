"""What takes seconds to import, imported before it is needed: by actors that wait for a plan, and by the driver while
Ray starts."""

from __future__ import annotations

import gc
import importlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from megatrain_ray.engine.device.deadlines import DEADLINE_S
from megatrain_ray.errors import DeadlineError

# Of Transformers 5.23 all that `open_model` imports for a model, but for the model's own file: 2.8 of 2.9 s.
TRANSFORMERS = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.generation.utils",
)
# To trace a layer, and to compile it.
TRACER = ("torch._dynamo.backends.common", "torch._inductor.decomposition", "torch._functorch.partitioners")
COMPILER = (*TRACER, "torch._inductor.compile_fx")


def import_all(modules: Sequence[str], stopped: threading.Event | None = None) -> None:
    """One after the other, up to the one in which `stopped` is set. What cannot be imported fails where it is used."""
    for module in modules:
        if stopped is not None and stopped.is_set():
            return
        with suppress(Exception):
            importlib.import_module(module)


def import_first(modules: Sequence[str]) -> None:
    """The same as the first thing that a process does. Without collections, which would go over what stays anyway: with
    them the imports of a GPU worker took 3.3 s, without 2.6 s."""
    gc.disable()
    import_all(modules)
    gc.freeze()
    gc.enable()


@contextmanager
def importing(modules: Sequence[str]) -> Iterator[None]:
    """Imports beside the block, which must not import the same; at its end they are there. Where the block fails, the
    module that is being imported is the last. Raises DeadlineError where one is not there within DEADLINE_S."""
    stopped = threading.Event()
    # A daemon: a process whose file system hangs must still be able to exit.
    thread = threading.Thread(target=_import_unsignalled, args=(modules, stopped), name="imports", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        stopped.set()
        raise
    finally:
        thread.join(DEADLINE_S)
    if thread.is_alive():
        raise DeadlineError(f"{', '.join(modules)} were not imported within {DEADLINE_S:.0f} s: is their disk stuck?")


def _import_unsignalled(modules: Sequence[str], stopped: threading.Event) -> None:
    """The main thread decides when it hears a SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    import_all(modules, stopped)
