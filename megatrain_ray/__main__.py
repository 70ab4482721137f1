"""`python -m megatrain_ray` is `megatrain`."""

import sys

from megatrain_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
