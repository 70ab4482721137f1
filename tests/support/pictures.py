"""Makes images, chats with images, and what plain Transformers makes of these."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.images.image_processor import load_processor
from tests.support.reference import load_model

SHAPES = ((60, 45), (28, 90), (56, 56))  # widths and heights of images


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
    content: Any = parts or f"Question {number}, whose text alone is almost a row?"
    answer = {"role": "assistant", "content": f"It is {number}."}
    return {"messages": [{"role": "user", "content": content}, answer]}


def preferences(folder: Path) -> list[dict[str, Any]]:
    """Return the same prompts with two answers each, in TRL's formats: images in the parts, or listed."""
    found = []
    for number, chat in enumerate(chats(folder)):
        prompt = chat["messages"][:1]
        answers = ([{"role": "assistant", "content": f"{word} {number}."}] for word in ("It is", "No"))
        record = dict(zip(("prompt", "chosen", "rejected"), (prompt, *answers), strict=True))
        if number % 2 and isinstance(parts := prompt[0]["content"], list):
            record["images"] = [part["path"] for part in parts if "path" in part]
            record["prompt"] = [{"role": "user", "content": [{**p, "path": None} if "path" in p else p for p in parts]}]
        found.append(record)
    return found


def answered(folder: Path) -> list[dict[str, Any]]:
    """Return each prompt of `preferences` with each answer, as chats."""
    prompts = [chat["messages"][0] for chat in chats(folder)]
    answers = [record[key][0] for record in preferences(folder) for key in ("chosen", "rejected")]
    return [{"messages": [prompt, answer]} for prompt in prompts for answer in answers]


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
        ids, targets = torch.as_tensor(batch.input_ids), torch.as_tensor(batch.targets)
        return [self._of_row(*row) for row in zip(ids, targets, _positions(batch), strict=True)]

    def _of_row(self, ids: Tensor, targets: Tensor, positions: Tensor) -> dict[str, Tensor]:
        axes, types, parts = [positions.repeat(4, 1)], torch.zeros_like(ids), []
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), ids.numel()]
        for start, stop in pairwise(starts):
            if not (chat := self._chat_of(ids[start:stop], targets[start:stop])):
                continue  # pads
            if "pixel_values" not in chat:
                continue
            parts.append(chat)
            own_types = _types_of(chat)[0, : stop - start]
            types[start : start + own_types.numel()] = own_types
            if "image_grid_thw" in chat:
                own = ids[None, start:stop], types[None, start:stop]
                found, _ = self.model.model.get_rope_index(*own, image_grid_thw=chat["image_grid_thw"])
                axes[0][1:, start:stop] = found[:, 0]
        if not parts:  # with positions along three axes only a fourth one, the text's, tells documents apart
            has_axes = hasattr(self.model.model, "get_rope_index")
            return {"position_ids": axes[0][:, None] if has_axes else positions[None]}
        given = {name: _joined([part[name] for part in parts]) for name in parts[0] if name in IMAGE_INPUTS}
        given |= {name: types[None] for name in TYPES if name in parts[0]}
        return given | {"position_ids": axes[0][:, None] if "image_grid_thw" in given else positions[None]}

    def logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the targets, [rows, T]; 0 where there is none."""
        ids, targets, found = torch.as_tensor(batch.input_ids), torch.as_tensor(batch.targets), []
        for row, given in enumerate(self.arguments(batch)):
            with torch.no_grad():
                logits = self.model(input_ids=ids[row : row + 1], use_cache=False, **given).logits[0]
            found.append(-cross_entropy(logits, targets[row], reduction="none"))
        return torch.stack(found)

    def separate_loss(self, batch: Batch) -> float:
        """Return the mean loss of a batch if each of its chats is a row of its own."""
        losses, ids, targets = [], torch.as_tensor(batch.input_ids), torch.as_tensor(batch.targets)
        for row, positions in enumerate(_positions(batch)):
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


def plain_answers(folder: Path, records: list[dict[str, Any]], images: Path, num_tokens: int) -> list[str]:
    """Return the likeliest answers of a model in `folder` to the first turns of records, by Transformers alone."""
    model, processor, found = load_model(folder, torch.float32), load_processor(folder), []
    for record in records:
        asked = [{"role": "user", "content": _loaded(record["messages"][0]["content"], images)}]
        text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        files = [part["image"] for part in asked[0]["content"] if part["type"] == "image"]
        given = processor(text=[text], **({"images": files} if files else {}), return_tensors="pt")
        made = model.generate(**given, max_new_tokens=num_tokens, do_sample=False)[0, given["input_ids"].shape[1] :]
        ids = [token for token in made.tolist() if token != model.generation_config.eos_token_id]
        found.append(processor.tokenizer.decode(ids, skip_special_tokens=True))
    return found


def _positions(batch: Batch) -> Tensor:
    if batch.positions is None:  # a row is one document
        return torch.arange(batch.input_ids.shape[1]).expand(*batch.input_ids.shape)
    return torch.as_tensor(batch.positions)


OF_EACH_IMAGE = ("image_grid_thw", "image_sizes", "image_position_ids")
IMAGE_INPUTS = ("pixel_values", *OF_EACH_IMAGE)
TYPES = ("mm_token_type_ids", "token_type_ids")
ROW_INPUTS = (*IMAGE_INPUTS, "input_ids", "attention_mask", *TYPES)


def _joined(parts: list[Tensor]) -> Tensor:
    """Return inputs of images in one tensor; images of other heights and widths are padded, as processors do."""
    height, width = (max(part.shape[dim] for part in parts) for dim in (-2, -1))
    if parts[0].dim() == 4:
        parts = [pad(part, (0, width - part.shape[-1], 0, height - part.shape[-2])) for part in parts]
    return torch.cat(parts)


def _types_of(chat: dict[str, Tensor]) -> Tensor:
    return next((chat[name] for name in TYPES if name in chat), chat["attention_mask"])


def _loaded(content: Any, folder: Path) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "image", "image": Image.open(folder / p["path"])} if "path" in p else p for p in content]


def one_by_one(model: Any, num_crops: int = 1) -> Callable[..., Any]:
    """Return a base model's own `get_image_features`, to be called for one image at a time, of so many crops.

    In a batch the same image has other last bits, as matrix products of another size round otherwise.
    """
    whole = type(model).get_image_features

    def features(self: Any, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs.pop(name, None) for name in OF_EACH_IMAGE)]
        parts = list(pixel_values.split(num_crops))
        [of_each] = [value for value in given if value is not None] or [[None] * len(parts)]
        if pixel_values.dim() == 2:  # patches of all images
            parts = list(pixel_values.split(of_each.prod(-1).tolist()))
        elif parts[0].dim() == 4 and of_each[0] is not None:  # padded to the largest
            parts = [part[..., :height, :width] for part, (height, width) in zip(parts, of_each, strict=True)]
        pairs = zip(parts, of_each, strict=True)
        found = [whole(self, part, *(() if own is None else (own[None],)), **kwargs) for part, own in pairs]
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
