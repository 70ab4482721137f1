"""Trains the tiny model by TRL's own trainers, for the recorded losses of preferences, reward models and distillation.

Run as a module it prints a line for each loss: its name, a tab, and the losses of its steps. test_trl.py compares them
with what is recorded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.support.chat_fixtures import FAMILIES, build
from tests.support.pair_losses import Preference
from tests.support.pairs import margin_of, random_pairs
from tests.support.teacher import Distil
from tests.support.tiny import VOCAB_SIZE, build_tiny, tiny_batches

STEPS, PAIRS = 10, 4  # of a step


def recorded(trainer_class: Any) -> Any:
    """Return the trainer with ids for records, in the order of the records, and with the losses of its steps."""

    class Recorded(trainer_class):
        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            row: dict[str, Any] = {
                "prompt_input_ids": feature["ids"],
                "prompt_attention_mask": [1] * len(feature["ids"]),
            }
            for key in ("chosen", "rejected"):
                ids = feature["ids"] + feature[f"{key}_ids"]
                labels = [-100] * len(feature["ids"]) + feature[f"{key}_ids"]
                row |= {f"{key}_input_ids": ids, f"{key}_labels": labels, f"{key}_attention_mask": [1] * len(ids)}
            return row

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:  # of DPOTrainer, RewardTrainer
            if "ids" not in dataset.column_names:
                return dataset
            return dataset.rename_column("ids", "prompt_ids").select_columns(
                ["prompt_ids", "chosen_ids", "rejected_ids"]
            )

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*arguments, **options)
            self.__dict__.setdefault("losses", []).append(loss.item())
            return loss

    return Recorded


def load_tiny(folder: Path, seed: int) -> Any:
    return AutoModelForCausalLM.from_pretrained(build_tiny(folder, seed=seed), dtype=torch.float32)


def tokenizer_of_qwen(folder: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer, which the trainers require; they are given ids."""
    file = build(Path(folder) / "tokenizer", FAMILIES["qwen2.5"]) / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|im_end|>")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def settings_of(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": PAIRS, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1.0,
        "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "gradient_checkpointing": False,
        "optim": "adamw_torch_fused", "disable_tqdm": True,
    }  # fmt: skip


def summed(losses: list[float]) -> list[float]:
    """Return the losses of steps from those of micro-batches."""
    return [sum(losses[i : i + PAIRS]) for i in range(0, STEPS * PAIRS, PAIRS)]


def losses_of(trainer_class: Any, config_class: Any, most_prompt: int, **numbers: Any) -> list[float]:
    """Return the losses of ten steps of four pairs, one a micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_tiny(Path(folder) / "model", seed=0)
        pairs = list(random_pairs(STEPS * PAIRS, most_prompt))
        rows = [
            {
                "prompt": "a", "chosen": "b", "rejected": "c",
                "ids": pair.prompt, "chosen_ids": pair.chosen, "rejected_ids": pair.rejected,
            }
            for pair in pairs
        ]  # fmt: skip
        settings = config_class(**settings_of(folder), **numbers)
        options = {}
        if trainer_class is DPOTrainer:  # relative to a model of other weights
            options["ref_model"] = load_tiny(Path(folder) / "reference", seed=1)
        trainer = recorded(trainer_class)(
            model=model, args=settings, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer_of_qwen(folder), **options,
        )  # fmt: skip
        trainer.train()
        return summed(trainer.losses)


def distillation_losses(beta: float, temperature: float) -> list[float]:
    """Return the losses of ten steps of four rows of text, one a micro-batch, from a teacher of other weights.

    GKDTrainer itself leaves the temperature out of its loss, so it is given to the loss here.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for batch in tiny_batches(STEPS):
            for inputs, targets in zip(batch.input_ids.tolist(), batch.targets.tolist(), strict=True):
                rows.append({"input_ids": [*inputs, targets[-1]], "labels": [inputs[0], *targets]})
        words = Tokenizer(WordLevel({str(number): number for number in range(VOCAB_SIZE)}, unk_token="0"))
        pad = str(VOCAB_SIZE - 1)
        trainer = recorded(GKDTrainer)(
            model=load_tiny(Path(folder) / "model", seed=0),
            teacher_model=load_tiny(Path(folder) / "teacher", seed=1),
            args=GKDConfig(**settings_of(folder), beta=beta, lmbda=0.0, max_length=None),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=pad),
            data_collator=lambda given: {
                **{key: torch.tensor([row[key] for row in given]) for key in ("input_ids", "labels")},
                "attention_mask": torch.ones(len(given), len(given[0]["labels"]), dtype=torch.int64),
            },
        )
        trainer.generalized_jsd_loss = partial(GKDTrainer.generalized_jsd_loss, temperature=temperature)
        trainer.train()
        return summed(trainer.losses)


def reward_model_losses(**numbers: Any) -> list[float]:
    """Return the losses of ten steps of a reward model on four pairs with margins, one a micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny(Path(folder) / "model", reward=True)
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        rows = [
            {"chosen_ids": p.prompt + p.chosen, "rejected_ids": p.prompt + p.rejected, "margin": margin_of(number)}
            for number, p in enumerate(random_pairs(STEPS * PAIRS))
        ]
        words = Tokenizer(WordLevel({str(number): number for number in range(VOCAB_SIZE)}, unk_token="0"))
        pad = str(VOCAB_SIZE - 1)  # no answer has it
        trainer = recorded(RewardTrainer)(
            model=model,
            args=RewardConfig(**settings_of(folder), **numbers),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=pad),
        )
        trainer.train()
        return summed(trainer.losses)


def all_losses() -> Iterator[tuple[object, list[float]]]:
    """Yield each loss that is recorded, and what TRL makes of it."""
    for beta, temperature in ((0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.5, 2.0)):
        yield Distil(beta, temperature), distillation_losses(beta, temperature)
    simpo = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.6}
    yield Preference("simpo", 2.0, 0.6), losses_of(CPOTrainer, CPOConfig, 4, **simpo)
    # Its cross-entropy is of the prompt as well, of which one token is no target.
    yield Preference("orpo", 0.25), losses_of(ORPOTrainer, ORPOConfig, 1, beta=0.25)
    by_dpo = {
        Preference("dpo", 0.5): {"loss_type": ["sigmoid"]},  # which smooths no labels
        Preference("ipo", 0.5): {"loss_type": ["ipo"]},
        Preference("hinge", 0.5): {"loss_type": ["hinge"]},
        Preference("dpo", 0.5, sft_weight=0.3): {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    }
    for preference, numbers in by_dpo.items():
        yield preference, losses_of(DPOTrainer, DPOConfig, 4, beta=0.5, max_length=None, **numbers)
    yield "reward", reward_model_losses(center_rewards_coefficient=0.01)


def print_losses(found: Iterable[tuple[object, Sequence[float]]]) -> None:
    torch.set_num_threads(1)
    for name, losses in found:
        print(name, json.dumps(losses), sep="\t")


if __name__ == "__main__":
    print_losses(all_losses())
