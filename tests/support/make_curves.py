"""Writes the committed curves of the reference: `python -m tests.support.make_curves` from the repository's root."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.reference import Recipe, train_reference
from tests.support.tiny import build_tiny, tiny_batches

CURVES = Path(__file__).parent / "curves"
STEPS = 10


@dataclass(frozen=True)
class Mode:
    """Describes a tiny model and how it is trained; the batch is 4 sequences of 32 tokens."""

    recipe: Recipe
    tied: bool = False
    attention_dropout: float = 0.0


def recipe(**settings: Any) -> Recipe:
    return Recipe(steps=STEPS, lr=3e-3, min_lr=3e-4, warmup_steps=2, **settings)


MODES = {
    "untied_fp32_1x4_clip": Mode(recipe(micro_batch_size=4)),
    "untied_fp32_4x1_clip": Mode(recipe(micro_batch_size=1)),
    "untied_fp32_4x1_no_clip": Mode(recipe(micro_batch_size=1, clip=None)),
    "tied_fp32_4x1_clip_chunked": Mode(recipe(micro_batch_size=1, loss_chunk_tokens=8), tied=True),
    "tied_fp32_1x4_no_clip": Mode(recipe(micro_batch_size=4, clip=None), tied=True),
    "untied_fp32_4x1_clip_dropout": Mode(recipe(micro_batch_size=1), attention_dropout=0.1),
    "untied_bf16_1x4_clip": Mode(recipe(micro_batch_size=4, precision="bf16")),
    "untied_bf16_4x1_no_clip": Mode(recipe(micro_batch_size=1, precision="bf16", clip=None)),
    "tied_bf16_4x1_clip_chunked": Mode(recipe(micro_batch_size=1, precision="bf16", loss_chunk_tokens=8), tied=True),
    "tied_bf16_4x1_clip_bf16_gradients": Mode(
        recipe(micro_batch_size=1, precision="bf16", grad_dtype="bf16"), tied=True
    ),
}


def curve(mode: Mode, folder: Path) -> dict[str, Any]:
    """Train the mode's model, built in `folder`, and return what its file holds."""
    build_tiny(folder, tied=mode.tied, attention_dropout=mode.attention_dropout)
    result = train_reference(folder, tiny_batches(STEPS), mode.recipe)
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tied": mode.tied,
        "attention_dropout": mode.attention_dropout,
        "recipe": json.loads(json.dumps(asdict(mode.recipe))),
        "losses": result.losses,
        "grad_norms": result.grad_norms,
        "learning_rates": result.learning_rates,
    }


def main() -> None:
    CURVES.mkdir(exist_ok=True)
    for name, mode in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(curve(mode, Path(folder)), indent=1)
        (CURVES / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
