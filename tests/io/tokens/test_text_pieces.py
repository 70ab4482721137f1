"""Long documents in pieces: whatever the tokenizer, the ids are those of the whole text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers

from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.long_documents import Joiner, cut_texts
from tests.support.tiny import TEXT

ENGLISH = TEXT.read_text()[:60_000]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
BITS = (
    "日本語",
    "😀👩‍👩‍👧",
    " ",
    "\n\n",
    "é",
    "e\u0301",
    "    ",
    "1234567",
    "の",
    "word ",
    " the",
    "\t",
    "\r\n",
    "!!!",
    "ﬁ",
)
MIXED = "".join(random.Random(0).choices(BITS, k=15_000))
DIGITS = "".join(random.Random(1).choices("0123456789", k=20_000))


def byte_level() -> Any:
    """Return a tokenizer like GPT-2's, and its trainer; offsets leave out the space before a word."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False)


def split_by_threes() -> Any:
    """Return a tokenizer like Llama 3's, and its trainer.

    Digits are split in threes from where a number begins, so a piece that begins within one is out of step.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return tokenizer, trainers.BpeTrainer(vocab_size=600, show_progress=False)


def prefixed() -> Any:
    """Return a tokenizer like SentencePiece's, and its trainer.

    It applies NFKC, and a text begins with a mark, so the first token of a piece is none of the text.
    """
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )


def words() -> Any:
    """Return a tokenizer like BERT's, and its trainer.

    Spaces are no tokens, and a word that is too long is one unknown token, however long.
    """
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=600, show_progress=False, special_tokens=["[UNK]"])


@pytest.fixture(scope="module", params=[byte_level, split_by_threes, prefixed, words], ids=lambda make: make.__name__)
def tokenizer(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    made, trainer = request.param()
    made.train_from_iterator([ENGLISH, MIXED], trainer)
    return made


def joined(encode: Callable[[str], Any], text: str, size: int, overlap: int) -> tuple[list[int], int]:
    """Encode the text in pieces; return the ids, and how many pieces there were."""
    joiner, ids, num_pieces, ends = Joiner(encode, overlap, overlap // 2), [], 0, []
    blocks = [TextBlock(text[at : at + 777], at + 777 >= len(text), at) for at in range(0, len(text), 777)]
    for piece in cut_texts(blocks, size, overlap):
        num_pieces += 1
        for block in joiner.add(piece, encode(piece.text)):
            ids += block.ids.tolist()
            ends.append(block.ends)
    assert ends == [False] * (len(ends) - 1) + [True]
    return ids, num_pieces


TEXTS = {"english": ENGLISH, "mixed": MIXED, "digits": DIGITS, "one letter": "a" * 9001, "spaces": " " * 9001}


@pytest.mark.parametrize("name", TEXTS)
def test_the_ids_are_those_of_the_whole_text(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    text, num_chars = TEXTS[name], []

    def encode(part: str) -> Any:
        num_chars.append(len(part))
        return tokenizer.encode(part, add_special_tokens=False)

    ids, num_pieces = joined(encode, text, size=1000, overlap=128)
    assert num_pieces > 7
    assert sum(num_chars) < 4 * len(text), "a text that cannot be cut anywhere is still encoded few times"
    assert ids == encode(text).ids


@given(
    parts=st.lists(st.sampled_from([*BITS, "a", "7", "\n", "x" * 40]), min_size=100, max_size=300),
    size=st.integers(64, 200),
)
def test_the_ids_are_those_of_the_whole_text_wherever_it_is_cut(
    tokenizer: tokenizers.Tokenizer, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)  # noqa: E731
    assert joined(encode, text, size, overlap=32)[0] == encode(text).ids


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(8, 60), st.integers(0, 3), st.integers(1, 90))
def test_pieces_cover_their_documents(sizes: list[int], size: int, overlap: int, block: int) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdef", k=length)) for length in sizes]
    blocks = [TextBlock(t[at : at + block], at + block >= len(t), 0) for t in texts for at in range(0, len(t), block)]
    rest = iter(cut_texts(blocks, size, overlap))
    for text in texts:
        end = 0
        for piece in rest:
            assert piece.text == text[piece.start : piece.start + len(piece.text)]
            assert piece.start == (end - 2 * overlap if end else 0)
            end = piece.start + len(piece.text)
            assert piece.ends or len(text) - end > 0
            if piece.ends:
                break
        assert end == len(text)
    assert list(rest) == []
