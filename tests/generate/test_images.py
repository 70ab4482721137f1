"""Answers to chats with images: those of plain Transformers, which takes each chat alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatrain_ray.errors import ConfigError
from megatrain_ray.generate import prompts_file
from megatrain_ray.generate.answer import Answer, Sampling, generate
from megatrain_ray.generate.load_model import loaded
from megatrain_ray.generate.prompts_file import answer_file
from tests.support.pictured_models import PICTURED, build_pictured, provide_processor
from tests.support.pictures import chats, encoded, plain_answers

GREEDY = Sampling(8, temperature=0)
# The others take images as one of these does, and are in make test-all only.
UNLIKE = ("Qwen3-VL", "Gemma 3, vision-language", "Mistral 3", "LLaVA-NeXT", "Gemma 4", "InternVL")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in UNLIKE else [pytest.mark.long]) for n in PICTURED])
def test_a_batch_of_chats_gets_the_answers_of_plain_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chats have none, one, and several images of several sizes."""
    provide_processor(name, monkeypatch)
    folder, records = build_pictured(name, tmp_path / "model"), chats(tmp_path)[:4]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    theirs = plain_answers(folder, records, tmp_path, GREEDY.max_new_tokens)
    with loaded(str(folder), chat=True) as model:
        ours = [record["answer"] for record in answer_file(model, file, GREEDY, chat=True, batch_size=4)]
    assert ours == theirs


def test_records_name_images_as_those_of_training_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a batch holds the bytes of its image files, which are read again, and must be as they were."""
    folder, [record, *_] = build_pictured("Qwen2.5-VL", tmp_path / "model"), chats(tmp_path)
    file, small = tmp_path / "prompts.jsonl", {"prompt": "<image>Question 0?", "images": ["0.png"]}
    with loaded(str(folder), chat=True) as model:

        def answers(*records: object, batch_size: int = 4) -> list[str]:
            file.write_text("".join(json.dumps(one) + "\n" for one in records))
            return [one["answer"] for one in answer_file(model, file, GREEDY, chat=True, batch_size=batch_size)]

        first, *others = answers(record, small, {"prompt": record["messages"][:1], "chosen": "A", "rejected": "B"})
        assert others == [first, first]
        (tmp_path / "long.png").write_bytes(encoded(Image.new("RGB", (1200, 2))))
        for bad, message in (
            ("gone.png", ": cannot read"),
            ("long.png", r" .*long\.png.: the model's processor refuses"),
        ):
            with pytest.raises(ConfigError, match=rf"prompts\.jsonl, line 1: image 1{message}"):
                answers(small | {"images": [bad]})

        def change_images(*args: Any) -> list[Answer]:
            (tmp_path / "0.png").write_bytes(b"")
            return generate(*args)

        monkeypatch.setattr(prompts_file, "generate", change_images)
        with pytest.raises(ConfigError, match=r"0\.png was changed after its prompt was read; start again"):
            answers(small, small, batch_size=1)
