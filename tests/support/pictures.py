"""Builds tiny models that take images, with their processors, and chats with images."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.images.image_processor import load_processor
from tests.support.families import FAMILIES
from tests.support.family_models import build_family
from tests.support.reference import load_model

# Name, class of the processor, its settings, and how its template writes an image.
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 6 * 28 * 28},
}  # fmt: skip
SQUARE = {"do_resize": True, "size": {"height": 28, "width": 28}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {"processor_class": "Qwen2VLProcessor", **QWEN},
    "Qwen2.5-VL": {"processor_class": "Qwen2_5_VLProcessor", **QWEN},
    "Qwen3-VL": {"processor_class": "Qwen3VLProcessor", **QWEN},
    "LLaVA": {
        "processor_class": "LlavaProcessor", "image_processor_type": "CLIPImageProcessor", **SQUARE,
        "do_center_crop": False,
    },
    "Gemma 3, vision-language": {
        "processor_class": "Gemma3Processor", "image_processor_type": "Gemma3ImageProcessor", **SQUARE,
    },
}  # fmt: skip
WRITTEN = {"LLaVA": "<image>", "Gemma 3, vision-language": "<start_of_image>"}
VISION_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}IMAGE{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES = ((60, 45), (28, 90), (56, 56))  # widths and heights of images
NUM_IDS = 264  # bytes, and SPECIAL and five more
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def build_pictured(name: str, folder: Path) -> Path:
    """Write the tiny model of a family with a tokenizer of bytes, a chat template and its processor."""
    is_gemma, is_llava = name.startswith("Gemma"), name == "LLaVA"
    ids = {"image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 260, "vision_end_token_id": 261}
    if is_gemma or is_llava:
        ids = {"image_token_index": 262} | ({"boi_token_index": 260, "eoi_token_index": 261} if is_gemma else {})
    text = FAMILIES[name].config["text_config"] | {"vocab_size": NUM_IDS, "max_position_embeddings": 256}
    build_family(name, folder, text_config=text, **ids)
    marks = ["<|unused|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    extra: dict[str, Any] = {}
    if is_gemma:
        marks[1:4] = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
        extra = {"boi_token": marks[1], "eoi_token": marks[2], "image_token": marks[3]}
    elif is_llava:
        marks[3] = "<image>"
    _write_tokenizer(folder, [*SPECIAL, *marks], extra)
    settings = dict(PROCESSORS[name])
    more = {"processor_class": settings["processor_class"]}
    if is_gemma:
        more["image_seq_length"] = 4
    elif is_llava:
        more |= {"patch_size": 14, "vision_feature_select_strategy": "default", "image_token": "<image>"}
        more["num_additional_image_tokens"] = 1
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(more))
    template = TEMPLATE.replace("IMAGE", WRITTEN.get(name, VISION_MARK))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _write_tokenizer(folder: Path, special: list[str], extra: dict[str, Any]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "extra_special_tokens": extra, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of a gradient; no two seeds give the same."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 7 + seed * 31, y * 5, x * y], axis=-1).astype(np.uint8))


def write_picture(folder: Path, number: int, *, changed_pixel: bool = False) -> None:
    made = picture(*SHAPES[number], number)
    if changed_pixel:
        made.putpixel((20, 20), (255, 0, 255))
    (folder / f"{number}.png").write_bytes(encoded(made))


def encoded(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def chats(folder: Path) -> list[dict[str, Any]]:
    """Write images of several sizes, and return chats about them: without, with one, and with several images."""
    for number in range(len(SHAPES)):
        write_picture(folder, number)
    return [_chat(number, images) for number, images in enumerate([[0], [1, 2], [], [2, 2], [0, 1, 2], [], [1], [0]])]


def _chat(number: int, images: list[int]) -> dict[str, Any]:
    parts: list[dict[str, str]] = []
    for image in images:
        parts += [{"type": "image", "path": f"{image}.png"}, {"type": "text", "text": f"Question {number}?"}]
    content: Any = parts or f"Question {number}?"
    answer = {"role": "assistant", "content": f"It is {number}."}
    return {"messages": [{"role": "user", "content": content}, answer]}


@dataclass(frozen=True)
class PlainChats:
    """Makes what plain Transformers gives a model for the rows of batches: by its processor, chat after chat.

    encoded: what the processor makes of each chat, by its ids.
    """

    model: Any
    encoded: dict[tuple[int, ...], dict[str, Tensor]]

    @staticmethod
    def of(folder: Path, records: list[dict[str, Any]], images: Path) -> PlainChats:
        processor = load_processor(folder)
        found: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for record in records:
            turns = [{**m, "content": _loaded(m["content"], images)} for m in record["messages"]]
            text = processor.apply_chat_template(turns, tokenize=False)
            files = [part["image"] for m in turns for part in m["content"] if part["type"] == "image"]
            given = processor(text=[text], **({"images": files} if files else {}), return_tensors="pt")
            found[tuple(given.pop("input_ids")[0].tolist())] = dict(given)
        return PlainChats(load_model(folder, torch.float32), found)

    def arguments(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Return the arguments beside the ids for each row, which is a micro-batch."""
        ids, targets, positions = (torch.as_tensor(x) for x in (batch.input_ids, batch.targets, batch.positions))
        return [self._of_row(*row) for row in zip(ids, targets, positions, strict=True)]

    def _of_row(self, ids: Tensor, targets: Tensor, positions: Tensor) -> dict[str, Tensor]:
        axes, types, parts = [positions.repeat(4, 1)], torch.zeros_like(ids), []
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), ids.numel()]
        for start, stop in pairwise(starts):
            if not (chat := self._chat_of(ids[start:stop], targets[start:stop])):
                continue  # pads
            if "pixel_values" not in chat:
                continue
            parts.append(chat)
            types[start:stop] = _types_of(chat)[0, : stop - start]
            if "image_grid_thw" in chat:
                own = ids[None, start:stop], types[None, start:stop]
                found, _ = self.model.model.get_rope_index(*own, image_grid_thw=chat["image_grid_thw"])
                axes[0][1:, start:stop] = found[:, 0]
        if not parts:
            return {"position_ids": positions[None]}
        given = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name in IMAGE_INPUTS}
        if "image_grid_thw" in given:
            return given | {"position_ids": axes[0][:, None], "mm_token_type_ids": types[None]}
        named = {"token_type_ids": types[None]} if "token_type_ids" in parts[0] else {}
        return given | named | {"position_ids": positions[None]}

    def separate_loss(self, batch: Batch) -> float:
        """Return the mean loss of a batch if each of its chats is a row of its own."""
        losses, ids, targets = [], torch.as_tensor(batch.input_ids), torch.as_tensor(batch.targets)
        for row, positions in enumerate(torch.as_tensor(batch.positions)):
            starts = [*(positions == 0).nonzero()[:, 0].tolist(), positions.numel()]
            for start, stop in pairwise(starts):
                learned = targets[row, start:stop].long()
                if (chat := self._chat_of(ids[row, start:stop], learned)) is None:
                    continue
                with torch.no_grad():
                    logits = self.model(**{k: chat[k] for k in chat if k in ROW_INPUTS}).logits[0, : len(learned)]
                learned = learned[: len(logits)]
                losses.append(cross_entropy(logits, learned, reduction="none")[learned >= 0])
        return float(torch.cat(losses).mean())

    def _chat_of(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor] | None:
        """Return the chat whose last token is no input, since it is the last target."""
        if (targets == -100).all():
            return None
        return next(chat for own, chat in self.encoded.items() if own[:-1] == tuple(ids[: len(own) - 1].tolist()))


