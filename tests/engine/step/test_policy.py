"""GRPO and its kin: the losses of TRL, bit-equal to plain autograd, whatever the chunks, micro-batches and rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain_ray.engine.objectives.policy_objective import PolicyLoss
from tests.engine.step.test_parity import assert_equal
from tests.support.pairs import referenced
from tests.support.policy_losses import Policy
from tests.support.reference import Recipe, train_reference
from tests.support.rollouts import random_rollouts, rollout_batches
from tests.support.run_engine import Mode, train_engine
from tests.support.tiny import build_tiny

# Loss and gradient norm of one batch of twelve rollouts by TRL 1.16.0 (tests/support/make_trl_policy_losses.py), which
# pads each of them to a row of its own. Its dapo and its bnpo are the same if a step is one micro-batch.
BY_TRL = {
    Policy(): (0.5128902, 6.3094678),
    Policy(loss_type="grpo", beta=0.2): (0.3232687, 4.2124410),
    Policy(0.1, 0.3, 0.1, "token", "dr_grpo", 16): (0.1303202, 1.6594335),
    Policy(0.05, 0.02, 0.0, "sequence", "grpo"): (0.2259998, 2.5900886),
    Policy(0.05, 0.02, 0.2, "sequence", "dapo"): (0.4546255, 4.2520638),
    Policy(beta=0.1, correction="token_truncate", correction_max=1.1): (0.5247868, 6.5052896),
    Policy(correction="token_mask", correction_min=0.8, correction_max=1.3): (0.3071659, 4.6454821),
    Policy(loss_type="grpo", correction="sequence_truncate", correction_max=1.2): (0.3479625, 3.7341874),
    Policy(level="sequence", loss_type="grpo", correction="sequence_mask", correction_max=2.0): (-0.0969164, 1.0092310),
}  # fmt: skip

# The losses of ten updates with these rollouts at a learning rate of 1e-4, by the same.
TEN_BY_TRL = {
    Policy(): (
        0.5128902, 0.4165950, 0.3338546, 0.2653820, 0.2102828,
        0.1643438, 0.1271210, 0.0968456, 0.0702865, 0.0497944,
    ),
    Policy(loss_type="grpo", beta=0.2): (
        0.3232687, 0.2548054, 0.1958611, 0.1455297, 0.1033699,
        0.0699252, 0.0408075, 0.0181812, -0.0009335, -0.0169613,
    ),
    Policy(0.1, 0.3, 0.1, "token", "dr_grpo", 16): (
        0.1303202, 0.1043353, 0.0831169, 0.0658714, 0.0516851,
        0.0405756, 0.0327936, 0.0259748, 0.0203646, 0.0164967,
    ),
    Policy(0.05, 0.02, 0.0, "sequence", "grpo"): (
        0.2259998, 0.1784460, 0.1385387, 0.1019342, 0.0706707,
        0.0455983, 0.0289387, 0.0213364, 0.0208425, 0.0202963,
    ),
    Policy(0.05, 0.02, 0.2, "sequence", "dapo"): (
        0.4546255, 0.3798846, 0.3182785, 0.2627961, 0.2141256,
        0.1736686, 0.1498185, 0.1418872, 0.1374368, 0.1336087,
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", BY_TRL, ids=lambda policy: f"{policy.loss_type} {policy.level} {policy.correction}")
def test_losses_and_gradients_are_those_of_trl(tmp_path: Path, policy: Policy) -> None:
    build_tiny(tmp_path)
    batches = rollout_batches(list(random_rollouts(12)), 1, packing=True)
    assert batches[0].num_documents == 12
    batches = referenced(tmp_path / "reference", batches)
    recipe = Recipe(1, policy=policy, micro_batch_size=1, loss_chunk_tokens=16)
    ours = train_engine(tmp_path, batches, recipe, Mode())
    assert (ours.losses[0], ours.grad_norms[0]) == pytest.approx(BY_TRL[policy], rel=3e-6)


@pytest.mark.parametrize("policy", TEN_BY_TRL, ids=lambda policy: f"{policy.loss_type} {policy.level} {policy.beta}")
def test_ten_updates_with_the_same_rollouts_go_as_with_trl(tmp_path: Path, policy: Policy) -> None:
    """Ratios leave 1 and are clipped."""
    build_tiny(tmp_path)
    batches = referenced(tmp_path / "reference", rollout_batches(list(random_rollouts(12)), 1, packing=True))
    recipe = Recipe(10, policy=policy, lr=1e-4, schedule="constant", weight_decay=0.0, micro_batch_size=1)
    ours = train_engine(tmp_path, batches * 10, recipe, Mode())
    assert ours.losses == pytest.approx(TEN_BY_TRL[policy], rel=1e-4, abs=1e-6)
    assert ours.reports[-1].metrics["clipped_low"] + ours.reports[-1].metrics["clipped_high"] > 0.1


@pytest.mark.parametrize(
    ("policy", "precision"),
    [
        (Policy(beta=0.2, loss_type="grpo"), "fp32"),
        (Policy(0.05, 0.02, 0.1, "sequence", "dapo", 1, "token_mask", 0.8, 1.3), "bf16"),
    ],
)
def test_it_is_bit_equal(tmp_path: Path, policy: Policy, precision: str) -> None:
    build_tiny(tmp_path)
    rollouts = list(random_rollouts(24))
    batches = rollout_batches(rollouts, 2, packing=True, batch_size=3)
    batches += rollout_batches(rollouts[9:], 1, packing=True, batch_size=2)  # a step may have fewer rows than planned
    batches = referenced(tmp_path / "reference", batches)
    recipe = Recipe(3, precision=precision, policy=policy)
    ours = train_engine(tmp_path, batches, recipe, Mode())
    assert_equal(ours, train_reference(tmp_path, batches, recipe))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_rows_and_micro_batches_change_nothing_but_rounding(tmp_path: Path, loss_type: PolicyLoss) -> None:
    """One answer a row, or several; metrics are those of the whole step."""
    build_tiny(tmp_path)
    rollouts = list(random_rollouts(8))
    alone = rollout_batches(rollouts, 1, packing=False)
    packed = rollout_batches(rollouts, 1, packing=True)
    assert alone[0].positions is None and alone[0].num_documents == packed[0].num_documents == 8
    recipe = Recipe(1, policy=Policy(loss_type=loss_type))
    runs = [
        train_engine(tmp_path, batches, replace(recipe, micro_batch_size=size), Mode())
        for batches, size in ((alone, 8), (alone, 2), (packed, 1))
    ]
    for run in runs:
        assert run.losses == pytest.approx(runs[0].losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(runs[0].grad_norms, rel=1e-5)
        assert run.reports[0].metrics == pytest.approx(runs[0].reports[0].metrics, rel=1e-5)
    assert set(runs[0].reports[0].metrics) == {
        "clipped_low", "clipped_high", "cross_entropy", "ratio_max", "entropy",
    }  # fmt: skip
    assert runs[0].reports[0].metrics["ratio_max"] > 1.2
    (batch,) = alone
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        scores = model(torch.as_tensor(batch.input_ids)).logits[torch.as_tensor(batch.targets) != -100]
    expected = torch.distributions.Categorical(logits=scores).entropy().mean()
    assert runs[0].reports[0].metrics["entropy"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(level="sequence"),
        Policy(correction="token_truncate", correction_min=0.5, correction_max=None),
        Policy(correction="sequence_truncate", correction_min=0.5, correction_max=None),
        Policy(beta=0.1),
    ],
    ids=lambda policy: f"{policy.level} {policy.correction} {policy.beta}",
)
def test_an_answer_that_the_sampler_or_the_model_held_impossible_breaks_no_step(tmp_path: Path, policy: Policy) -> None:
    build_tiny(tmp_path)
    first, *others = random_rollouts(4)
    odd = first._replace(logprobs=[-9999.0] * len(first.answer), advantage=1.0)
    (batch,) = referenced(tmp_path / "reference", rollout_batches([odd, *others], 1, packing=True))
    if policy.beta:  # as much likelier to the reference as if the model held it impossible
        batch = replace(batch, reference_logprobs=np.asarray(batch.reference_logprobs) + 200)
    ours = train_engine(tmp_path, [batch], Recipe(1, policy=policy), Mode())
    assert not ours.reports[0].skipped
    assert np.isfinite([*ours.losses, *ours.grad_norms]).all()


def test_without_logprobs_it_is_the_policy_gradient(tmp_path: Path) -> None:
    """Ratios are 1 and still differentiable. One token of an answer may lack its log-probability as well."""
    build_tiny(tmp_path)
    unknown = [rollout._replace(logprobs=[np.nan] * len(rollout.answer)) for rollout in random_rollouts(4)]
    batches = rollout_batches(unknown, 1, packing=True)
    recipe = Recipe(1, policy=Policy())
    ours = train_engine(tmp_path, batches, recipe, Mode())
    advantages, learned = batches[0].columns["advantage"], batches[0].targets != -100
    assert ours.losses[0] == pytest.approx(-float(torch.as_tensor(advantages)[learned].mean()), rel=1e-6)
    assert ours.grad_norms[0] > 0.1
    assert ours.reports[0].metrics["ratio_max"] == 1.0
