"""Tokens on the disk: what they are, when they are made again, and that a folder is complete or absent."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.chat.token_records import PretokenizedRecipe
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens import tokenizer as tokenizer_module
from megatrain_ray.io.tokens.cache_pruning import held
from megatrain_ray.io.tokens.rebuilt_tokenizer import RebuiltTokenizer
from megatrain_ray.io.tokens.token_cache import (
    TextRecipe,
    find_tokens,
    key_of,
    locked_folder,
    make_tokens,
    provenance_of,
)
from megatrain_ray.io.tokens.token_files import LENGTH_TYPE, TokenBlock, TokenMeta, TokenWriter, read_meta
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.saves import flip
from tests.support.texts import write


@dataclass
class Watch:
    """Remembers what it is told."""

    waiting: list[Path] = field(default_factory=list)
    replaced: list[Path] = field(default_factory=list)
    made: list[TokenMeta] = field(default_factory=list)
    on_advance: Callable[[], None] = lambda: None
    on_wait: Callable[[], None] = lambda: None

    def wait(self, folder: Path) -> None:
        self.waiting.append(folder)
        self.on_wait()

    def replace(self, folder: Path) -> None:
        self.replaced.append(folder)

    def advance(self, read_bytes: int, total_bytes: int) -> None:
        assert 0 < read_bytes <= total_bytes
        self.on_advance()

    def end(self, meta: TokenMeta, seconds: float) -> None:
        self.made.append(meta)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def recipe(tmp_path: Path) -> TextRecipe:
    write(tmp_path, a="first", b_jsonl='{"text": "second"}\n{"text": ""}\n{"text": "thé third"}')
    return TextRecipe((tmp_path / "a.txt", tmp_path / "b.jsonl"), "bytes", "text", "error")


def word_tokenizer(folder: Path, size: int) -> str:
    folder.mkdir()
    words = {f"w{index}": index for index in range(size)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_the_tokens_of_all_documents_in_order(recipe: TextRecipe, root: Path) -> None:
    watch = Watch()
    corpus = open_corpus("both", make_tokens(recipe, root, 257, watch), 257)
    assert bytes(corpus.tokens.tolist()).decode() == "firstsecondthé third"
    assert corpus.document_lengths.tolist() == [5, 6, 10]
    assert (corpus.end_of_document, corpus.tokens.dtype, corpus.name) == (256, np.uint16, "both")
    assert isinstance(corpus.tokens, np.memmap)
    assert (watch.made[0].num_documents, watch.made[0].num_tokens, watch.made[0].num_empty) == (3, 21, 1)


def test_the_fingerprint_is_that_of_the_first_saves(recipe: TextRecipe, root: Path) -> None:
    """They were taken of ids as wide as the model's vocabulary needs, then of the lengths."""
    folder = make_tokens(recipe, root, 257, Watch())
    ids = np.frombuffer("firstsecondthé third".encode(), np.uint8)
    lengths = np.array([5, 6, 10], np.int64)
    for vocab_size, kind in [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)]:
        fingerprint = open_corpus("both", folder, vocab_size).fingerprint
        assert fingerprint.crc32 == zlib.crc32(lengths.tobytes(), zlib.crc32(ids.astype(kind).tobytes()))
        assert fingerprint.num_tokens == 21


