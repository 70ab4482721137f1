"""Trains the tiny model by TRL's own KTOTrainer and prints the losses that tests/engine/step/test_kto.py compares with.

Run as a module, in an environment that has trl 1.16.0 as well (`pip install trl==1.16.0`), which no test needs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

from tests.support.chat_fixtures import FAMILIES, build
from tests.support.make_trl_losses import PAIRS, STEPS, load_tiny
from tests.support.pairs import is_good, random_pairs


class Recorded(KTOTrainer):  # type: ignore[misc]
    """Takes ids for records, and keeps the losses of its steps."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        if not self.calculate_KL:
            return dataset
        rows = list(dataset)
        groups = [rows[start : start + PAIRS] for start in range(0, len(rows), PAIRS)]
        mismatched = [row["completion_ids"] for group in groups for row in (group[-1], *group[:-1])]  # as TRL does it
        pairs = zip(rows, mismatched, strict=True)
        return Dataset.from_list([row | {"KL_completion_ids": ids} for row, ids in pairs])

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def losses_of(**numbers: Any) -> list[float]:
    """Return the losses of ten steps of four answers, all of them in one micro-batch, since KL is of that in TRL."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"prompt": "a", "prompt_ids": pair.prompt, "completion_ids": pair.chosen, "label": is_good(pair)}
            for pair in random_pairs(STEPS * PAIRS)
        ]
        settings = KTOConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=PAIRS, train_sampling_strategy="sequential",
            learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
            adam_epsilon=1e-8, max_grad_norm=1.0, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            gradient_checkpointing=False, optim="adamw_torch_fused", disable_tqdm=True, max_length=None, **numbers,
        )  # fmt: skip
        file = build(Path(folder) / "tokenizer", FAMILIES["qwen2.5"]) / "tokenizer.json"
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>")
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        trainer = Recorded(
            model=load_tiny(Path(folder) / "model", seed=0), ref_model=load_tiny(Path(folder) / "reference", seed=1),
            args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        found: list[float] = trainer.losses
        return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("kto", losses_of(beta=0.5, desirable_weight=1.2, undesirable_weight=0.7))
    print("apo_zero_unpaired", losses_of(loss_type="apo_zero_unpaired", beta=0.5))
