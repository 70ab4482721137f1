"""Trains the tiny model by TRL's own KTOTrainer, for the recorded losses of KTO. See make_trl_losses.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from tests.support.kto_losses import Kto
from tests.support.make_trl_losses import (
    PAIRS,
    STEPS,
    load_tiny,
    print_losses,
    recorded,
    settings_of,
    tokenizer_of_qwen,
)
from tests.support.pairs import is_good, random_pairs


class Recorded(recorded(KTOTrainer)):  # type: ignore[misc]
    """Takes ids for records, with the mismatched answers that TRL makes of a micro-batch."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        if not self.calculate_KL:
            return dataset
        rows = list(dataset)
        groups = [rows[start : start + PAIRS] for start in range(0, len(rows), PAIRS)]
        mismatched = [row["completion_ids"] for group in groups for row in (group[-1], *group[:-1])]  # as TRL does it
        pairs = zip(rows, mismatched, strict=True)
        return Dataset.from_list([row | {"KL_completion_ids": ids} for row, ids in pairs])


def losses_of(**numbers: Any) -> list[float]:
    """Return the losses of ten steps of four answers, all of them in one micro-batch, since KL is of that in TRL."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"prompt": "a", "prompt_ids": pair.prompt, "completion_ids": pair.chosen, "label": is_good(pair)}
            for pair in random_pairs(STEPS * PAIRS)
        ]
        of_step = {"per_device_train_batch_size": PAIRS, "gradient_accumulation_steps": 1}
        settings = KTOConfig(
            **settings_of(folder) | of_step, train_sampling_strategy="sequential", max_length=None, **numbers
        )
        trainer = Recorded(
            model=load_tiny(Path(folder) / "model", seed=0), ref_model=load_tiny(Path(folder) / "reference", seed=1),
            args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer_of_qwen(folder),
        )  # fmt: skip
        trainer.train()
        found: list[float] = trainer.losses
        return found


def all_losses() -> Iterator[tuple[object, list[float]]]:
    """Yield each loss that is recorded, and what TRL makes of it."""
    yield Kto("kto", 0.5, 1.2, 0.7), losses_of(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)
    yield Kto("apo_zero_unpaired", 0.5), losses_of(loss_type="apo_zero_unpaired", beta=0.5)


if __name__ == "__main__":
    print_losses(all_losses())
