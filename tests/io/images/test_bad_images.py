"""Images of all kinds are what Transformers makes of them; those that cannot be read, or are misplaced, are named."""

from __future__ import annotations

import base64
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from megatrain_ray.io.chat.chat_template import ChatTemplate, load_chat_template
from megatrain_ray.io.chat.conversation_formats import LAYOUTS
from megatrain_ray.io.chat.encode_chats import ChatEncoder, KeptSequence, RecordEncoder
from megatrain_ray.io.chat.preferences import PairLayout
from megatrain_ray.io.images import image_parts
from megatrain_ray.io.images.image_processor import ImageProcessor, load_processor
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.pictured_models import TEMPLATE, build_pictured
from tests.support.pictures import encoded, picture

ANSWER = {"role": "assistant", "content": "Yes."}
PNG = encoded(picture(40, 40, 0))
ORIENTATION = 0x0112  # of EXIF
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    build_pictured("Qwen2.5-VL", made / "model")
    (made / "good.png").write_bytes(PNG)
    (made / "cut.png").write_bytes(PNG[: len(PNG) // 2])
    (made / "text.png").write_text("no image")
    (made / "empty.png").touch()
    (made / "folder.png").mkdir()
    (made / "large.png").write_bytes(PNG * 3)
    (made / "long.png").write_bytes(encoded(Image.new("RGB", (1200, 2))))
    (made / "grey.gif").write_bytes(PNG)
    os.mkfifo(made / "pipe.png")
    return made


@pytest.fixture(scope="module")
def encode(folder: Path) -> RecordEncoder:
    return encoder_of(folder, load_chat_template(str(folder / "model")))


def encoder_of(folder: Path, template: ChatTemplate) -> RecordEncoder:
    model = str(folder / "model")
    encoder = ChatEncoder(
        load_tokenizer(model), type(template)(**vars(template) | {"in_parts": True}),
        processor=ImageProcessor(folder / "model"),
    )  # fmt: skip
    return RecordEncoder(encoder, [LAYOUTS["auto"]], 200, "turn", images=[(folder, None)])


def turns(*parts: Any, **keys: Any) -> dict[str, Any]:
    """Return a record of a question of these parts and an answer. A string is a text, a mapping a whole part."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, ANSWER], **keys}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", **source}


GOOD = {
    "path": turns(image(path="good.png"), "Q"),
    "absolute file URL": turns("Q", image(url="file://FOLDER/good.png")),
    "data URL": turns(image(image=URL), "Q"),
    "OpenAI's part": turns({"type": "image_url", "image_url": {"url": URL}}, "Q"),
    "bytes of a table": turns(image(image={"bytes": PNG, "path": None}), "Q"),
    "listed, with parts": turns(image(), "Q", images=["good.png"]),
    "listed, with tags": {
        "conversations": [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}], "images": "good.png"
    },
    "base64": turns(image(base64=URL.partition(",")[2]), "Q"),
    "beside keys that no turn is in": turns(image(path="good.png"), "Q", shown=[image(path="no.png")]),
    "other name than format": turns(image(path="grey.gif"), "Q"),
}  # fmt: skip
BAD = {
    "missing": (turns(image(path="no.png"), "Q"), "No such file or directory (relative paths start at FOLDER; of an o"),
    "folder": (turns(image(path="folder.png"), "Q"), "Is a directory (relative paths start at FOLDER)"),
    "pipe": (turns(image(path="pipe.png"), "Q"), "image 1: cannot read FOLDER/pipe.png: it is a pipe"),
    "NUL": (turns(image(path="a\0.png"), "Q"), "its name holds a NUL character"),
    "too many bytes": (turns(image(path="large.png"), "Q"), "large.png has 0 MiB, and 0 are the most; make it smaller"),
    "cut off": (turns("Q", image(path="cut.png")), "image 1 (FOLDER/cut.png): it cannot be decoded: "),
    "no image": (turns(image(path="text.png"), "Q"), "image 1 (FOLDER/text.png): it cannot be decoded: it is of no "),
    "empty": (turns(image(path="empty.png"), "Q"), "image 1 (FOLDER/empty.png): it cannot be decoded: it is of no "),
    "second is bad": (turns(image(path="good.png"), image(path="text.png"), "Q"), "image 2 (FOLDER/text.png): it cann"),
    "too long": (turns(image(path="long.png"), "Q"), "image 1 (FOLDER/long.png): the model's processor refuses it: "),
    "too many pixels": (turns(image(image=URL), "Q"), "image 1: Image size (1600 pixels) exceeds limit of 1200 pixels"),
    "on the net": (turns(image(url="https://x.org/a.png"), "Q"), "image 1: https://x.org/a.png is on the net"),
    "on a strange net": (turns(image(url="https://[x/a.png"), "Q"), "image 1: https://[x/a.png is on the net"),
    "base64": (turns(image(image="data:image/png;base64,?"), "Q"), "image 1: its base64 text cannot be decoded"),
    "other data": (turns(image(image="data:,abc"), "Q"), "image 1: expected data:image/…;base64,…, got 'data:,abc'"),
    "number": (turns(image(image=7), "Q"), "image 1: expected a path, a URL, or a mapping with bytes, got 7"),
    "no source in it": (turns(image(image={"size": 3}), "Q"), "image 1: expected a mapping with path, url, base64 or"),
    "no source": (turns(image(), "Q"), "a part is an image without a source; give path, url or base64, or list it"),
    "two sources": (turns(image(path="good.png", url=URL), "Q"), "a part names its image twice; keep one of its keys"),
    "part with a text": (turns(image(path="good.png", text="Q")), "a part is both an image and the text 'Q'"),
    "more listed": (turns("Q", images=["good.png"]), "it lists 1 images, and its turns have places for 0: write <im"),
    "fewer listed": (turns(image(), image(), "Q", images=["good.png"]), "it lists 1 images, and its turns have pl"),
    "two lists": (turns("Q", images=["good.png"], image="good.png"), "both image and images name images; keep one"),
    "in an answer": (
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": [image(path="good.png")]}]},
        "turn 2 (assistant): an answer holds an image",
    ),
    "in a thought": (
        {"prompt": "<image>Q", "completion": [{**ANSWER, "thinking": "<image>"}], "images": ["good.png"]},
        "an image may stand in the content of a turn only",
    ),
    "placeholder in a text": (turns("What is <|image_pad|>?"), "the chat template writes <|image_pad|> 1 times for 0"),
    "mark in a text": (turns("m3gaimage"), "a text holds m3gaimage, by which this program marks images"),
}  # fmt: skip


def with_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: with_folder(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_folder(inner, folder) for inner in value]
    return value.replace("FOLDER", str(folder)) if isinstance(value, str) else value


@pytest.mark.parametrize("name", GOOD)
def test_each_way_to_name_an_image(name: str, encode: RecordEncoder, folder: Path) -> None:
    found = encode((0, with_folder(GOOD[name], folder)))
    assert found.problem is None
    [kept] = found.kept
    assert [stored.content for stored in kept.images] == [PNG]
    assert kept.columns is not None
    assert kept.columns[0].tolist() == [float(token == 262) for token in kept.ids]
    assert kept.columns.sum() == 1 and kept.loss_weights[kept.columns[0] > 0].sum() == 0


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_named(name: str, encode: RecordEncoder, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, message = BAD[name]
    if name == "too many bytes":
        monkeypatch.setattr(image_parts, "MOST_BYTES", 2 * len(PNG))
    if name == "too many pixels":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    found = encode((0, record))
    assert found.problem is not None and message.replace("FOLDER", str(folder)) in found.problem
    assert found.kept == []


def kinds_of_images() -> dict[str, tuple[Image.Image, str, dict[str, Any]]]:
    """Return images of all modes with the format that stores them, and arguments of `save`."""
    rgb, turned, alpha = picture(40, 30, 0), Image.Exif(), picture(40, 30, 0)
    turned[ORIENTATION] = 6
    alpha.putalpha(Image.linear_gradient("L").resize(rgb.size))
    deep = Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50)
    film: dict[str, Any] = {"save_all": True, "append_images": [picture(40, 30, 1)]}
    return {
        "animated GIF": (rgb, "GIF", film), "animated WebP": (rgb, "WEBP", film | {"lossless": True}),
        "animated PNG": (rgb, "PNG", film), "turned": (rgb, "JPEG", {"exif": turned}),
        "turned PNG": (rgb, "PNG", {"exif": turned}), "CMYK": (rgb.convert("CMYK"), "JPEG", {}),
        "alpha": (alpha, "PNG", {}), "grey with alpha": (alpha.convert("LA"), "PNG", {}), "16 bits": (deep, "PNG", {}),
        "palette": (rgb.quantize(8), "PNG", {"transparency": b"\x00\x80"}), "bits": (rgb.convert("1"), "PNG", {}),
        "floats": (rgb.convert("F"), "TIFF", {}), "YCbCr": (rgb.convert("YCbCr"), "TIFF", {}),
        "large": (rgb, "PNG", {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", kinds_of_images())
def test_images_of_all_kinds_are_what_transformers_makes_of_them(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image between the number of pixels of which Pillow warns and that which it refuses is read as there."""
    made, kind, arguments = kinds_of_images()[name]
    made.save(file := folder / f"kind.{kind}", kind, **arguments)
    with warnings.catch_warnings(action="ignore"):  # of what a palette loses
        theirs = load_image(str(file))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000 if name == "large" else 1200)
    expected = load_processor(folder / "model").image_processor(theirs, return_tensors="pt")
    found, _ = ImageProcessor(folder / "model").inputs_of(file.read_bytes())
    assert theirs.size == ((30, 40) if "turned" in name else (40, 30))
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])


