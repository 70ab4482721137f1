"""Makes a tiny configuration of every model type that Transformers has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto as auto

from megatrain_ray.model.small_copy import shrink

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
IS_4 = transformers.__version__.startswith("4.")
ROPE_KEY = "rope_scaling" if IS_4 else "rope_parameters"
AXES = {ROPE_KEY: {**ROPE, "mrope_section": [2, 1, 1]}}
HALF_AXES = {"head_dim": 16, ROPE_KEY: {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
NGRAMS = {
    "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1, "ple_layer_ids": [1], "ngram_size": 3,
    "heads_per_ngram": 2, "ple_embed_dim": 16, "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
}  # fmt: skip
NOTE = {"head_dim": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "per_layer_config": {}}

# Settings without which a type's configuration refuses its own defaults.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
# What a default configuration lacks, and what the rules of sizes do not know, by type.
CHANGES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {4: 2}, "max_value_projector_patch_to_query_dict": 2},
    "apertus1p5": {"image_token_offset": 40, "audio_token_offset": 72},
    "axk2": {"layer_types": ["indexed_attention"] * 4},
    "bamba": {"attn_layer_indices": [1]},
    "bert-generation": {"is_decoder": True},
    "chameleon": {"vocabulary_map": {"<image>": 122}, "vocab_size": 131},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}, **SLIDING_AND_FULL},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}, **SLIDING_AND_FULL
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots1": {
        "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {"text_config": NOTE},
    "dots3_note_text": NOTE,
    "emu3": {"vocabulary_map": {"<image>": 122}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "gemma3n": {"text_config": {**SLIDING_AND_FULL, "num_kv_shared_layers": 2}},
    "gemma3n_text": {**SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 4}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
    "glm4v": {"text_config": AXES},
    "glm46v": {"text_config": AXES},
    "glm4v_moe": {"text_config": HALF_AXES},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "glm_ocr": {"text_config": AXES},
    "glmga": {"text_config": AXES},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": [2] * 4, "num_shared_expert": [1] * 4},
    "hunyuan_vl": {"text_config": {"head_dim": 8, "rope_parameters": {**ROPE, "xdrope_section": [1, 1, 1, 1]}}},
    "inkling_mm_model": {"vision_config": {"patch_size": 16}},  # with 14, a layer of its tower has no weights
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "ministral": {"head_dim": 8},
    "mistral4": {
        "num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl": {"text_config": AXES},
    "qwen2_5_vl": {"text_config": AXES},
    "qwen2_vl": {"text_config": AXES},
    "qwen4_exp": {"text_config": NGRAMS},
    "qwen4_exp_text": NGRAMS,
    "qwen2_5_omni_thinker": {"text_config": AXES},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "step3p7": {"text_config": {"layer_types": ["full_attention"] * 4, "sliding_window": 8}},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0, "mode": "train", "chunk_size": 4},
    "zamba": {"use_mamba_kernels": False, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"use_mamba_kernels": False},
}  # fmt: skip
if IS_4:  # where these have other defaults
    CHANGES |= {"jamba": CHANGES["zamba2"], "qwen3_vl": CHANGES["qwen2_vl"], "qwen3_vl_moe": CHANGES["qwen2_vl"]}


def all_types() -> list[str]:
    """Return the types that have a causal language model, or one that takes images too."""
    return list(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def settings_of(model_type: str) -> dict[str, Any]:
    """Return the default configuration of a type with small sizes and without dropout.

    Encoders with a causal head are decoders in it, and a model of images and text is the whole model.
    """
    config = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}))
    settings = _changed(shrink(config.to_dict()), CHANGES.get(model_type, {}))
    if model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and "is_decoder" in settings:
        settings["is_decoder"] = True
    if whole := auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type):
        settings["architectures"] = [whole]
    return settings


def _changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    inner = {k: _changed(settings[k], v) for k, v in changes.items() if k.endswith("_config") and settings.get(k)}
    return {**settings, **changes, **inner}
