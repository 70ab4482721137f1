"""Which records of a source are used: the first ones, and the two sides of data.eval_fraction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import count_data, open_stream
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.records.choose_records import RecordChoice, RecordChooser
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.records.record_location import RecordLocation
from tests.support.texts import tokens_of

RECORDS = st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(0, 50) | st.text(max_size=3)), max_size=30)
FRACTIONS = st.floats(0.01, 0.99)


def located(records: list[Any], file: str = "x.jsonl") -> list[tuple[RecordLocation, Any]]:
    return [(RecordLocation(Path(file), "line", number, 0), record) for number, record in enumerate(records, 1)]


def chosen(records: list[Any], choice: RecordChoice) -> list[Any]:
    return [record for _, record in RecordChooser(choice).of(located(records))]


def sides(records: list[Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Return the records for training and the held-out ones."""
    train, held_out = (RecordChoice(None, bounds) for bounds in ((fraction, 1.0), (0.0, fraction)))
    return chosen(records, train), chosen(records, held_out)


@given(RECORDS, RECORDS, FRACTIONS)
def test_each_record_is_on_one_side_and_stays_there_when_others_are_added(
    records: list[Any], more: list[Any], fraction: float
) -> None:
    train, held_out = sides(records, fraction)
    assert [record for record in records if record not in held_out] == train
    assert [record for record in records if record not in train] == held_out
    with_more_train, with_more_held_out = sides([*more, *records], fraction)
    assert [record for record in with_more_train if record in records] == [
        record for record in [*more, *records] if record in train
    ]
    assert all(record in with_more_held_out for record in held_out)
    assert set(map(json.dumps, sides(records, fraction / 2)[1])) <= set(map(json.dumps, held_out))


def test_the_share_is_that_of_the_records_and_the_order_of_keys_is_no_matter() -> None:
    records = [{"a": number, "b": "text"} for number in range(10000)]
    assert 900 < len(sides(records, 0.1)[1]) < 1100
    turned = [dict(reversed(record.items())) for record in records]
    assert sides(turned, 0.1)[1] == sides(records, 0.1)[1]


def test_the_sides_never_change() -> None:
    """Runs that are resumed after an update of this program find the same records held out."""
    records: list[Any] = [*range(12), "ä", "\ud800", {"text": "x", "n": None}]
    assert sides(records, 0.5)[1] == [2, 4, 6, "\ud800", {"text": "x", "n": None}]
    assert sides([RecordError("no JSON")], 0.999)[1] == []


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 12))
def test_the_first_records_of_all_files_together(sizes: list[int], max_records: int) -> None:
    files = [[f"{file}.{number}" for number in range(size)] for file, size in enumerate(sizes)]
    chooser = RecordChooser(RecordChoice(max_records))
    read = [record for records in files for _, record in chooser.of(located(records))]
    assert read == [record for records in files for record in records][:max_records]
    chooser.restart()
    assert [record for _, record in chooser.of(located(list(range(20))))] == list(range(max_records))


def documents(folder: Path, data: DataConfig) -> list[bytes]:
    """Return the documents of all sources as tokens, or of chats without what the template adds."""
    found = []
    for tokens in tokens_of(data, folder):
        corpus, start = open_corpus("x", tokens, 257), 0
        for length in corpus.document_lengths:
            ids = corpus.tokens[start : start + length]
            found.append(bytes(ids[ids < 256].astype("uint8")))
            start += length
    return found


def write_texts(folder: Path) -> list[str]:
    """Write the same 60 texts as JSON lines, as a table and as files; return them."""
    texts = [f"text number {number}" for number in range(60)]
    lines = [json.dumps({"n": number, "text": text}) + "\n" for number, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
    (folder / "files").mkdir()
    for number, text in enumerate(texts):
        (folder / "files" / f"{number:02}.txt").write_text(text)
    return texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "files"])
def test_texts_are_held_out_by_what_they_say_whatever_holds_them(tmp_path: Path, name: str) -> None:
    texts = [text.encode() for text in write_texts(tmp_path)]
    settings = {"seq_len": 8, "tokenizer": "bytes", "eval_fraction": 0.2, "max_records": 50}
    data = DataConfig.model_validate({"path": str(tmp_path / name), **settings})
    assert data.held_out is not None
    train, held_out = documents(tmp_path, data), documents(tmp_path, data.held_out)
    assert sorted([*train, *held_out]) == sorted(texts[:50])
    assert held_out == [text for text in texts[:50] if text.decode() in sides([t.decode() for t in texts], 0.2)[1]]
    assert count_data(data, tokens_of(data, tmp_path), 257).num_records == len(train)
    whole = data.model_copy(update={"eval_fraction": None, "max_records": None})
    assert documents(tmp_path, whole) == texts, "tokens of another choice are others"


@pytest.mark.parametrize("kind", ["sft", "tokens"])
def test_chats_and_ids_of_weighted_sources_are_held_out_of_each(tmp_path: Path, kind: str) -> None:
    path, answers = [], []
    for source in "pq":
        records: list[Any] = [{"input_ids": list(f"{source}{number} ".encode())} for number in range(40)]
        if kind == "sft":
            records = [{"instruction": "?", "output": f"{source}{number} "} for number in range(40)]
        (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        path.append({"path": str(tmp_path / f"{source}.jsonl"), "weight": 1.5})
        answers += [f"{source}{number} ".encode() for number in range(40)]
    tree = {"path": path, "kind": kind, "seq_len": 64, "tokenizer": "bytes", "eval_fraction": 0.25}
    data = DataConfig.model_validate(tree)
    assert data.held_out is not None
    found = []
    for part in (data, data.held_out):
        texts = documents(tmp_path, part)
        there = [answer for answer in answers if any(answer.strip() in text.split() for text in texts)]
        assert len(there) == len(texts)
        assert {answer[:1] for answer in there} == {b"p", b"q"}
        found += there
    assert sorted(found) == sorted(answers)
    for part in (data, data.held_out):
        open_stream(part, tokens_of(part, tmp_path), 257, 4).next_batch()


@pytest.mark.parametrize(
    ("fraction", "message"),
    [
        (0.001, "data.eval_fraction: 0.001 holds out none of 3 records (the last is"),
        (0.999, "data.eval_fraction: 0.999 leaves for training none of 3 records (the last is"),
    ],
)
def test_a_side_without_records_is_refused(tmp_path: Path, fraction: float, message: str) -> None:
    """The fraction that it names is large or small enough, and the next hundredth is not."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "x {word}"}}\n' for word in "abc"))
    tree = {"path": str(tmp_path / "a.jsonl"), "seq_len": 2, "tokenizer": "bytes"}

    def read(fraction: float) -> None:
        data = DataConfig.model_validate(tree | {"eval_fraction": fraction})
        assert data.held_out is not None
        for part in (data, data.held_out):
            tokens_of(part, tmp_path)

    with pytest.raises(ConfigError) as caught:
        read(fraction)
    assert str(caught.value).startswith(message)
    enough = float(str(caught.value).partition("by the hash of each; ")[2].partition(" is the first")[0])
    read(enough)
    with pytest.raises(ConfigError, match="is the first that does"):
        read(round(enough + (0.01 if fraction > 0.5 else -0.01), 2))
