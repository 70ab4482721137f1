"""Computes GRPO's losses by GRPOTrainer._compute_loss of TRL, for the recorded ones. See make_trl_losses.py.

Of each it takes the loss and the gradient's norm; of some the losses of ten updates with the same rollouts as well, in
which ratios leave 1.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.support.make_trl_losses import print_losses
from tests.support.policy_losses import Policy
from tests.support.reference import load_model
from tests.support.rollouts import Sampled, random_rollouts
from tests.support.tiny import build_tiny

NUM_ANSWERS = 12
TEN_STEPS = (
    Policy(),
    Policy(loss_type="grpo", beta=0.2),
    Policy(0.1, 0.3, 0.1, "token", "dr_grpo", 16),
    Policy(0.05, 0.02, 0.0, "sequence", "grpo"),
    Policy(0.05, 0.02, 0.2, "sequence", "dapo"),
)
CASES = (
    *TEN_STEPS,
    Policy(beta=0.1, correction="token_truncate", correction_max=1.1),
    Policy(correction="token_mask", correction_min=0.8, correction_max=1.3),
    Policy(loss_type="grpo", correction="sequence_truncate", correction_max=1.2),
    Policy(level="sequence", loss_type="grpo", correction="sequence_mask", correction_max=2.0),
)


class Trainer(GRPOTrainer):
    """Computes losses of given inputs, and nothing else."""

    def __init__(self, kind: str, policy: Policy) -> None:
        self.beta, self.loss_type, self.importance_sampling_level = policy.beta, kind, policy.level
        self.epsilon_low, self.epsilon_high = policy.clip_low, policy.clip_high
        self.max_completion_length = policy.answer_length
        self.use_vllm = self.vllm_importance_sampling_correction = policy.correction is not None
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.args = SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1)
        self.current_gradient_accumulation_steps = 1
        self.accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
        self._metrics: Any = {"train": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, num_last: int, **_: Any) -> Any:
        all_logprobs = logprobs_of(model, ids, mask)[:, -num_last - 1 : -1]
        found = all_logprobs.gather(-1, ids[:, -num_last:, None])[..., 0]
        return found, -(all_logprobs.exp() * all_logprobs).sum(-1), None


def logprobs_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)


def inputs_of(rollouts: list[Sampled], reference: Any, policy: Policy) -> dict[str, Any]:
    """Return a batch as TRL has it: prompts are padded on the left, answers on the right."""

    def padded(rows: list[list[Any]], side: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)

    prompts, answers = [r.prompt for r in rollouts], [r.answer for r in rollouts]
    ids = {"prompt_ids": padded(prompts, "left"), "completion_ids": padded(answers, "right")}
    masks = {
        "prompt_mask": padded([[1] * len(row) for row in prompts], "left"),
        "completion_mask": padded([[1] * len(row) for row in answers], "right"),
    }
    tool_mask = padded([r.mask for r in rollouts], "right")
    mask = tool_mask * masks["completion_mask"]
    sampled = padded([r.logprobs for r in rollouts], "right")
    whole = torch.cat(list(ids.values()), 1)
    with torch.no_grad():
        last = logprobs_of(reference, whole, torch.cat(list(masks.values()), 1))[:, -sampled.shape[1] - 1 : -1]
    by_reference = last.gather(-1, ids["completion_ids"][..., None])[..., 0]
    inputs = {
        **ids, **masks, "tool_mask": tool_mask, "advantages": torch.tensor([r.advantage for r in rollouts]),
        "old_per_token_logps": sampled, "ref_per_token_logps": by_reference, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if policy.correction is not None:  # as in GRPOTrainer._generate_and_score_completions
        level, way = policy.correction.split("_")
        differences = (by_reference - sampled) * mask
        ratios = torch.exp(differences.sum(-1, keepdim=True) if level == "sequence" else differences)
        low, high = policy.correction_min, policy.correction_max
        if way == "truncate":
            ratios = torch.clamp(ratios, min=low, max=high)
        else:
            invalid = (ratios < (low or -torch.inf)) | (ratios > (high or torch.inf))
            ratios = ratios.masked_fill(invalid, value=0.0)
        inputs |= {"old_per_token_logps": by_reference, "importance_sampling_ratio": ratios}
    return inputs


def all_losses() -> Iterator[tuple[object, list[float]]]:
    """Yield each loss that is recorded, and what TRL makes of it."""
    rollouts = list(random_rollouts(NUM_ANSWERS))
    with tempfile.TemporaryDirectory() as folder:
        reference = load_model(build_tiny(Path(folder) / "reference", seed=1), torch.float32).eval()
        for policy in CASES:
            model = load_model(build_tiny(Path(folder) / "model"), torch.float32).train()
            trainer = Trainer(policy.loss_type, policy)
            trainer.model = model
            loss = trainer._compute_loss(model, inputs_of(rollouts, reference, policy))
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            yield policy, [loss.item(), norm.item()]
        for policy in TEN_STEPS:
            model = load_model(build_tiny(Path(folder) / "model"), torch.float32).train()
            inputs = inputs_of(rollouts, reference, policy)
            yield ("ten steps", policy), ten_steps(Trainer(policy.loss_type, policy), model, inputs)


def ten_steps(trainer: Trainer, model: Any, inputs: dict[str, Any]) -> list[float]:
    """Return the losses before each of ten updates by AdamW, with gradients clipped to a norm of 1."""
    trainer.model = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print_losses(all_losses())
