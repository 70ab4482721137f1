"""Finds the teacher of a run, and checks that the student has the same ids."""

from __future__ import annotations

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.engine.objectives.distillation import Softmax, TopTokens
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.evaluation_config import naming_reference, run_of
from megatrain_ray.io.tokens.byte_tokenizer import is_byte_tokenizer
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, holds_tokenizer, load_tokenizer, tokenizer_folder
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import read_model


def find_teacher(config: TrainConfig, student: ModelSource) -> TopTokens | None:
    """Return what a run needs of its teacher's predictions; None if it has no teacher.

    Raises ConfigError if there is no such model, or if its ids mean other tokens than those of the data.
    """
    numbers, name = config.train.distillation, config.train.distillation.teacher
    if config.train.objective != "distill" or name is None:
        return None
    if (files := run_of(name)) is not None:
        of_run = files.read_config()
        model, tokenizer = of_run.model, of_run.tokenizer
    else:
        model, tokenizer = config.model.model_copy(update={"path": name, "config": None}), None
    with naming_reference(config.train):
        teacher = read_model(model)
    if tokenizer is None and teacher.folder is not None and holds_tokenizer(teacher.folder):
        tokenizer = str(teacher.folder)
    sizes = teacher.written_vocab_size, student.written_vocab_size
    difference = _difference(config.tokenizer, tokenizer)
    if tokenizer is None and sizes[0] != sizes[1]:
        difference = f"it has no tokenizer, and its vocab_size is {sizes[0]} instead of {sizes[1]}"
    if difference is None and None in sizes:
        difference = "a config.json has no vocab_size"
    if difference is not None:
        new = config.model.config is not None and tokenizer is not None
        raise ConfigError(
            f"train.distillation.teacher: {name}: teacher and student must have the same ids: {difference}; name a "
            "model with the tokenizer of the data" + (f", or set data.tokenizer: {tokenizer}" if new else "")
        )
    vocab_size = min(size for size in sizes if size is not None)
    return TopTokens(min(numbers.top_k, vocab_size), Softmax(numbers.temperature, vocab_size))


def _is_of_bytes(tokenizer: str) -> bool:
    """Return whether a tokenizer has the ids of bytes, also if it is the folder of an export with its files."""
    return tokenizer == "bytes" or is_byte_tokenizer(tokenizer_folder(tokenizer))


def _difference(of_data: str, of_teacher: str | None) -> str | None:
    """Return where two tokenizers disagree about an id; None if they do not. Either may have ids more."""
    if of_teacher is None or of_data == of_teacher:
        return None
    are_bytes = _is_of_bytes(of_data), _is_of_bytes(of_teacher)
    if any(are_bytes):
        return None if all(are_bytes) else f"one of data.tokenizer: {of_data} and {of_teacher} is of bytes"
    ours, theirs = load_tokenizer(of_data), load_tokenizer(of_teacher)
    assert isinstance(ours, FolderTokenizer) and isinstance(theirs, FolderTokenizer)
    own, given = ours.vocabulary, theirs.vocabulary
    of_id = {token_id: token for token, token_id in own.items()}
    for token, token_id in sorted(given.items(), key=lambda item: item[1]):
        if own.get(token, token_id) != token_id or of_id.get(token_id, token) != token:
            return f"id {token_id} is {token!r} of the teacher and {ours.token_of(token_id)!r} of data.tokenizer"
    return None
