"""Trains a byte-level BPE tokenizer on a corpus and writes it as a folder that Transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import BadRecords, RecordTally
from megatrain_ray.io.records.read_texts import read_texts

END_OF_TEXT = "<|endoftext|>"  # id 0: bos and eos token
PAD = "<|pad|>"  # id 1: if the pad were the end of text, trainers that mask pads would never learn the end of text
NUM_BYTES = 256
# Merges never cross these words, which are cut as model families since 2023 cut them: a contraction; letters with one
# character before them; at most three digits; punctuation with the line ends after it; blanks.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def special_tokens(extra: Sequence[str]) -> list[str]:
    """Return all special tokens in the order of their ids. Raises ConfigError for an empty or repeated one."""
    tokens = [END_OF_TEXT, PAD, *extra]
    if "" in tokens or len(set(tokens)) < len(tokens):
        raise ConfigError(f"--special: expected texts, each once, beside {END_OF_TEXT} and {PAD}; got {list(extra)}")
    return tokens


def train_bpe(texts: Iterator[str], vocab_size: int, specials: Sequence[str]) -> tokenizers.Tokenizer:
    """Train a tokenizer by merging the most frequent pairs, ties by id: the same texts give the same tokenizer.

    Any text can be encoded and decodes to itself. The tokenizer has fewer ids than `vocab_size` if the texts hold no
    more pairs. Raises ConfigError if `vocab_size` has no room for the bytes and the special tokens.
    """
    if vocab_size < (least := NUM_BYTES + len(specials)):
        raise ConfigError(
            f"--vocab-size: {vocab_size} is less than the {NUM_BYTES} bytes and {len(specials)} special tokens that a "
            f"byte-level tokenizer has; give at least {least}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_corpus(
    files: Sequence[Path], text_field: str, bad_records: BadRecords, advance: Callable[[int], None]
) -> Iterator[str]:
    """Yield the texts of all files. A long .txt file comes in parts: a word across two of them counts as two words.

    advance: is called with the number of bytes read so far.

    Raises ConfigError as read_texts.
    """
    done_bytes = 0
    for file in files:
        for block in read_texts(file, text_field, RecordTally(bad_records)):
            yield block.text
            advance(done_bytes + block.location.read_bytes)
        done_bytes += file.stat().st_size


def write_tokenizer(tokenizer: tokenizers.Tokenizer, specials: Sequence[str], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`. Raises OSError."""
    end, pad, *extra = specials
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": pad,
        "additional_special_tokens": extra,
        "clean_up_tokenization_spaces": False,  # true would remove blanks from decoded text
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
