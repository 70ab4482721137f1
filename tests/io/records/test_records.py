"""Files as texts: formats, what is told of a bad record, and of a file that ends too early."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.read_records import RecordOutcome, RecordTally
from megatrain_ray.io.records.read_texts import BLOCK_BYTES, read_texts

TEXTS = ["plain", "line\r\nline\rline\n", "日本語 😀 é", "\ufeffnot at the start of the file", "x" * (10 << 20), "\0"]


def lines(texts: list[str]) -> bytes:
    return "\n".join(
        json.dumps({"id": 1, "text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(texts)
    ).encode()


def jsonl(file: Path, texts: list[str]) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + lines(texts).replace(b"\n", b"\r\n\r\n"))


def jsonl_zst(file: Path, texts: list[str]) -> None:
    """Write the texts in two zstd frames, cut within a line."""
    data = lines(texts)
    file.write_bytes(zstandard.compress(data[:50]) + zstandard.compress(data[50:]))


def parquet(file: Path, texts: list[str]) -> None:
    table = pyarrow.table({"id": range(len(texts)), "text": texts})
    pyarrow.parquet.write_table(table, file, row_group_size=4)


def texts_of(file: Path, tally: RecordTally | None = None, field: str = "text") -> list[str]:
    texts, parts = [], []
    for block in read_texts(file, field, tally or RecordTally("error")):
        parts.append(block.text)
        if block.ends:
            texts.append("".join(parts))
            parts = []
    assert not parts
    return texts


@pytest.mark.parametrize("make", [jsonl, jsonl_zst, parquet])
def test_a_record_is_a_document_and_arrives_as_it_was(tmp_path: Path, make: Callable[[Path, list[str]], None]) -> None:
    file = tmp_path / f"a.{make.__name__.replace('_', '.')}"
    make(file, [*TEXTS, "", "last"])
    tally = RecordTally("error")
    assert texts_of(file, tally) == [*TEXTS, "last"]
    assert (tally.counts[RecordOutcome.EMPTY], tally.counts[RecordOutcome.BAD]) == (1, 0)


@pytest.mark.parametrize("text", ["", "a", "é" * BLOCK_BYTES, "a" * BLOCK_BYTES, "a\r\nb\rcé€\U0001f600\0"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_plain_file_is_one_document_without_its_byte_order_mark(tmp_path: Path, text: str, mark: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(mark + text.encode())
    tally = RecordTally("error")
    assert texts_of(tmp_path / "a.txt", tally) == ([text] if text else [])
    assert tally.counts[RecordOutcome.EMPTY] == (not text)


@pytest.mark.parametrize("before", [0, 5, BLOCK_BYTES - 1, BLOCK_BYTES + 7])
@pytest.mark.parametrize(("bad", "byte"), [(b"\xffcd", "ff"), (b"\xe2\x82", "e2")])
def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path: Path, before: int, bad: bytes, byte: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * before + bad)
    with pytest.raises(ConfigError, match=rf"a.txt is not UTF-8: byte 0x{byte} at offset {before};"):
        texts_of(tmp_path / "a.txt")


BAD_LINES = {
    b'{"text": ': "not valid JSON: Expecting value at column 9",
    b"[" * 100_000: "not valid JSON: maximum recursion",
    b'{"text": ' + b"1" * 5000 + b"}": "not valid JSON: Exceeds the limit",
    b'{"text": "\xff"}': "not UTF-8: byte 0xff at offset 10",
    b'["text"]': r"expected a mapping, got \['text'\]",
    b'{"body": "x", "id": 3}': r"no key 'text' \(data.text_field\); its keys are 'body', 'id'",
    b'{"messages": []}': r"no key 'text' \(data.text_field\); its keys are 'messages'; chats\? set data.kind: sft",
    b'{"text": "a': "not valid JSON: Unterminated string starting at column 10",
    b'{"text": null}': "text: expected a text, got None",
    b'{"text": 3}': "text: expected a text, got 3",
    b'{"text": {"a": "b"}}': "text: expected a text, got {'a': 'b'}",
    b'{"text": "\\ud83d"}': r"text holds half a character \(\\ud83d, a surrogate",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}')
    with pytest.raises(
        ConfigError, match=rf"a.jsonl, line 3: {BAD_LINES[line]}.*\. Fix the record, or set data.bad_records: s"
    ):
        texts_of(file)
    tally = RecordTally("skip")
    assert texts_of(file, tally) == ["first", "last"]
    assert tally.counts[RecordOutcome.BAD] == 1
    assert "line 3" in tally.locations(RecordOutcome.BAD)[0]


def test_the_first_places_are_remembered_and_all_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{\n" * 9)
    tally = RecordTally("skip")
    assert texts_of(tmp_path / "a.jsonl", tally) == []
    assert (tally.counts[RecordOutcome.BAD], len(tally.locations(RecordOutcome.BAD))) == (9, 5)


def test_a_row_without_text_is_named_or_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet(file, ["a", None, "b", "", None])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"a.parquet, row 2: text: expected a text, got None"):
        texts_of(file)
    tally = RecordTally("skip")
    assert texts_of(file, tally) == ["a", "b"]
    assert (
        tally.counts[RecordOutcome.BAD],
        tally.counts[RecordOutcome.EMPTY],
        tally.locations(RecordOutcome.BAD)[1][-37:],
    ) == (
        2,
        1,
        "row 5: text: expected a text, got None"[-37:],
    )


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_column_that_is_missing_or_no_text_is_refused_whatever_the_policy(tmp_path: Path, policy: str) -> None:
    file = tmp_path / "a.parquet"
    parquet(file, ["a"])
    with pytest.raises(ConfigError, match=r"a.parquet has no column 'body' .*its columns are 'id', 'text'"):
        texts_of(file, RecordTally(policy), "body")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the column 'id' is of type int64, expected string"):
        texts_of(file, RecordTally(policy), "id")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("lost", [1, 4, 100])
@pytest.mark.parametrize("make", [jsonl_zst, parquet])
def test_a_file_cut_short_is_refused_whatever_the_policy(
    tmp_path: Path, make: Callable[[Path, list[str]], None], lost: int, policy: str
) -> None:
    file = tmp_path / f"a.{make.__name__.replace('_', '.')}"
    make(file, [f"text {index * index}" for index in range(200)])
    file.write_bytes(file.read_bytes()[:-lost])
    with pytest.raises(ConfigError, match=r"cannot read .*/a\..*: .*; it may be cut short or damaged"):
        texts_of(file, RecordTally(policy))  # type: ignore[arg-type]


def test_what_is_no_archive_at_all_is_refused(tmp_path: Path) -> None:
    for name in ("a.jsonl.zst", "b.parquet"):
        (tmp_path / name).write_bytes(b"this is no archive")
        with pytest.raises(ConfigError, match=f"cannot read .*{name}: "):
            texts_of(tmp_path / name)