@pytest.mark.parametrize(("size", "kind"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_take_two_bytes_where_the_tokenizer_allows_it(tmp_path: Path, root: Path, size: int, kind: Any) -> None:
    write(tmp_path, a=f"w1 w{size - 1} w2")
    recipe = TextRecipe((tmp_path / "a.txt",), word_tokenizer(tmp_path / "words", size), "text", "error")
    corpus = open_corpus("a", make_tokens(recipe, root, size, Watch()), size)
    assert (corpus.tokens.tolist(), corpus.tokens.dtype) == ([1, size - 1, 2], kind)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("setting", [True, False])
def test_texts_begin_as_in_transformers(tmp_path: Path, root: Path, adds_bos: bool, setting: bool) -> None:
    folder = build(tmp_path / "gemma", FAMILIES["gemma"])
    changes = {"tokenizer_config": {"eos_token": "<eos>", "add_bos_token": setting}}
    if not adds_bos:
        changes["tokenizer"] = {"post_processor": None}
    for name, values in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    write(tmp_path, a="the cat " * 9, b="sat")
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.adds_bos == adds_bos
    files = (tmp_path / "a.txt", tmp_path / "b.txt")
    recipe = TextRecipe(files, str(folder), "text", "error", add_bos=tokenizer.adds_bos)
    corpus = open_corpus("a", make_tokens(recipe, root, 999, Watch()), 999)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = [reference(file.read_text())["input_ids"] for file in files]
    assert corpus.tokens.tolist() == [token for ids in expected for token in ids]
    assert corpus.document_lengths.tolist() == [len(ids) for ids in expected]
    without = replace(recipe, add_bos=False)
    assert key_of(provenance_of(without)) == key_of(provenance_of(TextRecipe(files, str(folder), "text", "error")))


def test_a_bos_token_must_be_there_to_be_added(recipe: TextRecipe, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.add_bos: the tokenizer names no bos_token"):
        make_tokens(replace(recipe, add_bos=True), root, 257, Watch())


def test_texts_end_with_the_eos_token(recipe: TextRecipe, root: Path) -> None:
    """Else a model that learns each text alone would never learn to stop."""
    before, after = (make_tokens(replace(recipe, add_eos=ends), root, 257, Watch()) for ends in (False, True))
    texts, ended = (open_corpus("a", folder, 257) for folder in (before, after))
    lengths = texts.document_lengths.tolist()
    documents = np.split(texts.tokens.astype(int), np.cumsum(lengths)[:-1])
    assert ended.tokens.tolist() == [token for ids in documents for token in (*ids.tolist(), 256)]
    assert ended.document_lengths.tolist() == [length + 1 for length in lengths]


def test_they_are_made_once(recipe: TextRecipe, root: Path) -> None:
    watch = Watch()
    assert find_tokens(recipe, root) is None
    folder = make_tokens(recipe, root, 257, watch)
    assert make_tokens(recipe, root, 257, watch) == folder == find_tokens(recipe, root)
    assert (len(watch.made), watch.waiting) == (1, [])
    assert [path.name for path in root.iterdir()] == [folder.name]


def test_whatever_goes_into_them_names_the_folder(recipe: TextRecipe, root: Path, tmp_path: Path) -> None:
    words = word_tokenizer(tmp_path / "words", 9)
    others = [
        replace(recipe, files=recipe.files[::-1]),
        replace(recipe, files=recipe.files[:1]),
        replace(recipe, text_field="body"),
        replace(recipe, bad_records="skip"),
        replace(recipe, tokenizer=words),
    ]
    folders = {make_tokens(recipe, root, 257, Watch())}
    for other in others:
        assert find_tokens(other, root) is None
        if other.text_field == "text":
            folders.add(make_tokens(other, root, 257, Watch()))
    assert len(folders) == 5
    before = recipe.files[0].stat().st_mtime_ns
    os.utime(recipe.files[0], ns=(before + 1, before + 1))
    assert find_tokens(recipe, root) is None
    moved = str(Path(words).rename(tmp_path / "moved"))
    assert find_tokens(replace(recipe, tokenizer=moved), root) is None  # the time of a.txt
    os.utime(recipe.files[0], ns=(before, before))
    assert find_tokens(replace(recipe, tokenizer=moved), root) is not None
    (Path(moved) / "tokenizer_config.json").write_text("{}")
    assert find_tokens(replace(recipe, tokenizer=moved), root) is None


@pytest.mark.parametrize("error", [ConfigError("bad"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_of_a_failure(recipe: TextRecipe, root: Path, error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(MegatrainError if isinstance(error, OSError) else type(error)):
        make_tokens(recipe, root, 257, Watch(on_advance=fail))
    assert list(root.iterdir()) == []


def test_a_folder_that_cannot_be_locked_is_named(recipe: TextRecipe, tmp_path: Path) -> None:
    with pytest.raises(MegatrainError, match=r"cannot write .*/gone/[0-9a-f]{32}: No such file"):
        make_tokens(recipe, tmp_path / "gone", 257, Watch())
    error = OSError(5, "Input/output error", "model.safetensors")
    with pytest.raises(OSError) as raised, locked_folder(tmp_path / "a", tmp_path, Watch()):
        raise error  # of what a pass for log-probabilities reads
    assert raised.value is error


def test_files_that_change_while_they_are_read_are_noticed(recipe: TextRecipe, root: Path) -> None:
    with pytest.raises(ConfigError, match="files changed while they were read"):
        make_tokens(recipe, root, 257, Watch(on_advance=lambda: os.utime(recipe.files[0], ns=(1, 1))))
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["tokens.bin", "lengths.bin", "meta.json"])
def test_a_folder_that_is_not_what_was_written_is_made_again(recipe: TextRecipe, root: Path, name: str) -> None:
    folder = make_tokens(recipe, root, 257, Watch())
    meta = read_meta(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    assert read_meta(folder) is None
    watch = Watch()
    assert make_tokens(recipe, root, 257, watch) == folder
    assert watch.made == [meta] == [read_meta(folder)]
    assert watch.replaced == [folder]


@pytest.mark.parametrize("name", ["tokens.bin", "lengths.bin"])
def test_a_flipped_bit_is_noticed_at_the_next_start(recipe: TextRecipe, root: Path, name: str) -> None:
    folder = make_tokens(recipe, root, 257, Watch())
    before = (folder / name).read_bytes()
    flip(folder / name, len(before) // 2, 0x01)
    assert find_tokens(recipe, root) is None
    watch = Watch()
    with held([folder]), pytest.raises(MegatrainError, match="and another run reads it: start again when that has"):
        make_tokens(recipe, root, 257, watch)
    assert (folder / name).read_bytes() != before, "the other run's files stay"
    make_tokens(recipe, root, 257, watch)
    assert watch.replaced == [folder]
    assert (folder / name).read_bytes() == before
    assert find_tokens(recipe, root) == folder


def test_two_starts_do_the_work_once(recipe: TextRecipe, root: Path) -> None:
    begun, second_waits = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert second_waits.wait(20)

    first, second = Watch(on_advance=hold), Watch(on_wait=second_waits.set)
    folders: list[Path] = []
    thread = threading.Thread(target=lambda: folders.append(make_tokens(recipe, root, 257, first)))
    thread.start()
    assert begun.wait(20)
    folders.append(make_tokens(recipe, root, 257, second))
    thread.join()
    assert folders[0] == folders[1]
    assert (len(first.made), len(second.made), second.waiting) == (1, 0, [folders[0]])
    assert [path.name for path in root.iterdir()] == [folders[0].name]


@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_an_id_outside_of_the_vocabulary_names_its_file(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("megatrain_ray.io.tokens.token_files.CHUNK_TOKENS", chunk)
    write(tmp_path, a="aaaa", b="", c="az", d="x")
    recipe = TextRecipe(tuple(sorted(tmp_path.glob("*.txt"))), "bytes", "text", "error")
    message = r"c\.txt has token id 122, but the model's vocab_size is 122; .* at least 123 entries"
    with pytest.raises(ConfigError, match=message):
        make_tokens(recipe, root, 122, Watch())
    folder = make_tokens(recipe, root, 123, Watch())
    with pytest.raises(ConfigError, match=message):
        open_corpus("all", folder, 122)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=9), st.integers(1, 12))
def test_the_writer_cuts_documents_anywhere(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], chunk: int
) -> None:
    """Documents of several blocks, written in chunks of any size."""
    folder, seen = tmp_path_factory.mktemp("writer"), list[RecordLocation]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain_ray.io.tokens.token_files.CHUNK_TOKENS", chunk)
        patch.setattr("megatrain_ray.io.tokens.token_files.EMPTY_TOKENS", 0)
        with TokenWriter(folder, 4, 9, seen.append) as writer:
            for number, blocks in enumerate(documents, 1):
                sizes = blocks or [0]
                for index, size in enumerate(sizes):
                    location = RecordLocation(Path(f"{number}.txt"), "", number, number)
                    writer.add(TokenBlock(np.arange(size, dtype=np.uint32), index == len(sizes) - 1, location))
            writer.finish()
    lengths = [sum(blocks) for blocks in documents]
    assert np.fromfile(folder / "lengths.bin", LENGTH_TYPE).tolist() == lengths
    expected = [token for blocks in documents for size in blocks for token in range(size)]
    assert np.fromfile(folder / "tokens.bin", "<u4").tolist() == expected
    assert (writer.num_documents, writer.num_tokens) == (len(documents), len(expected))
    highest = [max(blocks, default=0) - 1 for blocks in documents]
    first = f"{highest.index(max(highest)) + 1}.txt" if expected else ""
    assert (writer.highest_id, writer.highest_file) == (max(highest) if expected else -1, first)
    assert [location.number for location in seen] == sorted(location.number for location in seen)
    assert seen[-1].number == len(documents)


def test_tokens_that_were_made_otherwise_are_not_found(
    tmp_path: Path, recipe: TextRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier release read tokenizer.json alone, and no weights of tokens. Transformers rebuilds some tokenizers."""
    plain = replace(recipe, tokenizer=word_tokenizer(tmp_path / "plain", 3))
    assert plain.settings() == {"text_field": "text", "bad_records": "error"}
    (tmp_path / "plain" / "added_tokens.json").write_text('{"<|a|>": 3}')
    assert plain.settings() == {"text_field": "text", "bad_records": "error", "extended": True}
    (tmp_path / "plain" / "tokenizer_config.json").write_text('{"tokenizer_class": "SomeTokenizer"}')
    keys = {key_of(provenance_of(plain))}
    for text in ("first", "second"):  # what two versions of Transformers make of the folder
        made = tokenizers.Tokenizer.from_file(str(tmp_path / "plain" / "tokenizer.json"))
        made.add_tokens([text])
        monkeypatch.setattr(tokenizer_module, "rebuild", lambda *_, made=made: RebuiltTokenizer(made, {}))
        keys |= {key_of(provenance_of(plain))}
    assert len(keys) == 3
    assert PretokenizedRecipe((), "turn", 8, "error").settings()["weights"]
