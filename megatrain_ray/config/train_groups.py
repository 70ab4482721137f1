"""Defines the settings of the updates: of `train` and `lora`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from megatrain_ray.config.values import (
    MOST_SEQUENCES,
    Address,
    Count,
    Epochs,
    Group,
    NotNegative,
    Patterns,
    Positive,
    Rate,
    Rewards,
    Seed,
    Sequences,
    Text,
    WarmUp,
    at_most,
    exact,
)  # fmt: skip

LABELLED = ("kto", "apo_zero_unpaired")  # objectives over labelled answers


class ParameterGroupConfig(Group):
    """Gives a group of parameters their own learning rate, decay or optimizer."""

    match: Annotated[Patterns, Field(min_length=1)]
    """A pattern of parameter names, or a list of them."""
    lr: Positive | None = None
    """Their peak learning rate; it follows the schedule in proportion. Unset: train.lr."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Of all that match, norms and biases too. Unset: train.weight_decay for matrices."""
    optimizer: Literal["adamw", "muon"] | None = None
    """With train.optimizer: muon, what trains them. Unset: Muon the matrices of the layers, AdamW the rest."""


class MuonConfig(Group):
    """Holds Muon's own settings; learning rate and decay are those of `train`."""

    momentum: Rate = 0.95
    """Weight of the old momentum in the new one."""
    nesterov: bool = True
    """Orthogonalise the momentum with the gradient mixed in once more."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps that orthogonalise a matrix, in bf16."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of a matrix's learning rate. match_rms_adamw: 0.2·√max(rows, columns), which suits AdamW's learning rate
    and decay; original: √max(1, rows/columns)."""


SIMPO_BETA = 2.0


class PreferenceConfig(Group):
    """Holds the numbers of the objectives over preferences and labelled answers."""

    beta: Positive = 0.1
    """Factor of log-probabilities in rewards: DPO's, SimPO's and KTO's β, IPO's τ, ORPO's λ. With objective: simpo
    unset means 2."""
    gamma: Annotated[float, Field(ge=0)] = 1.0
    """simpo: reward by which the chosen answer shall be ahead."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo, simpo: share of the pairs whose answers are taken for swapped."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Adds this × the chosen answer's mean cross-entropy over its tokens. orpo: always 1."""
    center_rewards_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """reward: adds this × (reward of the chosen + of the rejected answer)², which keeps rewards near zero."""
    desirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """kto, apo_zero_unpaired: factor of the losses of good answers."""
    undesirable_weight: Annotated[float, Field(ge=0)] = 1.0
    """kto, apo_zero_unpaired: factor of the losses of bad answers."""


class DistillationConfig(Group):
    """Holds the teacher of train.objective: distill, and the numbers of the divergence from it."""

    teacher: Text | None = None
    """Model that is learned from: a folder, hub id or run directory, with the ids of model.path. Required."""
    top_k: Count = 64
    """Likeliest tokens of each target that are kept of the teacher's prediction; all others count as one."""
    temperature: Positive = 1.0
    """Both models' logits are divided by this."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between: generalised Jensen-Shannon, as TRL's GKD."""
    sft_weight: Annotated[float, Field(ge=0)] = 0.0
    """Adds this × the cross-entropy of the targets."""


class PolicyConfig(Group):
    """Holds the numbers of objective grpo."""

    clip_low: Rate = 0.2
    """Ratios of new to old probabilities count as 1 - this at least, where the advantage is negative."""
    clip_high: Positive = 0.2
    """They count as 1 + this at most, where the advantage is positive."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from train.reference."""
    level: Literal["token", "sequence"] = "token"
    """Each token has a ratio, or each answer one: the geometric mean (GSPO)."""
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    """Mean over tokens. grpo: of each answer, then over answers; dapo: over all tokens of a step (as TRL's bnpo, if
    that has one micro-batch); dr_grpo: the sum ÷ answers ÷ answer_length."""
    answer_length: Count | None = None
    """dr_grpo: a constant in place of the answers' lengths; null: data.seq_len."""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = None
    """Multiplies losses by the ratio of old to the sampler's probabilities, of a token or an answer: bounded, or 0
    outside of the bounds. Then the old ones are by train.reference, or, of a run's own answers, by the model before
    it learns from them. null: they are the sampler's."""
    correction_min: Positive | None = None
    """Least ratio of the correction; null: 0."""
    correction_max: Positive | None = 3.0
    """Largest ratio of the correction; null: none."""


