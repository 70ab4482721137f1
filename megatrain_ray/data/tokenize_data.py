"""Tokenises every source of a run in the driver, before any actor starts, into a cache that later runs find."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatrain_ray.config.groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import spinner
from megatrain_ray.console.tokenizing import reporting
from megatrain_ray.data.data_sources import naming_held_out, sources_of
from megatrain_ray.data.hub_sources import local_paths
from megatrain_ray.data.rollout_stream import compared_logprobs
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.chat.chat_recipe import ChatRecipe
from megatrain_ray.io.chat.chat_template import ChatTemplate, fitting_templates, load_chat_template
from megatrain_ray.io.chat.encode_chats import with_ends_of
from megatrain_ray.io.chat.find_chats import ChatSource, find_chats
from megatrain_ray.io.chat.template_ending import lacks_bos, last_mark, text_after_answer, unlearned_mark
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
from megatrain_ray.io.tokens.byte_tokenizer import is_byte_tokenizer
from megatrain_ray.io.tokens.cache_pruning import mark_used, prune
from megatrain_ray.io.tokens.token_cache import Recipe, TextRecipe, find_tokens, make_tokens
from megatrain_ray.io.tokens.token_files import read_meta
from megatrain_ray.io.tokens.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    Tokenizer,
    holds_tokenizer,
    load_tokenizer,
    tokenizer_folder,
)
from megatrain_ray.units import format_bytes

ALL_IDS = 1 << 32  # more than any id of a token
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


def decide_marks(config: TrainConfig, vocab_size: int | None) -> TrainConfig:
    """Return the configuration with data.add_bos and data.add_eos decided, and print which of them is added.

    vocab_size: of the model; None: not known yet.
    """
    if not open_marks(config.data, config.tokenizer):
        return config
    tokenizer = load_tokenizer(config.tokenizer)
    data = with_marks(config.data, config.tokenizer, vocab_size or ALL_IDS, tokenizer)
    if isinstance(tokenizer, FolderTokenizer):
        if data.add_bos and config.data.add_bos is None and tokenizer.bos is not None:
            say(f"each text begins with {tokenizer.token_of(tokenizer.bos)}, as in Transformers (data.add_bos)")
        if data.add_eos and config.data.add_eos is None and tokenizer.end_of_document is not None:
            say(f"each text ends with {tokenizer.token_of(tokenizer.end_of_document)} (data.add_eos)")
    return config.model_copy(update={"data": data})


def other_tokenizer(config: TrainConfig) -> str | None:
    """Return a warning if the model's local folder has another tokenizer than data.tokenizer; else None."""
    used, folder = config.data.tokenizer, Path(config.model.path or "")
    if used is None or config.model.path is None or not holds_tokenizer(folder):
        return None
    if is_byte_tokenizer(folder) if used == "bytes" else _is_same(folder, tokenizer_folder(used)):
        return None
    return (
        f"warning: data.tokenizer: {used} is not the tokenizer in {folder}, whose ids the model was trained on; leave "
        "data.tokenizer out to use that"
    )


def _is_same(folder: Path, other: Path) -> bool:
    """Return whether two folders hold the same tokenizer.json, or are the same."""
    files = (at / "tokenizer.json" for at in (folder, other))
    own, given = (path.read_bytes() if path.is_file() else b"" for path in files)
    return own == given or folder.resolve() == other.resolve()


def open_marks(data: DataConfig, tokenizer: str) -> tuple[str, ...]:
    """Return which of the keys add_bos and add_eos the start of a run must still decide."""
    return tuple(key for key in data.decided_marks(tokenizer) if getattr(data, key) is None)


def with_marks(data: DataConfig, name: str, vocab_size: int, tokenizer: Tokenizer | None = None) -> DataConfig:
    """Return the data with add_bos and add_eos decided where they are left open.

    tokenizer: that of the `name`; None: it is loaded if it is needed.
    """
    if not (keys := open_marks(data, name)):
        return data
    tokenizer = tokenizer or load_tokenizer(name)
    end, packs_texts = tokenizer.end_of_document, data.kind == "pretrain" and data.packing
    decided = {"add_bos": tokenizer.adds_bos, "add_eos": end is not None and end < vocab_size and not packs_texts}
    return data.model_copy(update={key: decided[key] for key in keys})


def describe_template(data: DataConfig, tokenizer: str, vocab_size: int) -> Iterator[str]:
    """Yield a line that names the chat template, and warnings of what a model would not learn from it.

    Raises ConfigError as load_chat_template.
    """
    data, is_bytes = with_marks(data, tokenizer, vocab_size), tokenizer == "bytes"
    template = template_of(data, tokenizer)
    yield f"template  {template.name}"
    own = with_ends_of(template, load_tokenizer(tokenizer))
    fitting = ", ".join(fitting_templates(None if is_bytes else tokenizer_folder(tokenizer)))
    having = f"(this tokenizer has the marks of {fitting or 'none of the named ones'})"
    if last_mark(own, after := text_after_answer(template)) is None:
        marked = f"set data.chat_template to one that ends answers with a special token {having}"
        text = "ends an answer with ordinary text, at which megatrain generate stops and other programs do not"
        blanks = "writes only blanks after an answer, so a model would not learn to stop"
        yield (
            f"warning: this template {text if after.strip() else blanks}; "
            f"{_end_of_bytes(data, vocab_size) if is_bytes else marked}"
        )
    if (mark := unlearned_mark(own, template)) is not None:
        yield (
            f"warning: the {{% generation %}} tags of this template leave out {own.token_of(mark)}, which ends answers,"
            " so a model would not learn to stop; set data.chat_template to one that has it within the tags"
        )
    if lacks_bos(own, template):
        yield (
            f"warning: this tokenizer begins every text with {own.token_of(own.bos or 0)}, and the template does not "
            f"write it; set data.chat_template to one that does {having}"
        )


def _end_of_bytes(data: DataConfig, vocab_size: int) -> str:
    """Return advice for a model of bytes whose template ends answers with ordinary text, so that it cannot stop."""
    if data.add_eos:
        return "write {{ eos_token }} there, or leave data.chat_template out"
    if vocab_size <= ByteTokenizer.end_of_document:
        return f"give the model a vocab_size of {ByteTokenizer.end_of_document + 1} or more, with an id for the end"
    return "in a new run data.add_eos: true ends answers with an id of its own"


def template_of(data: DataConfig, tokenizer: str) -> ChatTemplate:
    """Return the chat template of the data. Raises ConfigError as load_chat_template."""
    template = load_chat_template(tokenizer, data.chat_template, data.chat_template_args, ends_bytes=bool(data.add_eos))
    return replace(template, in_parts=True) if data.images else template


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
