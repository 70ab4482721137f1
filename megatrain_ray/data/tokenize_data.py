"""Tokenises every source of a run in the driver, before any actor starts, into a cache that later runs find."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import spinner
from megatrain_ray.console.tokenizing import reporting
from megatrain_ray.data.data_sources import naming_held_out, sources_of
from megatrain_ray.data.hub_sources import local_paths
from megatrain_ray.data.marks_and_template import template_of, with_marks
from megatrain_ray.data.rollout_stream import compared_logprobs
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.chat.chat_recipe import ChatRecipe
from megatrain_ray.io.chat.find_chats import ChatSource, find_chats
from megatrain_ray.io.chat.token_records import PretokenizedRecipe
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.io.files.disk_errors import DiskError, explained
from megatrain_ray.io.images.image_parts import UNREAD
from megatrain_ray.io.images.image_processor import ImageProcessor
from megatrain_ray.io.records.choose_records import RecordChoice
from megatrain_ray.io.records.file_formats import RECORD_SUFFIXES, TEXT_SUFFIXES
from megatrain_ray.io.records.find_files import describe_folders, find_files
from megatrain_ray.io.rollouts.encode_prompts import PromptRecipe
from megatrain_ray.io.rollouts.encode_rollouts import RolloutRecipe
from megatrain_ray.io.tokens.cache_pruning import mark_used, prune
from megatrain_ray.io.tokens.token_cache import Recipe, TextRecipe, find_tokens, make_tokens
from megatrain_ray.io.tokens.token_files import read_meta
from megatrain_ray.io.tokens.tokenizer import tokenizer_folder
from megatrain_ray.units import format_bytes

MOST_PROCESSES = 12  # about a tenth of the work stays in one process: reading records and writing the tokens


def tokenize(
    data: DataConfig, tokenizer: str, vocab_size: int, run_dir: Path, *, reports: bool = True
) -> tuple[Path, ...]:
    """Return the folder of tokens of each source, made if it is missing: in the user's cache, or else in `run_dir`.

    reports: print what became of the records, also of those that an earlier start has made tokens of.

    Raises ConfigError for what is wrong with files, tokenizer, template or ids, MegatrainError if the disk fails.
    """
    paths = {name: local_paths(parts) for name, parts in sources_of(data).items()}
    recipes = {name: recipe_of(path, data, tokenizer, vocab_size) for name, path in paths.items()}
    for path in paths.values():
        for note in describe_folders(path, TEXT_SUFFIXES if data.kind == "pretrain" else RECORD_SUFFIXES):
            say(note)
    return tuple(_folder_of(name, recipe, vocab_size, run_dir, reports) for name, recipe in recipes.items())


def tokenize_rollouts(config: TrainConfig, file: Path, vocab_size: int, root: Path) -> None:
    """Make the tokens of a file of a run's own rollouts in the folder `root`, if they are not there yet."""
    data = config.data.of_rollouts(file)
    with explained("make", root):
        root.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of([str(file)], data, config.tokenizer, vocab_size)
    assert isinstance(recipe, RolloutRecipe)
    with reporting(str(file), False) as reporter:
        make_tokens(replace(recipe, compared=compared_logprobs(config.train)), root, vocab_size, reporter)


def cached_tokens(data: DataConfig, tokenizer: str, vocab_size: int) -> tuple[Path, ...] | None:
    """Return the folder of tokens of each source if the user's cache has all of them; else None.

    Reads no text, and asks no hub: data sets of the hub count as not cached, and so does a stream. Raises ConfigError
    as tokenize, and RuntimeError for a user without a home.
    """
    if data.stream is not None:
        return None
    found = []
    for parts in sources_of(data).values():
        paths = local_paths(parts, may_fetch=False)
        if len(paths) < len(parts):
            return None
        found.append(find_tokens(recipe_of(paths, data, tokenizer, vocab_size), token_cache()))
    return None if None in found else tuple(filter(None, found))


def missing_data(data: DataConfig) -> Iterator[str]:
    """Yield a message for each problem with the local files that data.path and data.eval_path name. Reads no text."""
    for part in (data, data.held_out if data.eval_path is not None else None):
        try:
            if part is not None:
                with naming_held_out(part):
                    _find(part, may_fetch=False)
        except (ConfigError, OSError) as error:
            yield str(error)


def check_there(config: TrainConfig) -> None:
    """Raise ConfigError if files of a run's data are missing; those of the hub are fetched. Reads no text.

    Warns of held-out files that are trained on.
    """
    trained = _find(config.data)
    if config.evaluates and (held_out := config.data.held_out) is not None:
        with naming_held_out(held_out):
            evaluated = _find(held_out)
        if config.train.steps != 0 and config.data.eval_path is not None and (both := trained & evaluated):
            say(f"warning: data.eval_path: {min(both)} is trained on as well, so its loss says nothing of new text")


def image_processor(tokenizer: str) -> ImageProcessor:
    """Return the processor of images in a tokenizer's folder."""
    return ImageProcessor(tokenizer_folder(tokenizer))