class ServerConfig(Group):
    """Configures a server of vLLM that samples in place of the run itself."""

    url: Address
    """Address of the server, as in http://localhost:8000."""
    weights: Text | None = None
    """Folder into which the run writes its weights for the server, which must find them under the same path; null:
    run_dir."""
    sleeps: bool = False
    """The server sleeps except while it samples, because the run trains on the same GPU."""
    timeout_s: Positive = 600.0
    """Seconds within which it must answer something: load weights, complete an answer, or be started again."""


class RolloutsConfig(Group):
    """Configures how a run samples answers to its own prompts and rewards them."""

    rewards: Rewards
    """Reward functions: exact, math, format, {regex: PATTERN}, MODULE:FUNCTION or FILE.py:FUNCTION. Their weighted sum
    is an answer's reward."""
    reward_weights: Annotated[tuple[float, ...], Field(strict=False)] | None = None
    """A factor for each of them; null: 1 each."""
    group_size: Annotated[int, Field(ge=2), AfterValidator(partial(at_most, MOST_SEQUENCES))] = 8
    """Answers to a prompt, which are compared with one another."""
    steps: Count = 1
    """Updates with the answers of one sampling: it makes steps × batch_size of them."""
    max_new_tokens: Count = 256
    """Tokens after which an answer is cut off. A prompt may have as many as that leaves of data.seq_len."""
    temperature: Positive = 1.0
    """Divides the logits before tokens are drawn."""
    eval_temperature: Annotated[float, Field(ge=0)] = 0.0
    """The same in evaluations, where each held-out prompt is answered once. 0: the likeliest token is taken."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Tokens are drawn from the likeliest ones that have this probability together."""
    timeout_s: Positive = 60.0
    """Seconds that the reward functions may take for one sampling."""
    keep: Count = 10
    """Newest files of rollouts that are kept in run_dir."""
    server: ServerConfig | None = None
    """A server that samples; null: the run samples itself."""


