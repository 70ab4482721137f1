"""Measures training on images: tokens/s beside text of the same length, and answers that a model has memorised.

    python -m benchmarks.images OUT.json [--commit ID] [--steps 6] [--updates 1200] [--layers 28] [key=value …]

Speed: a model of the shape of Qwen2-VL-2B with random weights, 16 chats of 1024 tokens a step. Most tokens are those of
one image, whose features the frozen tower has computed before. Then as many tokens of text. Rows of the first two steps
do not count. `--layers 0` leaves this out.

Answers: a small model learns 100 pictures of a shape each: which shape it is, in which colour, and where. The
export is asked by plain Transformers. `--updates 0` leaves this out. Settings go to all trainings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from megatrain_ray.machine.environment import commit, hardware, versions
from tests.support.pictured_models import build_pictured

NUM_CHATS, SEQ_LEN = 16, 1024
SIDE = 728  # pixels of a large picture: 26 × 26 tokens of 28 × 28 pixels
COLOURS = ("red", "green", "blue", "yellow", "white")
SHAPES = ("circle", "square", "triangle", "cross", "bar")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTION = "Which shape is it?"


def draw(colour: str, shape: str, place: str, side: int = 112) -> Image.Image:
    """Return a black picture with a shape in one of its quarters."""
    image = Image.new("RGB", (side, side))
    pen, size = ImageDraw.Draw(image), side // 2
    x, y = size * ("right" in place) + size // 8, size * ("bottom" in place) + size // 8
    length = size * 3 // 4
    box = (x, y, x + length, y + length)
    if shape == "circle":
        pen.ellipse(box, colour)
    elif shape == "square":
        pen.rectangle(box, colour)
    elif shape == "triangle":
        pen.polygon([(x, y + length), (x + length, y + length), (x + length // 2, y)], colour)
    else:
        pen.rectangle((x, y + length // 3, x + length, y + length * 2 // 3), colour)
        if shape == "cross":
            pen.rectangle((x + length // 3, y, x + length * 2 // 3, y + length), colour)
    return image


def chat(question: Any, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def about(path: str) -> list[dict[str, str]]:
    return [{"type": "image", "path": path}, {"type": "text", "text": QUESTION}]


def all_pictures() -> Iterator[tuple[str, Image.Image]]:
    """Yield 100 pictures with their answers, all different."""
    for colour, shape, place in product(COLOURS, SHAPES, PLACES):
        yield f"A {colour} {shape}, {place}.", draw(colour, shape, place)


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "megatrain_ray", *arguments], check=True)


def train(folder: Path, tree: dict[str, Any], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Train by the command line; return the rows of metrics of steps."""
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(tree | {"run_dir": str(folder), "eval_every": 0}))  # JSON is YAML
    run("train", str(file), *settings)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "loss" in row]


def speed(folder: Path, steps: int, layers: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return the rows of a training on images and of one on text."""
    made = build_pictured("Qwen2-VL", folder / "shape")
    config = json.loads((made / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": layers, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 2 * SEQ_LEN,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    config["text_config"].pop("layer_types", None)
    config["text_config"].pop("rope_parameters", None)
    config["vision_config"] |= {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
    images = json.loads((made / "preprocessor_config.json").read_text())
    images["size"]["longest_edge"] = SIDE * SIDE
    (made / "preprocessor_config.json").write_text(json.dumps(images))
    letters = SEQ_LEN - (SIDE // 28) ** 2 - 60
    found = {}
    for name in ("images", "text"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(NUM_CHATS):
                picture = folder / f"large_{number}.png"
                draw(COLOURS[number % 5], SHAPES[number % 4], PLACES[number % 3], SIDE).save(picture)
                asked = about(picture.name) if name == "images" else [{"type": "text", "text": QUESTION}]
                file.write(chat(asked, "word " * ((letters if name == "images" else SEQ_LEN - 60) // 5)))
        tree = {
            "model": {"config": config},
            "data": {"kind": "sft", "path": str(folder / f"{name}.jsonl"), "tokenizer": str(made), "images": True,
                     "seq_len": SEQ_LEN},
            "train": {"steps": steps, "batch_size": NUM_CHATS, "lr": 1e-5, "precision": "bf16"},
            "save_every": None,
        }  # fmt: skip
        found[name] = train(folder / name, tree, settings)
    return found


def answers(folder: Path, updates: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return the losses of a small model that learns all pictures, and the answers of its export that are exact."""
    made = build_pictured("Qwen2-VL", folder / "small")
    config = json.loads((made / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    config["text_config"].pop("layer_types", None)
    config["text_config"].pop("rope_parameters", None)
    config["vision_config"] |= {"depth": 4, "embed_dim": 256, "hidden_size": 256, "num_heads": 8}
    images = json.loads((made / "preprocessor_config.json").read_text())
    images["size"]["longest_edge"] = 112 * 112
    (made / "preprocessor_config.json").write_text(json.dumps(images))
    expected = []
    with (folder / "pictures.jsonl").open("w") as file:
        for number, (answer, image) in enumerate(all_pictures()):
            image.save(folder / f"{number}.png")
            file.write(chat(about(f"{number}.png"), answer))
            expected.append(answer)
    tree = {
        "model": {"config": config},
        "data": {"kind": "sft", "path": str(folder / "pictures.jsonl"), "tokenizer": str(made), "images": True,
                 "seq_len": 128},
        "train": {"steps": updates, "batch_size": 16, "lr": 1e-3, "warmup_steps": 20, "precision": "bf16"},
    }  # fmt: skip
    rows = train(folder / "learned", tree, settings)
    run("export", str(folder / "learned"), str(folder / "model"))
    got = list(_asked(folder / "model", folder, len(expected)))
    exact = sum(a == b for a, b in zip(got, expected, strict=True))
    return {"losses": [row["loss"] for row in rows], "exact": exact, "asked": len(expected), "answers": got}


def _asked(model_folder: Path, folder: Path, count: int) -> Iterator[str]:
    """Yield plain Transformers' answer to the question about each picture."""
    from transformers import AutoModelForImageTextToText

    from megatrain_ray.io.images.image_processor import load_processor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.bfloat16).to(device).eval()
    processor = load_processor(model_folder)
    turns = [{"role": "user", "content": about("")}]
    text = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    for number in range(count):
        image = Image.open(folder / f"{number}.png")
        given = processor(text=[text], images=[image], return_tensors="pt").to(device)
        ids = model.generate(**given, max_new_tokens=40, do_sample=False)[0, given["input_ids"].shape[1] :]
        yield processor.tokenizer.decode(ids, skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    report: dict[str, Any] = {
        "commit": options.commit or commit(),
        "hardware": hardware("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions(),
    }
    with tempfile.TemporaryDirectory() as name:
        if options.layers:
            rows = speed(Path(name), options.steps, options.layers, options.settings)
            rates = {kind: statistics.median(r["tokens_per_s"] for r in of[2:]) for kind, of in rows.items()}
            report |= {"speed": rows, "tokens_per_s": rates}
            print(f"{rates['images']:.0f} tokens/s with images, {rates['text']:.0f} of text")
        if options.updates:
            report["answers"] = answers(Path(name), options.updates, options.settings)
            print(f"{report['answers']['exact']} of {report['answers']['asked']} answers exact")
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
