"""Files of records: what comes out with which place, and what is damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.records.file_formats import CHUNK_BYTES
from megatrain_ray.io.records.read_records import RecordError, read_records
from megatrain_ray.io.records.read_tables import ROWS

RECORDS: list[Any] = [{"a": "é😀"}, {"a": None}, {"a": "x\u2028y\x85"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def packed(name: str, content: bytes) -> bytes:
    pack = {"zst": zstandard.compress, "gz": gzip.compress}.get(name.rpartition(".")[2])
    return pack(content) if pack else content


def read(file: Path, content: bytes) -> list[tuple[str, Any]]:
    file.write_bytes(content)
    return [(str(place).removeprefix(f"{file}, "), record) for place, record in read_records(file)]


@pytest.mark.parametrize(
    "content",
    [LINES, LINES.replace(b"\n", b"\r\n"), LINES.rstrip(), b"\xef\xbb\xbf" + LINES],
    ids=["plain", "CRLF", "no last line end", "BOM"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.zst", "a.jsonl.gz", "a.json.gz", "A.JSONL"])
def test_lines(tmp_path: Path, name: str, content: bytes) -> None:
    assert read(tmp_path / name, packed(name, content)) == [
        (f"line {i}", record) for i, record in enumerate(RECORDS, 1)
    ]


def test_blank_lines_count_and_are_passed_over(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", b"\n  \r\n" + LINES)[0] == ("line 3", RECORDS[0])
    assert read(tmp_path / "b.jsonl", b"") == []


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
def test_a_list(tmp_path: Path, name: str) -> None:
    content = packed(name, b"\xef\xbb\xbf \n" + json.dumps(RECORDS, indent=1).encode())
    assert read(tmp_path / name, content) == [(f"record {i}", record) for i, record in enumerate(RECORDS, 1)]


def test_parquet_rows_of_several_batches(tmp_path: Path) -> None:
    rows = [{"turns": [{"role": "user", "content": f"é{i}"}], "note": None} for i in range(ROWS + 2)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "b.parquet", row_group_size=100)
    got = list(read_records(tmp_path / "b.parquet"))
    assert [record for _, record in got] == rows
    assert str(got[-1][0]).endswith(f"b.parquet, row {ROWS + 2}")
    assert got[-1][0].read_bytes == (tmp_path / "b.parquet").stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.zst", "a.jsonl.gz", "list.json", "list.json.gz"])
def test_places_say_how_much_has_been_read(tmp_path: Path, name: str) -> None:
    content = json.dumps(RECORDS).encode() if name.startswith("list") else LINES
    (tmp_path / name).write_bytes(packed(name, content))
    read_bytes = [place.read_bytes for place, _ in read_records(tmp_path / name)]
    assert read_bytes == sorted(read_bytes)
    assert read_bytes[-1] == (tmp_path / name).stat().st_size


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    rows = [{"turns": [{"role": "user", "content": f"é{i}"}], "note": None} for i in range(5)]
    table = pyarrow.Table.from_pylist(rows)
    for name, new in (("file.arrow", pyarrow.ipc.new_file), ("stream.arrow", pyarrow.ipc.new_stream)):
        with new(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        got = list(read_records(tmp_path / name))
        assert [record for _, record in got] == rows
        assert str(got[-1][0]).endswith(f"{name}, row 5")
        assert [record for _, record in read_records(tmp_path / name, columns=["note"])] == [{"note": None}] * 5
    whole = (tmp_path / "stream.arrow").read_bytes()
    with pytest.raises(ConfigError, match=r"cut.arrow.*cut short or damaged"):
        read(tmp_path / "cut.arrow", whole[: len(whole) // 2])


def test_csv_cells_hold_line_ends_quotes_and_long_texts(tmp_path: Path) -> None:
    long = "x" * (1 << 18)
    content = f'\ufeffq,a\r\n"two\nlines, and ""quotes""",é\r\n\r\n{long},\r\n1,2,3\r\nlast,one'.encode()
    first, second, (place, bad), last = read(tmp_path / "a.csv", content)
    assert first == ("line 2", {"q": 'two\nlines, and "quotes"', "a": "é"})
    assert second == ("line 5", {"q": long, "a": ""})
    assert (place, str(bad)) == ("line 6", "has 3 cells, and the header 2")
    assert last == ("line 7", {"q": "last", "a": "one"})
    assert read(tmp_path / "a.tsv.gz", gzip.compress(b"q\ta\n1,5\t2\n")) == [("line 2", {"q": "1,5", "a": "2"})]
    assert read(tmp_path / "empty.csv", b"") == []


def test_zstandard_frames_follow_one_another_and_lines_may_be_long(tmp_path: Path) -> None:
    long = {"a": "x" * (3 * CHUNK_BYTES)}
    line = json.dumps(long).encode()
    frames = [zstandard.compress(part) for part in (LINES, line[:1000], line[1000:] + b"\n" + LINES)]
    assert [record for _, record in read(tmp_path / "a.jsonl.zst", b"".join(frames))] == [*RECORDS, long, *RECORDS]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter at column 8"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at offset 7"),
        (b"[" * 100_000, "not valid JSON: "),
        (b"9" * 5000, "not valid JSON: Exceeds the limit"),
    ],
)
def test_a_bad_line_says_why_and_the_rest_follows(tmp_path: Path, line: bytes, problem: str) -> None:
    (_, first), (place, bad), (_, last) = read(tmp_path / "a.jsonl", b"{}\n" + line + b"\n{}\n")
    assert (place, first, last) == ("line 2", {}, {})
    assert isinstance(bad, RecordError)
    assert str(bad).startswith(problem)


def parquet_bytes(folder: Path) -> bytes:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "x" * 999}] * 99), folder / "whole.parquet")
    return (folder / "whole.parquet").read_bytes()


def test_files_that_are_cut_off_or_no_records_are_refused_by_name(tmp_path: Path) -> None:
    frame, table, zipped = zstandard.compress(LINES * 100), parquet_bytes(tmp_path), gzip.compress(LINES * 100)
    cases = {
        "cut.jsonl.zst": (frame[:-5], "it may be cut short"),
        "spoilt.jsonl.zst": (b"12345678" + frame, "or damaged"),
        "cut.jsonl.gz": (zipped[:-5], "Truncated compressed stream; it may be cut short"),
        "spoilt.json.gz": (zipped[:40] + bytes(4) + zipped[44:], "or damaged"),
        "open.csv": (b'a,b\n1,"2\n', "unexpected end of data; it may be cut short"),
        "latin.csv": ("a,b\n1,é".encode("latin-1"), "line 2 is not UTF-8: byte 0xe9"),
        "twice.csv": (b"a,a\n1,2", "two columns of its header have one name"),
        "cut.parquet": (table[: len(table) // 2], "it may be cut short or damaged"),
        "spoilt.parquet": (table[:20] + bytes(40) + table[60:], "it may be cut short or damaged"),
        "cut.json": (b'[{"a": 1},\n{"a"', "is not valid JSON: .* at line 2, column"),
    }
    for name, (content, message) in cases.items():
        with pytest.raises(ConfigError, match=f"{name}.*{message}"):
            read(tmp_path / name, content)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    for name in ("gone.json", "gone.jsonl", "gone.jsonl.zst", "gone.parquet"):
        with pytest.raises(ConfigError, match=f"cannot read .*{name}"):
            list(read_records(tmp_path / name))
