"""The files of the tokenizer `bytes`: Transformers and ByteTokenizer give the same ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatrain_ray.io.tokens.byte_tokenizer import END_NAME, ByteTokenizer, write_byte_tokenizer
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer


def test_ids_are_bytes_and_decode_to_the_text(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=320)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    text = "".join(map(chr, range(0x800))) + "漢字 😀 <|im_end|>"
    ids = theirs(text)["input_ids"]
    assert ids == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ByteTokenizer.end_of_document
    assert theirs.decode([104, 105, 256, 300], skip_special_tokens=True) == "hi"


def test_the_end_of_an_answer_is_one_id_where_chats_are_encoded(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=257)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = f"é{END_NAME}漢😀<|{END_NAME}{END_NAME} <|endoftext"
    expected, placed = theirs.encode(text), ByteTokenizer(marked=True).encode_placed(text)
    assert placed.ids.tolist() == expected.ids == ByteTokenizer(marked=True).encode(text).tolist()
    assert list(zip(placed.starts.tolist(), placed.ends.tolist(), strict=True)) == expected.offsets
    assert ByteTokenizer(marked=True).decode(placed.ids) == text
    assert ByteTokenizer().encode_placed(text).ids.tolist() == list(text.encode())


def test_every_byte_has_its_id_and_a_small_vocabulary_no_end(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=256)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    assert FolderTokenizer(tmp_path).end_of_document is None
