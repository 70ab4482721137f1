"""Which teachers a student may have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.objectives.distillation import Softmax, TopTokens
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.teacher import find_teacher
from megatrain_ray.io.tokens.byte_tokenizer import write_byte_tokenizer
from megatrain_ray.model.open_model import read_model
from tests.support.runs import config
from tests.support.tiny import build_tiny


def model_of(folder: Path, vocab_size: int, **ids: int) -> Path:
    """Write a model whose tokenizer has these ids."""
    build_tiny(folder, vocab_size=vocab_size)
    Tokenizer(WordLevel(ids, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def found(folder: Path, teacher: Path, **numbers: Any) -> TopTokens | None:
    tree = config(folder / "run", model_of(folder / "student", 257, a=0, b=1, own=3), data__tokenizer=None)
    tree["train"] |= {"objective": "distill", "distillation": {"teacher": str(teacher), **numbers}}
    settings = TrainConfig.model_validate(tree)
    return find_teacher(settings, read_model(settings.model))


def test_a_teacher_may_have_ids_that_the_student_has_not(tmp_path: Path) -> None:
    teacher = model_of(tmp_path / "teacher", 300, a=0, b=1, c=2)
    assert found(tmp_path, teacher) == TopTokens(64, Softmax(1.0, 257))
    assert found(tmp_path, teacher, top_k=999, temperature=2.0) == TopTokens(257, Softmax(2.0, 257))


def test_a_teacher_of_other_ids_is_refused(tmp_path: Path) -> None:
    for ids, difference in (
        ({"b": 0, "a": 1}, "id 0 is 'b' of the teacher and 'a' of data.tokenizer"),
        ({"a": 0, "b": 1, "c": 3}, "id 3 is 'c' of the teacher and 'own' of data.tokenizer"),
    ):
        with pytest.raises(
            ConfigError, match=f"teacher and student must have the same ids: {difference}; name a model"
        ):
            found(tmp_path, model_of(tmp_path / "teacher", 257, **ids))


def test_the_files_of_bytes_in_an_export_are_the_tokenizer_bytes(tmp_path: Path) -> None:
    teacher = build_tiny(tmp_path / "teacher")
    write_byte_tokenizer(teacher, vocab_size=257)
    tree = config(tmp_path / "run", build_tiny(tmp_path / "student"), data__tokenizer="bytes")
    tree["train"] |= {"objective": "distill", "distillation": {"teacher": str(teacher)}}
    for tokenizer in ("bytes", str(teacher)):
        tree["data"]["tokenizer"] = tokenizer
        settings = TrainConfig.model_validate(tree)
        assert find_teacher(settings, read_model(settings.model)) == TopTokens(64, Softmax(1.0, 257))


def test_a_new_student_is_told_to_take_the_tokenizer_of_its_teacher(tmp_path: Path) -> None:
    teacher = model_of(tmp_path / "teacher", 257, a=0)
    tree = config(tmp_path / "run", teacher, data__tokenizer="bytes")
    tree["model"] = {"config": json.loads((teacher / "config.json").read_text())}
    tree["train"] |= {"objective": "distill", "distillation": {"teacher": str(teacher)}}
    settings = TrainConfig.model_validate(tree)
    with pytest.raises(ConfigError, match=f"is of bytes; name .*, or set data.tokenizer: {teacher}"):
        find_teacher(settings, read_model(settings.model))
