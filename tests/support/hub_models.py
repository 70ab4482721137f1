"""Makes tiny models of configurations that makers of popular models publish: same names, keys and kinds of files.

tests/data/hub/configs.json holds them, one model a line. Of a list with an entry for each layer it holds the first.
Sizes are made small here, ids of special tokens are those of a tiny tokenizer of the same kind, and weights are random.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

from megatrain_ray.io.tokens.train_bpe import WORDS
from megatrain_ray.model.architecture import Architecture
from tests.support.chat_fixtures import CORPUS, FAMILIES

HUB: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/hub/configs.json").read_text(encoding="utf-8"))
VOCAB_SIZE = 600
# Small sizes by their names. One that a configuration lacks is not added.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_embd": 32, "intermediate_size": 48, "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16, "shared_intermediate_size": 16, "num_attention_heads": 4, "n_head": 4, "head_dim": 8,
    "attention_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "experts_per_token": 2, "first_k_dense_replace": 1, "n_layer": 2, "rotary_dim": 4,
    "attention_chunk_size": 16, "linear_key_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8, "mamba_chunk_size": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_heads": 8,
    "mamba_d_ssm": 64, "mamba_dt_rank": 4, "block_dim": 32, "block_ff_dim": 48, "conv_dim": 32, "conv_dim_out": 32,
    "num_heads": 4, "block_multiple_of": 8, "depth": 1, "out_hidden_size": 32, "window_size": 16, "image_size": 28,
    "num_position_embeddings": 16, "patch_size": 14, "spatial_patch_size": 14, "projector_input_dim": 32,
    "projector_output_dim": 32, "vision_output_dim": 32, "fullatt_block_indexes": [0], "mm_tokens_per_image": 4,
}  # fmt: skip
# Values that the sizes above leave to the model's own rules.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "chunk_size": 8, "time_step_rank": 4},
    "gemma3": {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 600}},
}
# With Transformers 5.24, every forward of Llama4ForConditionalGeneration fails: it reads an output that is not there.
# The folder names the class of the text alone, as docs/families.md says to.
TEXT_CLASSES = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}
# What tokenizers are trained on: merges show how they cut words.
TEXTS = [*CORPUS, *["in 12345 and 1234567 it's IT'S we'll\r\n\tx = [1, 2];\n\n\n", "  leading  你好你好 tail "] * 3]


def build_hub_model(folder: Path, name: str) -> Path:
    """Write the model `name` of HUB with its tokenizer into `folder`."""
    entry = HUB[name]
    tokenizer = write_tokenizer(folder, entry)
    config = shrunk(entry["config"], ids_of(tokenizer, entry["tokenizer_config"]))
    model = random_model(json.dumps(config))
    model.save_pretrained(folder)
    config["architectures"] = [TEXT_CLASSES.get(name, name) for name in config["architectures"]]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if entry["generation_config"] is None:
        (folder / "generation_config.json").unlink(missing_ok=True)
    else:
        generation = with_ids(entry["generation_config"], ids_of(tokenizer, entry["tokenizer_config"]))
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return folder


@cache
def random_model(config: str) -> Any:
    """Return a model of the class that its configuration names, whose parameters are all random."""
    settings = json.loads(config)
    model_class = getattr(transformers, settings["architectures"][0])
    torch.manual_seed(0)
    model = model_class(Architecture(settings).config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def shrunk(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a published configuration with small sizes and no dropout. Its other settings stay, known or not."""
    small = {key: 0.0 if "dropout" in key or key.endswith("_pdrop") else value for key, value in config.items()}
    small = {key: SIZES[key] if config.get(key) is not None and key in SIZES else value for key, value in small.items()}
    if (layers := config.get("num_hidden_layers")) is not None:
        few = max([2, *(len(value) for key, value in config.items() if key in ("layer_types", "no_rope_layers"))])
        small["num_hidden_layers"] = min(layers, 4 if config.get("model_type") in ("lfm2", "jamba") else few)
    if config.get("num_key_value_heads") is not None:
        small["num_key_value_heads"] = 4 if config["num_key_value_heads"] == config.get("num_attention_heads") else 2
    if config.get("n_group") == 1:
        small["n_group"] = 1
    for key in ("sliding_window", "sliding_window_size"):
        if small.get(key):
            small[key] = 16
    small |= {key: _sections(value) for key, value in config.items() if key in ("rope_scaling", "rope_parameters")}
    for key in ("text_config", "vision_config"):
        if key in config:
            small[key] = shrunk(config[key], ids)
    for key, value in OWN.get(config.get("model_type", ""), {}).items():
        small[key] = {**small.get(key, {}), **value} if isinstance(value, dict) else value
    return with_ids(small, ids)


def _sections(rope: Any) -> Any:
    return {**rope, "mrope_section": [2, 1, 1]} if rope and "mrope_section" in rope else rope


def with_ids(settings: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return settings with the ids of the tiny tokenizer. Ids of several tokens are those of the first and eos."""
    found = dict(settings)
    for key, value in settings.items():
        if isinstance(value, list) and key.endswith("token_id"):
            found[key] = [ids["eos_token_id"], 1][: len(value)]
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith(("token_id", "token_index")):
            found[key] = ids.get(key, VOCAB_SIZE - 1)
    return found


def ids_of(tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> dict[str, int]:
    return {"eos_token_id": 0} | {f"{key}_id": tokenizer.token_to_id(text) for key, text in named(settings).items()}


def named(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names."""
    values = {key: value for key, value in settings.items() if key.endswith("_token") and not isinstance(value, bool)}
    return {key: value["content"] if isinstance(value, dict) else value for key, value in values.items() if value}


def write_tokenizer(folder: Path, entry: Mapping[str, Any]) -> tokenizers.Tokenizer:
    settings, template = dict(entry["tokenizer_config"]), entry["template"]
    tokenizer = KINDS[entry["tokenizer"]]()
    texts = [
        *named(settings).values(),
        *settings.get("additional_special_tokens", ()),
        *(FAMILIES[template].specials if template else ()),
    ]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(texts)])
    bos = named(settings).get("bos_token")
    always, asked = ("bos_bytes", "gemma", "cohere"), ("metaspace", "llama")
    if bos and (entry["tokenizer"] in always or (entry["tokenizer"] in asked and settings.get("add_bos_token"))):
        first = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=first)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template:
        settings["chat_template"] = FAMILIES[template].source
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False))
    return tokenizer


def _bytes(words: str = WORDS, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return _trained(tokenizer, normalizer)


def _deepseek() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(tokenizers.Regex(r), "isolated") for r in (r"\p{N}{1,3}", "[一-龥]+", WORDS)]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    return _trained(tokenizer)


def _cohere() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    return _trained(tokenizer, normalizers.NFC())


def _gpt2() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _trained(tokenizer)


def _trained(tokenizer: tokenizers.Tokenizer, normalizer: Any = None) -> tokenizers.Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _metaspace(*, gemma: bool = False, prepends: bool = False) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer with ▁ for spaces and <0x..> for bytes of unknown characters, as sentencepiece has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif prepends:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    first = ["<pad>", "<eos>", "<bos>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>"]
    specials = [*first, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


QWEN_WORDS = WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
KINDS: Mapping[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": _bytes, "bos_bytes": _bytes, "glm": _bytes, "deepseek": _deepseek, "gpt2": _gpt2, "cohere": _cohere,
    "metaspace": _metaspace, "llama": partial(_metaspace, prepends=True), "gemma": partial(_metaspace, gemma=True),
    "qwen": partial(_bytes, QWEN_WORDS, normalizers.NFC()),
}  # fmt: skip