IMAGE_INPUTS = ("pixel_values", "image_grid_thw")
ROW_INPUTS = (*IMAGE_INPUTS, "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _types_of(chat: dict[str, Tensor]) -> Tensor:
    return next(
        (chat[name] for name in ("mm_token_type_ids", "token_type_ids") if name in chat), chat["attention_mask"]
    )


def _loaded(content: Any, folder: Path) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "image", "image": Image.open(folder / p["path"])} if "path" in p else p for p in content]


def one_by_one(model: Any) -> Callable[..., Any]:
    """Return a base model's own `get_image_features`, to be called for one image at a time.

    In a batch the same image has other last bits, as matrix products of another size round otherwise.
    """
    whole = type(model).get_image_features

    def features(self: Any, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any) -> Any:
        if image_grid_thw is None:
            found = [whole(self, image[None], **kwargs) for image in pixel_values]
        else:
            parts = pixel_values.split(image_grid_thw.prod(-1).tolist())
            pairs = zip(parts, image_grid_thw, strict=True)
            found = [whole(self, part, grid[None], **kwargs) for part, grid in pairs]
        joined = found[0]
        pooled = [one.pooler_output for one in found]
        is_stacked = isinstance(pooled[0], Tensor)
        joined.pooler_output = torch.cat(pooled) if is_stacked else [part for parts in pooled for part in parts]
        if levels := [one.deepstack_features for one in found if getattr(one, "deepstack_features", None)]:
            joined.deepstack_features = [
                torch.cat(level) if isinstance(level[0], Tensor) else [part for one in level for part in one]
                for level in zip(*levels, strict=True)
            ]
        return joined

    return features