class OptimizationConfig(Group):
    steps: NotNegative | None = None
    """Updates in total, those before a resume included; 0: only evaluate. Set exactly one of train.steps and
    train.epochs."""
    epochs: Epochs | None = None
    """Passes over the training data: steps = epochs × rows ÷ batch_size, rounded up, once the data are tokenised."""
    batch_size: Sequences | None = None
    """Sequences of an update = micro_batch_size × accumulate × num_gpus; null: from these, 1 each if unset."""
    micro_batch_size: Sequences | None = None
    """Sequences of one forward; the plan chooses if only batch_size is set."""
    accumulate: Sequences | None = None
    """Micro-batches of an update."""
    objective: Literal[
        "sft", "distill", "dpo", "ipo", "hinge", "simpo", "orpo", "kto", "apo_zero_unpaired", "reward", "grpo"
    ] = "sft"
    """sft: cross-entropy of tokens; distill: divergence from a teacher. Over data.kind: pairs dpo, ipo, hinge, simpo
    and orpo prefer chosen answers to rejected ones; reward makes a model that scores answers. Over unpaired kto and
    apo_zero_unpaired prefer good answers to bad ones. Over rollouts or prompts grpo makes answers with a larger reward
    likelier."""
    distillation: DistillationConfig = DistillationConfig()
    """Teacher and numbers of objective: distill."""
    preference: PreferenceConfig = PreferenceConfig()
    """Numbers of the objectives over preferences and labelled answers."""
    policy: PolicyConfig = PolicyConfig()
    """Numbers of grpo."""
    reference: Text | None = None
    """Model whose log-probabilities of the targets come with batches: `model` (model.path without adapters), a folder,
    hub id or run directory. It is never loaded beside the model that is trained. null: `model` for dpo, ipo, hinge,
    kto and apo_zero_unpaired, and for grpo with policy.beta or policy.correction; else none."""
    rollouts: RolloutsConfig | None = None
    """data.kind: prompts: how the run samples answers and rewards them."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the schedule's end."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """Course of the learning rate from its peak to min_lr, after a linear warm-up."""
    warmup_steps: WarmUp = 0
    """Updates until the learning rate reaches its peak; a number below 1 is their share of all steps."""
    warmup_from_zero: bool = False
    """Warm up as Transformers does: step 1 has a rate of zero, and the step after warmup_steps the peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay, times the learning rate; none on norms and biases."""
    trainable: Patterns = ()
    """Patterns (regular expressions) of parameter names; what none matches is frozen. Empty: all are trained."""
    freeze: Patterns = ()
    """Patterns of parameters to freeze, out of the trainable ones."""
    vision: Literal["frozen", "projector", "all"] = "frozen"
    """data.images: what is trained beside the language model: nothing, the projector, or the vision tower as well."""
    groups: Annotated[tuple[ParameterGroupConfig, ...], Field(strict=False)] = ()
    """Parameters with their own rates: {match, lr, weight_decay, optimizer}; the first match counts."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon trains the layers' matrices, AdamW all else."""
    muon: MuonConfig = MuonConfig()
    """Muon's own numbers."""
    betas: Annotated[tuple[Rate, Rate], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments per update."""
    eps: Positive = 1e-8
    """Added to the root of AdamW's second moment."""
    clip: Positive | None = 1.0
    """Largest global gradient norm; null: no clipping, so updates start during the backward."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Adds this × logsumexp(logits)² to each supervised token's loss; PaLM used 1e-4."""
    label_smoothing: Rate = 0.0
    """Share of a target's probability spread over the vocabulary."""
    seed: Seed = 0
    """Seed of dropout and of the rounding of bf16 moments."""
    precision: Literal["bf16", "fp32", "tf32"] = "bf16"
    """Number format of the compute; masters are always FP32."""
    compute: Literal["fp8"] | None = None
    """fp8: layers multiply matrices in FP8, so results differ from plain PyTorch; null: in train.precision."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """bf16: AdamW's moments take half the room, stochastically rounded, so results differ from plain PyTorch."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: sums over micro-batches are rounded once before they leave the device."""
    deterministic: bool = False
    """Use kernels that give the same bits on every run."""

    @model_validator(mode="before")
    @classmethod
    def _with_beta_of_simpo(cls, value: Any) -> Any:
        """Fill in the β that SimPO's paper trains with: means over tokens are smaller than the sums of DPO."""
        if isinstance(value, Mapping) and value.get("objective") == "simpo":
            numbers = value.get("preference", {})
            if isinstance(numbers, Mapping):
                return {**value, "preference": {"beta": SIMPO_BETA, **numbers}}
        return value

    @property
    def reference_model(self) -> str | None:
        """Return train.reference, or the reference that the objective has without it; None: there is none."""
        if self.objective == "distill":
            return self.distillation.teacher
        return self.reference or ("model" if self.compares else None)

    @property
    def compares(self) -> bool:
        """Return whether the objective compares the model with a reference."""
        if self.objective == "grpo":
            return self.policy.beta > 0 or (self.policy.correction is not None and self.rollouts is None)
        return self.objective in ("dpo", "ipo", "hinge", *LABELLED)

    @property
    def estimates_kl(self) -> bool:
        """Return whether the objective needs log-probabilities of mismatched answers: KTO estimates KL by them."""
        return self.objective == "kto"

    @property
    def sampling_interval(self) -> int:
        """Return after how many updates the run samples answers again; 0: it samples none."""
        return self.rollouts.steps if self.rollouts else 0

    @property
    def num_steps(self) -> int:
        """Return train.steps, which TrainConfig.with_steps has set by then if the configuration gives train.epochs."""
        assert self.steps is not None
        return self.steps

    @property
    def num_warmup_steps(self) -> int:
        """Return the updates of the warm-up. A share is rounded up, as in Transformers."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(exact(self.warmup_steps) * self.num_steps)

    @property
    def split_is_free(self) -> bool:
        """Return whether the plan may choose micro-batch size and accumulation."""
        return self.micro_batch_size is None and self.accumulate is None


class LoraConfig(Group):
    """Configures low-rank adapters: pairs of thin trained matrices added to frozen linear layers."""

    match: Annotated[Patterns, Field(min_length=1)]
    """Patterns (regular expressions) over the paths of linear modules that get a pair. All else is frozen, except what
    train.trainable matches."""
    rank: Count = 16
    """Smaller side of a pair's two matrices."""
    alpha: Positive = 32.0
    """A pair's product is scaled by alpha ÷ rank."""
    dropout: Rate = 0.0
    """Dropout on a pair's input."""
    path: Text | None = None
    """Folder or hub id of an adapter (peft's format) to continue; null: a new one."""
