"""Defines tiny random models of many families by their configurations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
# The tower is larger than the language model: the layer list is found by what runs, not by size.
VISION: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
QWEN_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "num_heads": 2, "patch_size": 14,
}  # fmt: skip
QWEN_IMAGE = {"vision_start_token_id": 120, "vision_end_token_id": 121, "image_token_id": 122, "video_token_id": 123}
THREE_AXES: dict[str, Any] = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1]}


@dataclass(frozen=True)
class Family:
    """Holds the configuration of a family's model.

    config: Hugging Face's configuration, as plain data.
    shows: what of the engine only such a model needs, for the reader.
    frozen: prefixes of parameters that a text never reaches.
    """

    config: dict[str, Any]
    shows: str
    frozen: tuple[str, ...] = field(default=())


def family(model_type: str, shows: str, frozen: tuple[str, ...] = (), **changes: Any) -> Family:
    return Family({"model_type": model_type, **SIZES, **changes}, shows, frozen)


FAMILIES: dict[str, Family] = {
    "Llama": family("llama", "the plainest"),
    "Llama, tied": family("llama", "a tied head", tie_word_embeddings=True),
    "Qwen2": family("qwen2", "biases of queries, keys and values"),
    "Qwen2, tied": family("qwen2", "the same with a tied head", tie_word_embeddings=True),
    "Qwen3": family("qwen3", "norms of queries and keys", head_dim=16),
    "Mistral": family("mistral", "a sliding window shorter than the sequence", sliding_window=8),
    "Gemma 2": family(
        "gemma2", "soft-capped scores and logits, scaled embedding, alternating windows",
        head_dim=8, sliding_window=8, query_pre_attn_scalar=8, final_logit_softcapping=5.0, attn_logit_softcapping=3.0,
    ),
    "Gemma 3": family(
        "gemma3_text", "two rotary embeddings, alternating windows",
        head_dim=8, sliding_window=8, query_pre_attn_scalar=8,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
    "Phi-3": family("phi3", "fused projections"),
    "GPT-2": Family({"model_type": "gpt2", **GPT2_SIZES}, "learned positions, tied, dropout everywhere, Conv1D"),
    "GPT-2, untied": Family(
        {"model_type": "gpt2", **GPT2_SIZES, "tie_word_embeddings": False}, "the same with a head of its own"
    ),
    "GPT-NeoX": family("gpt_neox", "attention and MLP in parallel", hidden_dropout=0.1, attention_dropout=0.1),
    "OLMo 2": family("olmo2", "norms after attention and MLP"),
    "Bloom": Family(
        {"model_type": "bloom", "vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 3, "hidden_dropout": 0.1}, "ALiBi, a norm of the embedding",
    ),
    "Falcon, ALiBi": family("falcon", "ALiBi", alibi=True, new_decoder_architecture=False, multi_query=True),
    "MPT": Family(
        {"model_type": "mpt", "vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
        "ALiBi",
    ),
    "Mixtral": family(
        "mixtral", "experts, router loss", num_local_experts=8, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1,
    ),
    "Qwen3-MoE": family(
        "qwen3_moe", "experts beside dense layers, router loss", **EXPERTS, head_dim=8, decoder_sparse_step=2,
        output_router_logits=True, router_aux_loss_coef=0.1,
    ),
    "GPT-OSS": family(
        "gpt_oss", "attention sinks, fused experts", num_local_experts=4, num_experts_per_tok=2, head_dim=8,
        sliding_window=8, output_router_logits=True, router_aux_loss_coef=0.1,
    ),
    "DeepSeek-V3": family(
        "deepseek_v3", "latent attention, a dense first layer, shared experts, routing with a bias",
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=2,
        topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        num_key_value_heads=4,
    ),
    "GLM-4.5": family(
        "glm4_moe", "norms of queries and keys, half of each head rotated, routers in FP32 with a bias",
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, n_group=1,
        topk_group=1, first_k_dense_replace=1, head_dim=8, use_qk_norm=True, attention_bias=True,
    ),
    "Granite-MoE, shared": family(
        "granitemoeshared", "experts and an MLP beside them, which read views of one norm", num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=16,
    ),
    "Qwen3-Next": family(
        "qwen3_next", "linear attention in three of four layers, gates, shared expert", **EXPERTS, head_dim=8,
        num_hidden_layers=4, shared_expert_intermediate_size=16, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, output_router_logits=True, router_aux_loss_coef=0.1,
    ),
    "Falcon-H1": family(
        "falcon_h1", "attention and state space in parallel", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8, head_dim=8,
    ),
    "Bamba": family(
        "bamba", "state space layers and an attention layer", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
        mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
    ),
    "Jamba": family(
        "jamba", "selective state space, experts in some layers", num_experts=4, num_experts_per_tok=2,
        attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False, output_router_logits=True, router_aux_loss_coef=0.1,
    ),
    "Gemma 3n": family(
        "gemma3n_text", "keys and values of one layer used by later ones, embeddings for each layer",
        head_dim=8, sliding_window=8, num_hidden_layers=4, num_kv_shared_layers=2, intermediate_size=[48] * 4,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "Zamba2": family(
        "zamba2", "one attention block shared by several layers", num_hidden_layers=4, mamba_d_state=8,
        mamba_headdim=16, n_mamba_heads=4,
        mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, hybrid_layer_ids=[1, 3], use_mem_rope=True, adapter_rank=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_key_value_heads=4,
    ),
    "Gemma 3, vision-language": Family(
        {"model_type": "gemma3",
         "text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 8, "sliding_window": 8,
                         "query_pre_attn_scalar": 8,
                         "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
         "vision_config": {"model_type": "siglip_vision_model", **VISION},
         "mm_tokens_per_image": 4, "boi_token_index": 120, "eoi_token_index": 121, "image_token_index": 122},
        "the language half of a larger model",
        ("model.vision_tower.", "model.multi_modal_projector."),
    ),
    "Qwen2-VL": Family(
        {"model_type": "qwen2_vl",
         "text_config": {"model_type": "qwen2_vl_text", **SIZES, "rope_scaling": THREE_AXES}, **QWEN_IMAGE,
         "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}},
        "positions along three axes", ("model.visual.",),
    ),
    "Qwen2.5-VL": Family(
        {"model_type": "qwen2_5_vl",
         "text_config": {"model_type": "qwen2_5_vl_text", **SIZES, "rope_scaling": THREE_AXES}, **QWEN_IMAGE,
         "vision_config": {**QWEN_VISION, "depth": 2, "fullatt_block_indexes": [1]}},
        "positions along three axes", ("model.visual.",),
    ),
    "Qwen3-VL": Family(
        {"model_type": "qwen3_vl",
         "text_config": {"model_type": "qwen3_vl_text", **SIZES, "head_dim": 8, "rope_scaling": THREE_AXES},
         "vision_config": {**QWEN_VISION, "depth": 3, "deepstack_visual_indexes": [0, 1]}, **QWEN_IMAGE},
        "positions along three axes, images that enter at several layers", ("model.visual.",),
    ),
    "LLaVA": Family(
        {"model_type": "llava", "text_config": {"model_type": "llama", **SIZES}, "image_token_index": 122,
         "vision_config": {"model_type": "clip_vision_model", **VISION}},
        "any language model behind a projector", ("model.vision_tower.", "model.multi_modal_projector."),
    ),
    "Mistral 3, vision-language": Family(
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", **SIZES}, "image_token_index": 122,
         "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 32}},
        "any language model behind a projector", ("model.vision_tower.", "model.multi_modal_projector."),
    ),
}  # fmt: skip

# Families that cannot pack: layers hand a state from token to token, or get no mask that tells documents apart.
UNPACKED = frozenset({"Bloom", "MPT", "GPT-OSS", "Qwen3-Next", "Falcon-H1", "Bamba", "Jamba", "Zamba2"})
