"""Builds tiny models that take images, with their processors."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tests.support.families import FAMILIES
from tests.support.model_types import settings_of
from tests.support.type_sweep import build

NUM_IDS = 264  # bytes, and SPECIAL and the marks of an image
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
BEGIN, END, IMAGE, VIDEO = 260, 261, 262, 263  # ids of marks
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Pictured:
    """Describes a tiny model that takes images.

    model: settings of its configuration.
    processor: its class, and its own settings.
    images: settings of what processes images.
    marks: the special tokens of ids BEGIN to VIDEO.
    written: how its template writes an image.
    named: special tokens that its tokenizer has attributes for.
    packs: whether it keeps the documents of a row apart.
    seq_len: of rows that hold several chats, if it packs.
    num_crops: of which its tower takes each image.
    steps: of its test; few if another family's covers what of images is the same.
    """

    model: dict[str, Any]
    processor: dict[str, Any]
    images: dict[str, Any]
    marks: tuple[str, str, str, str] = QWEN_MARKS
    written: str = "<|vision_start|><|image_pad|><|vision_end|>"
    named: dict[str, str] = field(default_factory=dict)
    packs: bool = True
    seq_len: int = 100
    steps: int = 4
    num_crops: int = 1


SQUARE = {"do_resize": True, "size": {"height": 28, "width": 28}}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 6 * 28 * 28},
}  # fmt: skip


PINPOINTS = [[28, 56], [56, 28]]
LLAVA = {
    "patch_size": 14, "vision_feature_select_strategy": "default", "image_token": "<image>",
    "num_additional_image_tokens": 1,
}  # fmt: skip


def _qwen(model: dict[str, Any], processor: str, **more: Any) -> Pictured:
    ids = {
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END
    }  # fmt: skip
    return Pictured(model | ids, {"processor_class": processor}, QWEN_IMAGES, **more)


def _gemma_4(steps: int, **changes: Any) -> Pictured:
    settings = settings_of("gemma4")
    vision = {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2, "patch_size": 7,
        "position_embedding_size": 64, "use_clipped_linears": True, "standardize": True,
    }  # fmt: skip
    ids = {"boi_token_id": BEGIN, "eoi_token_id": END, "image_token_id": IMAGE, "video_token_id": VIDEO}
    marks = ("<|image>", "<image|>", "<|image|>", "<|video|>")
    named = {
        "boi_token": marks[0], "eoi_token": marks[1], "image_token": marks[2], "audio_token": "<|unused|>",
        "boa_token": "<|unused|>", "eoa_token": "<|unused|>",
    }  # fmt: skip
    images = {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 7, "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    }  # fmt: skip
    text = settings["text_config"] | changes
    return Pictured(
        settings | ids | {"text_config": text, "vision_config": vision}, {"processor_class": "Gemma4Processor"}, images,
        marks, "<|image|>", named, seq_len=280, steps=steps,
    )  # fmt: skip


PICTURED = {
    "Qwen2-VL": _qwen(FAMILIES["Qwen2-VL"].config, "Qwen2VLProcessor"),
    "Qwen2.5-VL": _qwen(FAMILIES["Qwen2.5-VL"].config, "Qwen2_5_VLProcessor"),
    "Qwen3-VL": _qwen(FAMILIES["Qwen3-VL"].config, "Qwen3VLProcessor"),
    "Qwen3-VL-MoE": _qwen(settings_of("qwen3_vl_moe"), "Qwen3VLProcessor", steps=3),
    "Qwen3.5": _qwen(settings_of("qwen3_5"), "Qwen3VLProcessor", packs=False),
    "Qwen3.5-MoE": _qwen(settings_of("qwen3_5_moe"), "Qwen3VLProcessor", packs=False, steps=3),
    "LLaVA": Pictured(
        FAMILIES["LLaVA"].config | {"image_token_index": IMAGE},
        LLAVA | {"processor_class": "LlavaProcessor"},
        {"image_processor_type": "CLIPImageProcessor", **SQUARE, "do_center_crop": False},
        (*QWEN_MARKS[:2], "<image>", QWEN_MARKS[3]), "<image>",
    ),
    "Gemma 3, vision-language": Pictured(
        FAMILIES["Gemma 3, vision-language"].config
        | {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_processor_type": "Gemma3ImageProcessor", **SQUARE},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>", QWEN_MARKS[3]), "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "Mistral 3": Pictured(
        settings_of("mistral3") | {"image_token_index": IMAGE},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 84}},
        ("[IMG_BREAK]", "[IMG_END]", "[IMG]", QWEN_MARKS[3]), "[IMG]",
    ),
    "Gemma 4": _gemma_4(3, hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
    "Gemma 4, embeddings for each layer": _gemma_4(
        4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=NUM_IDS
    ),
    "GLM-4.1V": Pictured(
        settings_of("glm4v")
        | {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": BEGIN, "image_end_token_id": END},
        {"processor_class": "Glm4vProcessor"},
        QWEN_IMAGES | {"image_processor_type": "Glm4vImageProcessor",
                       "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 12 * 28 * 28}},
        ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
        "<|begin_of_image|><|image|><|end_of_image|>", steps=3,
    ),
    "LLaVA-NeXT": Pictured(
        settings_of("llava_next") | {"image_token_index": IMAGE, "image_grid_pinpoints": PINPOINTS},
        LLAVA | {"processor_class": "LlavaNextProcessor"},
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
         "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        (*QWEN_MARKS[:2], "<image>", QWEN_MARKS[3]), "<image>", steps=3,
    ),
    "InternVL": Pictured(
        settings_of("internvl") | {
            "image_token_id": IMAGE, "image_seq_length": 4,
            "vision_config": settings_of("internvl")["vision_config"] | {"patch_size": [7, 7]},
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"image_processor_type": "GotOcr2ImageProcessor", **SQUARE, "min_patches": 2, "max_patches": 2},
        ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"), "<IMG_CONTEXT>",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        seq_len=140, steps=3, num_crops=3,
    ),
}  # fmt: skip


def provide_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test if this release of Transformers has a family's processor with torchvision only.

    Pixtral's is provided without, as nothing here calls what torchvision is needed for.
    """
    kind = PICTURED[name].processor["processor_class"]
    if kind == "PixtralProcessor" and find_spec("torchvision") is None:
        path = "transformers.models.pixtral.image_processing_pixtral"
        stub: Any = ModuleType(path)
        stub.get_resize_output_image_size = None
        monkeypatch.setitem(sys.modules, path, stub)
        module = import_module("transformers.models.pixtral.processing_pixtral")
        monkeypatch.setattr("transformers.PixtralProcessor", module.PixtralProcessor)
    try:
        getattr(import_module("transformers"), kind)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def build_pictured(name: str, folder: Path) -> Path:
    """Write the tiny model of a family with a tokenizer of bytes, a chat template and its processor."""
    family = PICTURED[name]
    text = family.model["text_config"] | {"vocab_size": NUM_IDS, "max_position_embeddings": 512}
    build(family.model | {"text_config": text}, folder)
    _write_tokenizer(folder, [*SPECIAL, "<|unused|>", *family.marks], family.named)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.images))
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", family.written))
    return folder


def _write_tokenizer(folder: Path, special: list[str], named: dict[str, str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "extra_special_tokens": named, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
