"""Measures import and export of random model folders: whether bytes are the same, peak memory, and speed.

    python -m benchmarks.import_export OUT.json [--gigabytes 1.2]

There are two cases: an FP32 folder through split masters and back as fp32, and a BF16 folder through working copies and
back as bf16. Import and export each run in a process of their own. The folder, and the save between the two, are not in
the page cache. `extra_mib` is the peak of memory of such a process beyond what it held before; for an import, beyond
the shards' state.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import mmap
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.scratch import memory
from megatrain_ray.engine.layout.flat_layout import FlatLayout, ParameterSpec
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.layout.shard_layout import ShardLayout
from megatrain_ray.engine.optimizer.adamw import AdamWConstants
from megatrain_ray.engine.optimizer.undo_log import Journal
from megatrain_ray.engine.shards.adam_shard import AdamShard
from megatrain_ray.engine.weights.export_save import export_save
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, WeightFolder
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry, PartManifest
from megatrain_ray.io.saves.save_folder import commit_save, load_manifest, prepare_save, save_folder, write_part

HIDDEN, VOCABULARY = 1024, 32_000
BLOCK = {
    "norm": (HIDDEN,),
    **dict.fromkeys(("q", "k", "v", "o"), (HIDDEN, HIDDEN)),
    "up": (4 * HIDDEN, HIDDEN),
    "down": (HIDDEN, 4 * HIDDEN),
}
NUM_SHARDS = 2
LAYERS_PER_FILE = 6
STEP = 1


@dataclass
class Usage:
    """Holds the time and memory that a block of code used. It is complete when the block has ended."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    extra_bytes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    arguments = parser.parse_args()
    cases = [case(dtype, arguments.gigabytes) for dtype in ExportDtype]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    arguments.out.write_text(json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n")


def case(dtype: ExportDtype, gigabytes: float) -> dict[str, Any]:
    """Convert folder → shards → save → folder, all within the working directory, and return the measurements."""
    root = Path(mkdtemp(prefix="import_export-", dir="."))
    try:
        layout = make_layout(gigabytes, dtype)
        num_files = write_folder(root / "in", layout, dtype)
        num_bytes = layout.logical_size * dtype.torch.itemsize
        imported = in_new_process(import_and_save, root, layout)
        exported = in_new_process(export, root, dtype)
        result = {
            "dtype": dtype.value,
            "parameters": layout.logical_size,
            "folder_gb": num_bytes / 1e9,
            "files": num_files,
            "import": described(imported, num_bytes),
            "export": described(exported, num_bytes),
            "same_bytes": same_bytes(root / "in", root / "out"),
        }
    finally:
        shutil.rmtree(root)
    print(json.dumps(result), flush=True)
    return result


def make_layout(gigabytes: float, dtype: ExportDtype) -> ModelLayout:
    wanted = gigabytes * 1e9 / dtype.torch.itemsize - VOCABULARY * HIDDEN
    num_blocks = math.ceil(wanted / sum(math.prod(shape) for shape in BLOCK.values()))
    embedding = FlatLayout.build("embedding", [ParameterSpec("embedding.weight", "weight", (VOCABULARY, HIDDEN))])
    blocks = [
        FlatLayout.build(f"layers.{k}", [ParameterSpec(f"layers.{k}.{n}", n, shape) for n, shape in BLOCK.items()])
        for k in range(num_blocks)
    ]
    return ModelLayout((embedding, *blocks), ())


def write_folder(folder: Path, layout: ModelLayout, dtype: ExportDtype) -> int:
    """Write weights of random bits, except those of NaN and infinity, and return the number of files."""
    folder.mkdir()
    generator, places = torch.Generator().manual_seed(0), dict[str, str]()
    groups = [layout.layers[k : k + LAYERS_PER_FILE] for k in range(0, len(layout.layers), LAYERS_PER_FILE)]
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weights = {s.name: random_bits(s.shape, dtype, generator) for layer in group for s in layer.owned}
        safetensors.torch.save_file(weights, folder / file)
        forget_pages(folder / file)
        places |= dict.fromkeys(weights, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    return len(groups)


def random_bits(shape: tuple[int, ...], dtype: ExportDtype, generator: torch.Generator) -> Tensor:
    words = torch.randint(
        0, 1 << 16, (math.prod(shape) * dtype.torch.itemsize // 2,), generator=generator, dtype=torch.int32
    )
    values = words.to(torch.int16).view(dtype.torch)
    values[~values.isfinite()] = -0.0
    return values.view(shape)


def forget_pages(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_new_process(function: Any, *arguments: Any) -> Usage:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        usage: Usage = pool.submit(function, *arguments).result()
    return usage


def import_and_save(root: Path, layout: ModelLayout) -> Usage:
    """Import into all shards in this process, one after the other, then save. Only the import is measured."""
    torch.set_num_threads(1)  # as in the process of a shard
    working = shared(layout.size, torch.bfloat16)
    shards = [make_shard(ShardLayout(layout, k, NUM_SHARDS), working) for k in range(NUM_SHARDS)]
    with measured() as usage:
        source = WeightFolder.open(root / "in")
        for shard in shards:
            shard.load(source)
    commit_save(root / "saves", STEP, manifest(layout, write_parts(root / "saves", shards)))
    for shard in shards:
        shard.close()
    return usage


def export(root: Path, dtype: ExportDtype) -> Usage:
    with measured() as usage:
        export_save(save_folder(root / "saves", STEP), load_manifest(root / "saves", STEP), root / "out", dtype)
    return usage


def make_shard(layout: ShardLayout, working: Tensor) -> AdamShard:
    own = {kind: shared(layout.size, dtype) for kind, dtype in Precision.BF16.state_kinds}
    hyper = AdamWConstants(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    journal = memoryview(mmap.mmap(-1, Journal.num_bytes(layout, Precision.BF16, 1)))
    return AdamShard(layout, Precision.BF16, working=working, **own, hyper=hyper, num_threads=1, journal=journal)


def shared(num: int, dtype: torch.dtype) -> Tensor:
    """Return shared memory as arenas have it, zeroed, with every page present."""
    return torch.frombuffer(mmap.mmap(-1, num * dtype.itemsize), dtype=dtype).zero_()


def write_parts(saves: Path, shards: list[AdamShard]) -> tuple[PartManifest, ...]:
    folder = prepare_save(saves, STEP)
    pieces = [[p for i in range(len(s.layout.spans)) for p in s.pieces(i)] for s in shards]
    return tuple(asyncio.run(write_part(folder, k, part)) for k, part in enumerate(pieces))


def manifest(layout: ModelLayout, parts: tuple[PartManifest, ...]) -> Manifest:
    return Manifest(
        version=1,
        step=STEP,
        optimizer_step=STEP,
        num_skipped=0,
        precision="bf16",
        itemsize={"working": 2} | {kind: dtype.itemsize for kind, dtype in Precision.BF16.state_kinds},
        layers=tuple(LayerEntry(flat.name, flat.logical_size, tuple(parameters(flat))) for flat in layout.layers),
        data={},
        model={},
        config={},
        parts=parts,
    )


def parameters(flat: FlatLayout) -> Iterator[ParameterEntry]:
    for run in flat.runs(flat.fragments[0]):
        yield ParameterEntry(run.segment.name, run.segment.shape, run.logical)


@contextmanager
def measured() -> Iterator[Usage]:
    usage = Usage()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before, start_s, start_cpu_s = memory("VmRSS"), time.monotonic(), time.process_time()
    yield usage
    usage.seconds, usage.cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    usage.extra_bytes = memory("VmHWM") - before


def described(usage: Usage, num_bytes: int) -> dict[str, float]:
    return {
        "seconds": round(usage.seconds, 2),
        "cpu_s": round(usage.cpu_s, 2),
        "mb_per_s": round(num_bytes / usage.seconds / 1e6),
        "extra_mib": round(usage.extra_bytes / 2**20, 1),
    }


def same_bytes(one: Path, other: Path) -> bool:
    """Return whether both folders have the same tensors, name by name, as the safetensors library reads them."""
    first, second = tensors(one), tensors(other)
    return first.keys() == second.keys() and all(same_tensor(name, first[name], second[name]) for name in first)


def tensors(folder: Path) -> dict[str, Path]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def same_tensor(name: str, one: Path, other: Path) -> bool:
    with safetensors.safe_open(one, framework="pt") as a, safetensors.safe_open(other, framework="pt") as b:
        first, second = a.get_tensor(name), b.get_tensor(name)
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        first.view(torch.int16), second.view(torch.int16)
    )


if __name__ == "__main__":
    main()