def _find(data: DataConfig, *, may_fetch: bool = True) -> set[Path]:
    """Return the files of the data, as real paths; those of a stream only if they are local.

    Raises ConfigError if there are none.
    """
    found: set[Path] = set()
    for parts in sources_of(data).values():
        path = local_paths(parts, may_fetch=may_fetch and data.stream is None)
        if not path:
            continue
        if data.kind == "pretrain":
            found |= {file.resolve() for file in find_files(path)}
        else:
            found |= {source.file.resolve() for source in _chats(path, data)}
    return found


def recipe_of(path: Sequence[str], data: DataConfig, tokenizer: str, vocab_size: int) -> Recipe:
    """Return how the tokens of local files are made. Raises ConfigError if there are none, or all are empty."""
    choice = RecordChoice(data.max_records, data.hash_range)
    data = with_marks(data, tokenizer, vocab_size)
    if data.kind == "pretrain":
        return TextRecipe(
            find_files(path), tokenizer, data.text_field, data.bad_records, choice, bool(data.add_bos),
            bool(data.add_eos),
        )  # fmt: skip
    _check_filled(path)
    if data.kind == "prompts":
        files, template = find_files(path, RECORD_SUFFIXES), template_of(data, tokenizer)
        return PromptRecipe(files, tokenizer, template, data.chat_format, choice)
    if data.kind == "tokens":
        files = tuple(source.file for source in find_chats(path))
        return PretokenizedRecipe(files, data.truncation, data.seq_len, data.bad_records, choice)
    chats, template = _chats(path, data), template_of(data, tokenizer)
    num_processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if data.kind == "rollouts":
        return RolloutRecipe(
            tuple(source.file for source in chats), tokenizer, template, data.truncation, data.seq_len,
            data.bad_records, num_processes, choice, data.scale_rewards, data.unfinished == "drop",
        )  # fmt: skip
    return ChatRecipe(
        chats, tokenizer, template, data.truncation, data.seq_len, data.bad_records, num_processes, choice, data.learn,
        data.learn_reasoning, halves=data.in_pairs and not data.packing,
        processor=image_processor(tokenizer) if data.images else None,
    )  # fmt: skip


def _chats(path: Sequence[str], data: DataConfig) -> tuple[ChatSource, ...]:
    found = find_chats(path, data.dataset, data.chat_format, answers=data.answers)
    if not data.images and (listing := [source for source in found if source.images]):
        raise ConfigError(f"data.dataset: {listing[0].dataset} names a column of images: {UNREAD}")
    return found


def _check_filled(path: Sequence[str]) -> None:
    """Raise ConfigError if every file of records is empty."""
    files = find_files(path, RECORD_SUFFIXES)
    if not any(file.stat().st_size for file in files):
        raise ConfigError(f"data.path: {files[0]} is empty; expected a record a line")


def _folder_of(name: str, recipe: Recipe, vocab_size: int, run_dir: Path, reports: bool) -> Path:
    with suppress(RuntimeError):  # a user without a home has no cache
        with spinner(f"checking the tokens of {name}"):
            found = find_tokens(recipe, token_cache())  # the cache may be read-only
        if found:
            open_corpus(name, found, vocab_size)  # checks the ids, which are checked as they are written otherwise
            mark_used(found)
            if reports and (meta := read_meta(found)) and meta.report[1:]:
                say(f"the tokens of {name} are in the cache: {meta.report[0]}", *meta.report[1:])
            return found
    with writable_cache(run_dir) as root:
        with reporting(name, reports) as reporter:
            made = make_tokens(recipe, root, vocab_size, reporter)
        mark_used(made)
        return made


def token_cache() -> Path:
    """Return the folder in which tokens are cached. Raises RuntimeError for a user without a home."""
    return cache_folder() / "tokens"


@contextmanager
def writable_cache(run_dir: Path) -> Iterator[Path]:
    """Yield the user's cache, or a folder in `run_dir` if that cannot be written to.

    If the block succeeds, outdated and unused tokens in it are deleted. A folder made here that stays empty is deleted.
    """
    is_new = False
    try:
        root = token_cache()
        is_new = not root.exists()
        root.mkdir(0o700, parents=True, exist_ok=True)  # other users may not read the tokens
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, RuntimeError) as error:
        root = run_dir / "tokens"
        is_new = not root.exists()
        say(f"tokens are kept in {root}: the user's cache cannot be written to ({error}); XDG_CACHE_HOME moves it")
        root.mkdir(parents=True, exist_ok=True)
    try:
        yield root
        if freed_bytes := prune(root):
            size = format_bytes(freed_bytes)
            say(f"{root}: {size} of tokens deleted: their files have changed, or nothing used them for long")
    except DiskError as error:
        raise DiskError(f"{error}; mend that, or name a folder on another disk in XDG_CACHE_HOME") from error
    finally:
        with suppress(OSError):
            if is_new:
                root.rmdir()
