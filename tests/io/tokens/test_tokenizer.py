"""Tokenizers: bytes, and a Hugging Face folder built here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.tokenizer import load_tokenizer

WORDS = {"<s>": 0, "</s>": 1, "to": 2, "be": 3, "or": 4, "not": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a word-level tokenizer that would add <s>, cut at 3 and pad to 8 if it were let."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_bytes_are_the_bytes_of_utf8() -> None:
    assert load_tokenizer("bytes").encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert load_tokenizer("bytes").encode("").size == 0


def test_a_folder_tokenizer_gives_the_whole_text_and_nothing_else(folder: Path) -> None:
    assert load_tokenizer(str(folder)).encode("to be or not to be").tolist() == [2, 3, 4, 5, 2, 3]


def test_many_documents_are_encoded_each_as_if_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain_ray.io.tokens.tokenizer.BATCH_CHARS", 20)
    tokenizer = load_tokenizer(str(folder))
    texts = ["to be", "or", "not to be " * 40_000, "be", "  ", "or not"]
    blocks = [
        TextBlock(text[at : at + 1000], at + 1000 >= len(text), 0) for text in texts for at in range(0, len(text), 1000)
    ]
    documents: list[list[int]] = [[]]
    for block in tokenizer.encode_all(blocks):
        documents[-1] += block.ids.tolist()
        if block.ends:
            documents.append([])
    assert documents == [*(tokenizer.encode(text).tolist() for text in texts), []]


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}, 1),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>", "lstrip": False}}, 1),
        ("special_tokens_map.json", {"eos_token": "</s>"}, 1),
        ("tokenizer_config.json", {"eos_token": "<gone>"}, 6),  # AutoTokenizer adds it
        ("tokenizer_config.json", {"eos_token": None}, None),
        ("other.json", {"eos_token": "</s>"}, None),
    ],
)
def test_the_end_of_a_document_is_the_eos_token_of_the_folder(
    folder: Path, file: str, content: object, expected: int | None
) -> None:
    (folder / file).write_text(json.dumps(content))
    assert load_tokenizer(str(folder)).end_of_document == expected
    assert load_tokenizer(str(folder)).num_ids == 7 + (expected == 6)  # with the pad of tokenizer.json


def test_a_broken_tokenizer_config_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer_config\.json"):
        load_tokenizer(str(folder))


def test_a_missing_folder_and_a_missing_or_broken_file_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder: .*absent; expected `bytes`"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"no such file: .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    panics = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQ=="}, "model": {"type": "BPE"}}
    for broken in ("{", json.dumps({"version": "1.0", **panics})):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json"):
            load_tokenizer(str(tmp_path))


def test_a_folder_without_tokenizer_json_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """OPT's has the files of GPT-2's tokenizer only. No vocabulary of sentencepiece can be read here."""
    vocabulary = {
        token: number for number, token in enumerate(["<s>", "</s>", *sorted(ByteLevel.alphabet()), "th", "the"])
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}')
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the 12 cats", " é\n", "</s>the"):
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.end_of_document == theirs.eos_token_id == 1
    assert vocabulary["the"] in ours.encode("the").tolist()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ConfigError, match=r"makes no tokenizer of its vocab.json here \(its class finds no vocabulary"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "vocab.json").rename(tmp_path / "tokenizer.model")
    with pytest.raises(ConfigError, match=r"no tokenizer of its tokenizer.model here \(.*; where it can, write one"):
        load_tokenizer(str(tmp_path))


def test_placed_tokens_are_the_same_ids_with_the_characters_they_stand_for(folder: Path) -> None:
    ids, starts, ends = load_tokenizer(str(folder)).encode_placed("to  be or")
    assert (ids.tolist(), starts.tolist(), ends.tolist()) == ([2, 3, 4], [0, 4, 7], [2, 6, 9])
    ids, starts, ends = load_tokenizer("bytes").encode_placed("aé€😀")
    assert bytes(ids.tolist()).decode() == "aé€😀"
    assert starts.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert (ends - starts).tolist() == [1] * 10
    for name in (str(folder), "bytes"):
        assert [part.size for part in load_tokenizer(name).encode_placed("")] == [0, 0, 0]


def test_the_space_before_a_word_has_its_place(tmp_path: Path) -> None:
    """A post-processor like GPT-2's and Llama's takes it out of the word's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([" be be"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    _, starts, ends = load_tokenizer(str(tmp_path)).encode_placed("é be")
    assert (starts.tolist(), ends.tolist()) == ([0, 0, 1], [1, 1, 4])


def mark(text: str, **flags: bool) -> dict[str, object]:
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False} | flags


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"added_tokens_decoder": {"7": mark("<|b|>"), "6": mark("<|a|>", rstrip=True, special=True)}}, {}),
        ({"added_tokens_decoder": {"0": mark("<s>", special=True)}, "eos_token": "<|b|>"}, {"<|a|>": 6}),
        ({"eos_token": "<|b|>"}, {"<|b|>": 7, "<|a|>": 6, "<s>": 0}),
        ({"eos_token": {"__type": "AddedToken", **mark("<|b|>", lstrip=True)}, "extra_special_tokens": ["<|a|>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<|a|>"}}, {}),
        ({"eos_token": "not"}, {}),
    ],
)
def test_tokens_that_the_settings_add(folder: Path, settings: dict[str, object], added: dict[str, int]) -> None:
    """They are whole tokens, as in AutoTokenizer, of whichever file names them."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if added:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    theirs, ours, text = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder)), "<|a|> to<|b|>notto <s>be"
    assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.end_of_document == theirs.eos_token_id


@pytest.mark.parametrize("added", [{"<|a|>": "six"}, {"<|a|>": None}])
def test_added_tokens_that_cannot_be_read(folder: Path, added: dict[str, object]) -> None:
    (folder / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(ConfigError, match=r"cannot read the tokens that settings in .* add"):
        load_tokenizer(str(folder))
