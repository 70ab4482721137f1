"""Defines what the keys of LLaMA-Factory's YAML files correspond to.

Most of these keys are those of Transformers' TrainingArguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain_ray.convert.foreign_values import (
    DATA_LOADING,
    KERNELS,
    LOGGED,
    LORA,
    LORA_RATES,
    MULTI_GPU,
    PARTLY,
    PLANNED,
    PREFERENCES,
    RESUMES,
    optimizer_of,
    schedule_of,
)
from megatrain_ray.convert.key_tables import RefusedError, Sets, Table, names, negated, number, one_of, or_null, whole
from megatrain_ray.convert.parameter_patterns import EVERY, one_folder, parameters_of, targets_of
from megatrain_ray.io.chat.find_chats import FILE_NAME


def device_of(on_cpu: Any) -> str:
    return "cpu" if on_cpu else "auto"


EVALUATED = "held-out loss and perplexity, before the first update, every eval_steps, and at the end"
METHODS = {"full": "full", "freeze": "freeze", "lora": "lora"}
SETS = {
    "model_name_or_path": Sets("model.path"),
    "model_revision": Sets("revision"),
    "trust_remote_code": Sets("model.trust_remote_code"),
    "cutoff_len": Sets("data.seq_len", whole, 2048),
    "packing": Sets("data.packing", default=False),
    "neat_packing": Sets("neat_packing"),
    "disable_shuffling": Sets("data.shuffle", negated),
    "enable_thinking": Sets("enable_thinking"),
    "output_dir": Sets("run_dir"),
    "per_device_train_batch_size": Sets("train.micro_batch_size", whole, 8),
    "gradient_accumulation_steps": Sets("train.accumulate", whole, 1),
    "num_train_epochs": Sets("epochs", number, 3.0),
    "max_steps": Sets("max_steps", whole),
    "learning_rate": Sets("train.lr", number, 5e-5),
    "lr_scheduler_type": Sets("train.schedule", schedule_of, "linear"),
    "warmup_ratio": Sets("warmup_ratio", number),
    "warmup_steps": Sets("warmup_steps", number),
    "optim": Sets("optimizer", optimizer_of, True),
    "weight_decay": Sets("train.weight_decay", number, 0.0),
    "adam_beta1": Sets("beta1", number, 0.9),
    "adam_beta2": Sets("beta2", number, 0.999),
    "adam_epsilon": Sets("train.eps", number, 1e-8),
    "max_grad_norm": Sets("train.clip", or_null),
    "label_smoothing_factor": Sets("train.label_smoothing", number),
    "bf16": Sets("bf16"),
    "pure_bf16": Sets("bf16"),
    "tf32": Sets("tf32"),
    "use_cpu": Sets("hardware.device", device_of),
    "no_cuda": Sets("hardware.device", device_of),
    "full_determinism": Sets("train.deterministic"),
    "seed": Sets("seed", whole, 42),
    "data_seed": Sets("data_seed", whole),
    "train_sampling_strategy": Sets("data.shuffle", one_of({"random": True, "sequential": False}, "only these are")),
    "save_strategy": Sets("save_strategy", one_of({"no": "no", "steps": "steps", "epoch": "epoch"}, "only these are")),
    "save_steps": Sets("save_steps", number, 500),
    "save_total_limit": Sets("save_keep", whole),
    "eval_steps": Sets("eval_steps", number),
    "stage": Sets("data.kind", one_of({"sft": "sft", "pt": "pretrain"}, PREFERENCES), "sft"),
    "finetuning_type": Sets("method", one_of(METHODS, "only full, freeze and lora are here"), "lora"),
    "freeze_trainable_layers": Sets("freeze_layers", whole, 2),
    "freeze_trainable_modules": Sets("freeze_modules", names, ["all"]),
    "freeze_extra_modules": Sets("freeze_extra", names),
    "lora_rank": Sets("lora.rank", whole, 8),
    "lora_alpha": Sets("lora.alpha", number),
    "lora_dropout": Sets("lora.dropout", number),
    "lora_target": Sets("lora.match", targets_of, [EVERY]),
    "additional_target": Sets("beside", parameters_of),
    "adapter_name_or_path": Sets("lora.path", one_folder),
}
OTHERWISE = {
    "template": "the tokenizer's own chat template is used; data.chat_template names a Jinja file for another",
    "tool_format": "tools are written as the chat template writes them",
}
MEANINGLESS = {
    "do_train": "megatrain train trains",
    "do_eval": "eval_every says when",
    "overwrite_output_dir": RESUMES,
    "ignore_data_skip": RESUMES,
    "do_predict": "of another command",
    "activation_checkpointing*": PLANNED,
    "auto_find_batch_size": PLANNED,
    "accelerator_config": PLANNED,
    "liger_kernel_config": KERNELS,
    "jit_mode_eval": KERNELS,
    "half_precision_backend": KERNELS,
    "torchdynamo": KERNELS,
    "use_mps_device": "hardware.device says where",
    "average_tokens_across_devices": "the mean is over all tokens of a step in any case",
    "use_cache": "of generation",
    "restore_callback_states_from_checkpoint": RESUMES,
    "enable_jit_checkpoint": RESUMES,
    "prediction_loss_only": EVALUATED,
    "batch_eval_metrics": EVALUATED,
    "use_legacy_prediction_loop": EVALUATED,
    "eval_*": EVALUATED,
    "*_full_eval": EVALUATED,
    "debug": LOGGED,
    "skip_memory_metrics": LOGGED,
    "project": LOGGED,
    "trackio_*": LOGGED,
    "length_column_name": "pads cost no loss, and packing makes few",
    "_n_gpu": MULTI_GPU,
    "gradient_checkpointing": PLANNED,
    "gradient_checkpointing_kwargs": PLANNED,
    "disable_gradient_checkpointing": PLANNED,
    "use_reentrant_gc": PLANNED,
    "use_unsloth_gc": PLANNED,
    "low_cpu_mem_usage": PLANNED,
    "offload_folder": PLANNED,
    "deepspeed": PLANNED,
    "fsdp*": PLANNED,
    "flash_attn": KERNELS,
    "enable_liger_kernel": KERNELS,
    "use_liger_kernel": KERNELS,
    "use_unsloth": KERNELS,
    "use_v1_kernels": KERNELS,
    "torch_compile*": KERNELS,
    "upcast_layernorm": KERNELS,
    "upcast_lmhead_output": KERNELS,
    "use_fast_tokenizer": "tokenizers are those of tokenizer.json",
    "use_kv_cache": "of generation",
    "eval_num_beams": "of generation",
    "torch_empty_cache_steps": PLANNED,
    "overwrite_cache": DATA_LOADING,
    "preprocessing_*": DATA_LOADING,
    "dataloader_*": DATA_LOADING,
    "data_shared_file_system": DATA_LOADING,
    "streaming": DATA_LOADING,
    "buffer_size": DATA_LOADING,
    "tokenized_path": DATA_LOADING,
    "cache_dir": "HF_HOME says where the hub's cache is",
    "*_hub_token": "hf auth login",
    "media_dir": "texts alone are trained on",
    "image_*": "texts alone are trained on",
    "video_*": "texts alone are trained on",
    "freeze_vision_tower": "what a text does not reach is not trained",
    "freeze_multi_modal_projector": "what a text does not reach is not trained",
    "ignore_pad_token_for_loss": "pads are never learned",
    "group_by_length": "pads cost no loss, and packing makes few",
    "remove_unused_columns": DATA_LOADING,
    "logging_*": LOGGED,
    "log_*": LOGGED,
    "report_to": LOGGED,
    "run_name": LOGGED,
    "plot_loss": LOGGED,
    "disable_tqdm": LOGGED,
    "include_*": LOGGED,
    "compute_accuracy": LOGGED,
    "swanlab_*": LOGGED,
    "use_swanlab": LOGGED,
    "print_param_status": LOGGED,
    "ddp_*": MULTI_GPU,
    "local_rank": MULTI_GPU,
    "ray_*": "Ray is used in any case; RAY_ADDRESS names a cluster",
    "eval_strategy": "eval_steps says how often, where there is an eval_dataset",
    "evaluation_strategy": "eval_steps says how often, where there is an eval_dataset",
    "per_device_eval_batch_size": "the plan's micro-batches serve here too",
    "eval_accumulation_steps": "the plan's micro-batches serve here too",
    "eval_on_each_dataset": "one loss over all of them is given",
    "save_only_model": "a save is whole, so that a run can go on from it; megatrain export writes the model",
    "save_safetensors": "exports are safetensors",
    "save_on_each_node": MULTI_GPU,
    "push_to_hub*": "an export can be uploaded by hand",
    "hub_*": "an export can be uploaded by hand",
    "export_*": "of another command",
    "pissa_iter": "of pissa_init",
    "pissa_convert": "of pissa_init",
    "loraplus_lr_embedding": "of loraplus_lr_ratio",
    "infer_*": "of generation",
    "predict_with_generate": "of generation",
    "max_new_tokens": "of generation",
    "temperature": "of generation",
    "top_p": "of generation",
    "top_k": "of generation",
}
REFUSED = {
    "fp16": "compute is bf16, tf32 or fp32; set bf16",
    "fp16_*": "compute is bf16, tf32 or fp32; set bf16",
    "fp8*": "compute is bf16, tf32 or fp32",
    "parallelism_config": MULTI_GPU,
    "mp_parameters": MULTI_GPU,
    "tpu_*": MULTI_GPU,
    "per_gpu_*": "say per_device_train_batch_size",
    "label_names": "labels are read from labels",
    "past_index": "the model's own forward runs unchanged",
    "adafactor": "the optimizer is AdamW",
    "greater_is_better": "a run goes to train.steps; save_keep keeps earlier saves",
    "quantization_*": "a quantised base is not trained; masters are FP32",
    "double_quantization": "a quantised base is not trained; masters are FP32",
    "adapter_*": LORA,
    "lora_*": LORA,
    "loraplus_lr_ratio": LORA_RATES,
    "pissa_init": LORA,
    "use_rslora": LORA,
    "use_dora": LORA,
    "create_new_adapter": LORA,
    "freeze_language_model": PARTLY,
    "use_llama_pro": PARTLY,
    "train_mm_proj_only": PARTLY,
    "train_from_scratch": "give model.config instead of model.path",
    "resume_from_checkpoint": "their checkpoints cannot be read; a folder of weights can, as model.path",
    "use_galore": "the optimizer is AdamW",
    "galore_*": "the optimizer is AdamW",
    "use_apollo": "the optimizer is AdamW",
    "apollo_*": "the optimizer is AdamW",
    "use_badam": "the optimizer is AdamW",
    "badam_*": "the optimizer is AdamW",
    "use_adam_mini": "the optimizer is AdamW",
    "use_muon": "set train.optimizer: muon; see muon.md",
    "optim_*": "the optimizer is AdamW",
    "lr_scheduler_kwargs": "set train.min_lr where it is meant",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "use_dft_loss": "the loss is cross-entropy",
    "moe_aux_loss_coef": "the model's own configuration has it: router_aux_loss_coef in config.json",
    "mixture_of_depths": "the model's own forward runs unchanged",
    "shift_attn": "the model's own forward runs unchanged",
    "rope_scaling": "the model's own configuration has it: rope_scaling in config.json",
    "resize_vocab": "change model and tokenizer before",
    "add_tokens": "change model and tokenizer before",
    "add_special_tokens": "change model and tokenizer before",
    "new_special_tokens_config": "change model and tokenizer before",
    "split_special_tokens": "special tokens in texts are read as such",
    "train_on_prompt": "answers alone are learned; as texts (data.kind: pretrain) all is",
    "mask_history": "all answers are learned",
    "default_system": "put it into the records",
    "max_samples": "all records are read: write those that are meant into a file",
    "val_size": "write the held-out records into a file of their own, for data.eval_path",
    "early_stopping_steps": "a run goes to train.steps",
    "load_best_model_at_end": "a run goes to train.steps; save_keep keeps earlier saves",
    "metric_for_best_model": "a run goes to train.steps; save_keep keeps earlier saves",
    "mix_strategy": "sources are joined; for shares give data.path as a list of {path, weight}",
    "interleave_probs": "sources are joined; for shares give data.path as a list of {path, weight}",
    "pref_*": PREFERENCES,
    "ppo_*": PREFERENCES,
    "kto_*": PREFERENCES,
    "simpo_*": PREFERENCES,
    "dpo_*": PREFERENCES,
    "ref_model*": PREFERENCES,
    "reward_model*": PREFERENCES,
}
DATA_KEYS = ("dataset", "eval_dataset", "dataset_dir", "mix_strategy")


def data_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the data sets, which the file names as entries of a dataset_info.json, by dotted key.

    tree: the configuration file.

    Raises RefusedError if they are missing or cannot be translated.
    """
    if tree.get("mix_strategy", "concat") != "concat":
        raise RefusedError(f"mix_strategy: {REFUSED['mix_strategy']}")
    if not tree.get("dataset"):
        raise RefusedError("dataset: is missing, and data.path is required")
    folder = Path(str(tree.get("dataset_dir", "data")))
    if str(folder).startswith(("ONLINE", "REMOTE")):
        raise RefusedError(f"dataset_dir: {folder}: download the data sets, and name the folder")
    info, chosen = folder / FILE_NAME, names(tree["dataset"])
    if tree.get("stage") == "pt":
        # Texts are packed unless the file says otherwise.
        return {"data.packing": tree.get("packing", True), **_texts(info, folder, chosen)}
    found: dict[str, Any] = {"data.path": str(info), "data.dataset": chosen if len(chosen) > 1 else chosen[0]}
    if tree.get("eval_dataset"):
        found |= {"data.eval_path": str(info), "data.eval_dataset": names(tree["eval_dataset"])}
    return found


def _texts(info: Path, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """Return settings with the files of texts themselves: our pretraining data do not use dataset_info.json."""
    try:
        entries = [json.loads(info.read_text(encoding="utf-8"))[name] for name in chosen]
        files = [str(folder / entry["file_name"]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"dataset: {', '.join(chosen)}: {info} does not tell its file ({error!r}); give data.path"
        ) from None
    fields = {entry.get("columns", {}).get("prompt", "text") for entry in entries}
    if len(fields) > 1:
        raise RefusedError(f"dataset: its texts stand under several keys ({', '.join(sorted(fields))}); one is read")
    return {"data.path": files if len(files) > 1 else files[0], "data.text_field": fields.pop()}


LLAMA_FACTORY = Table("LLaMA-Factory", "model_name_or_path", SETS, OTHERWISE, MEANINGLESS, REFUSED, DATA_KEYS, data_of)