ASKED = {"role": "user", "content": [image(path="good.png"), {"type": "text", "text": "Q"}, image(image=URL)]}
LISTED = {"role": "user", "content": "<image>Q<image>"}
OTHER = {"role": "assistant", "content": "No."}
PAIRS = {
    "a prompt": {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [OTHER]},
    "a common beginning": {"chosen": [ASKED, ANSWER], "rejected": [ASKED, OTHER]},
    "a prompt that the answers repeat": {"prompt": [ASKED], "chosen": [ASKED, ANSWER], "rejected": [ASKED, OTHER]},
    "a list": {"images": ["good.png", URL], "chosen": [LISTED, ANSWER], "rejected": [LISTED, OTHER]},
    "turns": {"images": ["good.png", URL], "messages": [LISTED], "chosen": ANSWER, "rejected": OTHER},
}


@pytest.mark.parametrize("name", PAIRS)
def test_both_answers_of_a_preference_have_the_images_of_the_prompt(
    name: str, encode: RecordEncoder, folder: Path
) -> None:
    found = replace(encode, layouts=[PairLayout(LAYOUTS["auto"])])((0, PAIRS[name]))
    assert found.problem is None
    for kept in found.kept:
        assert [stored.content for stored in kept.images] == [PNG, PNG]
        assert kept.columns is not None and kept.columns[0][kept.columns[0] > 0].tolist() == [1, 2]
    assert len(found.kept) == 2 and not np.array_equal(found.kept[0].ids, found.kept[1].ids)


def test_a_cut_within_an_image_is_noticed() -> None:
    kept = KeptSequence(np.arange(6), np.ones(6), np.array([[0, 1, 1, 0, 2, 2]], np.float32))
    assert [kept.divides_image(length) for length in range(7)] == [False, False, True, False, False, True, False]


def test_images_that_a_model_takes_for_one_are_refused(folder: Path) -> None:
    (folder / "own.jinja").write_text(TEMPLATE.replace("IMAGE", "<|image_pad|>"))
    encode = encoder_of(folder, load_chat_template(str(folder / "model"), str(folder / "own.jinja")))
    found = encode((0, turns(image(path="good.png"), image(path="good.png"), "Q")))
    assert found.problem is not None and "image 2 follows image 1 at once, and the model takes both" in found.problem
    assert encode((0, turns(image(path="good.png"), " ", image(path="good.png"), "Q"))).problem is None
