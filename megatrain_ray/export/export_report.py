"""Formats the report that `megatrain export` prints about the folder it wrote."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from pathlib import Path

from safetensors import safe_open

from megatrain_ray.units import format_bytes, format_count

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def describe_export(out_dir: Path, step: int) -> Iterator[str]:
    """Yield the lines of the report: weights, one line for each file, and what can be done next.

    step: step of the exported save.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(out_dir.iterdir())}
    shapes, dtypes = [], set()
    for file in sorted(out_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            parts = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - it is no mapping
            shapes += [part.get_shape() for part in parts]
            dtypes |= {part.get_dtype() for part in parts}
    yield (
        f"exported the save of step {step} to {out_dir}: {len(shapes)} tensors, "
        f"{format_count(sum(map(math.prod, shapes)))} parameters, {' and '.join(sorted(dtypes))}, "
        f"{format_bytes(sum(sizes.values()))}"
    )
    width = max(map(len, sizes))
    yield from (f"  {name:<{width}} {format_bytes(size):>12}" for name, size in sizes.items())
    yield from _next_steps(out_dir, sizes)


def _next_steps(out_dir: Path, names: Container[str]) -> Iterator[str]:
    if "adapter_config.json" in names:
        yield f'next  PeftModel.from_pretrained(base, "{out_dir}") in peft; base: the model that the run began with'
        yield f"      lora.path: {out_dir} in a configuration with a new run_dir trains on from these adapters"
        return
    has_tokenizer = any(name in names for name in TOKENIZER_FILES)
    tokenizer = "AutoTokenizer as well" if has_tokenizer else "no tokenizer: the run had none but bytes or ids"
    yield f'next  AutoModelForCausalLM.from_pretrained("{out_dir}") in Transformers; {tokenizer}'
    yield f"      model.path: {out_dir} in a configuration with a new run_dir trains on from these weights"
