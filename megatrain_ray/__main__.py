"""Runs the command line: `python -m megatrain_ray` is the same as `megatrain`."""

import sys

from megatrain_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
