"""Defines values and reasons that the tables of several tools share."""

from __future__ import annotations

from megatrain_ray.convert.key_tables import one_of

UNWARMED = "constant without warm-up"  # marks a schedule without warm-up; `resolve` replaces it by "constant"
schedule_of = one_of(
    {"linear": "linear", "cosine": "cosine", "constant": UNWARMED, "constant_with_warmup": "constant"},
    "only constant, linear and cosine are here",
)
# All implementations of AdamW compute the same update. 8-bit ones round its state, which is FP32 here.
_ADAMW = dict.fromkeys(
    (
        "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused",
        "adamw_apex_fused", "adamw_anyprecision", "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw",
        "paged_adamw_32bit", "paged_adamw_8bit",
    ),
    True,
)  # fmt: skip
optimizer_of = one_of(_ADAMW, "the optimizer is AdamW; for Muon set train.optimizer: muon")

PLANNED = "the plan decides what is kept, recomputed and where it lies; see megatrain plan"
KERNELS = "the engine chooses its kernels"
DATA_LOADING = "data are tokenised once into a cache, on all cores"
LOGGED = "metrics.jsonl and TensorBoard always; log.wandb and log.mlflow name a project"
MULTI_GPU = "one GPU"
RESUMES = "the same command resumes the run in run_dir"
LORA = "adapters are plain LoRA pairs beside an unquantised base; see lora.md"
LORA_RATES = "set train.groups with match: lora_B; see lora.md"
PARTLY = "set train.trainable or train.freeze; see freezing.md"
PREFERENCES = "there is no training on preferences or rewards"
