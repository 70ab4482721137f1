"""Describes an exported folder: its weights and files, and what can be done with it next."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Container, Iterator
from pathlib import Path

from safetensors import safe_open

from megatrain_ray.engine.model.images import VISION_FAMILIES
from megatrain_ray.export.export import listed_ids
from megatrain_ray.io.images.image_processor import PROCESSOR_FILES
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, holds_tokenizer
from megatrain_ray.model.architecture import Architecture, is_known, is_reward_model
from megatrain_ray.model.open_model import GENERATION_NAME
from megatrain_ray.units import format_bytes, format_count

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def describe_export(out_dir: Path, step: int) -> Iterator[str]:
    """Yield the lines of the report: weights, one line for each file, and what can be done next.

    step: step of the exported save.
    """
    files = sorted(file for file in out_dir.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(out_dir)): file.stat().st_size for file in files}
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
    if holds_tokenizer(out_dir) and GENERATION_NAME in sizes:
        generation = json.loads((out_dir / GENERATION_NAME).read_text(encoding="utf-8"))
        names = map(FolderTokenizer(out_dir).token_of, listed_ids(generation.get("eos_token_id")))
        yield f"generation stops at {', '.join(names)}"
    yield from _next_steps(out_dir, sizes)


def _next_steps(out_dir: Path, names: Container[str]) -> Iterator[str]:
    if "adapter_config.json" in names:
        yield f'next  PeftModel.from_pretrained(base, "{out_dir}") in peft; base: the model that the run began with'
        yield f"      lora.path: {out_dir} in a configuration with a new run_dir trains on from these adapters"
        return
    tokenizer = "AutoTokenizer as well"
    if has_images := any(name in names for name in PROCESSOR_FILES):
        tokenizer = "AutoProcessor as well"
    elif not any(name in names for name in TOKENIZER_FILES):
        tokenizer = "no tokenizer: the run had none but ids"
    settings = json.loads((out_dir / "config.json").read_text(encoding="utf-8"))
    known = is_known(settings.get("model_type"))
    loader = Architecture(settings).auto_class.__name__ if known else "AutoModelForCausalLM"
    load = f'{loader}.from_pretrained("{out_dir}") in Transformers; {tokenizer}'
    if is_reward_model(settings):
        yield f"next  {load}"
        yield f"      model.path: {out_dir} with train.objective: reward and a new run_dir trains on from these weights"
        return
    image = " (and --image FILE)" if has_images and settings["model_type"] in VISION_FAMILIES else ""
    named = shlex.quote(str(out_dir))
    yield f'next  megatrain generate {named} "PROMPT" for a look; with --chat{image} if it learned chats'
    yield f"      {load}"
    yield f"      model.path: {out_dir} in a configuration with a new run_dir trains on from these weights"
