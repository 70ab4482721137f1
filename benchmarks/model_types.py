"""Trains a tiny model of every type that the installed Transformers has, with the engine and with the reference.

    python -m benchmarks.model_types OUT.json COMMIT [--only TYPE …]

A row says for FP32, for BF16 (another loop order, recomputed, sharded) and for packed rows: `equal` if losses, norms,
masters and moments of some updates have the same bits, else why not. Types that OUT.json already has are left out. One
thread: with several, tiny products wait more than they compute.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.vertical_slice import machine
from tests.support.model_types import all_types, settings_of
from tests.support.type_sweep import as_row, judge, refused


def row_of(model_type: str) -> dict[str, Any]:
    start_s = time.perf_counter()
    try:
        settings = settings_of(model_type)
    except Exception as error:  # a configuration that needs others
        return as_row(refused(model_type, f"no default configuration: {error}"[:400])) | {"seconds": 0.0}
    with TemporaryDirectory() as folder:
        try:
            row = as_row(judge(model_type, settings, Path(folder)))
        except Exception as error:  # of one type: the others still run
            row = {"model_type": model_type, "failed": f"{type(error).__name__}: {error}"[:400]}
    return row | {"seconds": round(time.perf_counter() - start_s, 1)}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("commit")
    arguments.add_argument("--only", nargs="+", default=all_types())
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    head = {
        "command": "python -m benchmarks.model_types", "machine": machine(), "transformers": transformers.__version__,
    }  # fmt: skip
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    known = {row["model_type"] for row in rows}
    for model_type in (name for name in options.only if name not in known):
        rows.append(row_of(model_type) | {"commit": options.commit})
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
