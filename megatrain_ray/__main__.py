"""Runs the command line: `python -m megatrain_ray` is the same as `megatrain`."""

import gc
import os
import sys

# Collections visit the objects of PyTorch, Ray and Transformers, which stay. In a run of one step they took 1.3 of the
# driver's 7 CPU seconds at Python's thresholds (700, 10, 10), and 0.3 at these. A plan spent 1.3 of its 5.9 on them.
GC_THRESHOLDS = (100_000, 10, 10)


def start() -> int:
    """Run the command line. The Python processes that it starts do not import from the current directory."""
    gc.set_threshold(*GC_THRESHOLDS)
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    from megatrain_ray.cli import main

    try:
        return main()
    finally:
        gc.freeze()  # else Python looks for garbage among the objects of PyTorch as it exits: 1.2 CPU seconds


if __name__ == "__main__":
    # `python -m` looks for modules in the current directory first, where a user's file may be called random.py.
    if not sys.flags.safe_path and __file__ != f"{sys.path[0]}/megatrain_ray/__main__.py":
        del sys.path[0]
    sys.exit(start())
