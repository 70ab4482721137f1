"""Records of token ids: what is learned of them, what is refused, and the same order as from any other source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.token_records import read_token_record
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens import token_files
from megatrain_ray.io.tokens.token_files import is_weighted, is_whole
from tests.support.texts import tokens_of


@pytest.mark.parametrize(
    ("record", "ids", "learned"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": None, "length": 3}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [5, 6, 7], [0, 0, 1]),
        ({"input_ids": [0, 5, 6, 0], "labels": [-100, 5, 6, -100], "attention_mask": [0, 1, 1, 0]}, [5, 6], [1, 1]),
        ({"input_ids": [0, 5, 6, 0], "attention_mask": [0, 1, 1, 0]}, [5, 6], [1, 1]),
        ({"input_ids": [5, 0, 6], "attention_mask": [1, 0, 1]}, [5, 6], [1, 1]),  # one document
        ({"input_ids": []}, [], []),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, [5, 6, 7], [0, 1, 1]),
        ({"input_ids": [5, 6], "loss_mask": [True, False]}, [5, 6], [1, 0]),
        ({"input_ids": [5, 6, 7], "weights": [0, 0.5, 2]}, [5, 6, 7], [0, 0.5, 2]),
        (
            {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8], "loss_mask": [1, 1, 0, 1], "weights": [2.0] * 4}
            | {"attention_mask": [1, 1, 1, 0]},
            [5, 6, 7],
            [0, 2, 0],
        ),
    ],
)
def test_what_is_learned(record: dict[str, Any], ids: list[int], learned: list[float]) -> None:
    ((found, loss_weights, *_),) = read_token_record(record)
    assert found.tolist() == ids
    assert loss_weights.tolist() == learned


@pytest.mark.parametrize(
    "packed",
    [
        {"position_ids": [0, 1, 0, 1, 2, 0]},
        {"seq_lengths": [2, 3, 1]},
        {"seq_idx": [0, 0, 1, 1, 1, 2]},
        {"attention_mask": [1, 1, 2, 2, 2, 3]},
        {"seq_start_id": [0, 2, 5]},
        {"cu_seqlens": [0, 2, 5, 6], "attention_mask": [1] * 6},
        {"position_ids": [0, 1, 0, 1, 2, 0], "seq_lengths": [2, 3, 1]},
    ],
)
def test_documents_of_a_packed_record_are_told_apart(packed: dict[str, Any]) -> None:
    """As TRL (position_ids, seq_lengths), Axolotl (attention_mask, position_ids) and NeMo (seq_start_id) pack them."""
    chats = read_token_record({"input_ids": [5, 6, 7, 8, 9, 4], "labels": [5, 6, -100, 8, 9, 4], **packed})
    assert [chat.ids.tolist() for chat in chats] == [[5, 6], [7, 8, 9], [4]]
    assert [chat.loss_weights.tolist() for chat in chats] == [[1, 1], [0, 1, 1], [1]]


def test_pads_of_a_packed_record_are_left_out() -> None:
    record = {"input_ids": [0, 5, 6, 7, 0], "position_ids": [1, 0, 1, 0, 0], "attention_mask": [0, 1, 1, 1, 0]}
    assert [chat.ids.tolist() for chat in read_token_record(record)] == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1, 2], "expected a mapping, got"),
        ({"text": "a"}, "no key 'input_ids'; its keys are 'text'"),
        ({"input_ids": "12"}, "input_ids: expected a list of integers, got '12'"),
        ({"input_ids": [1.5, 2]}, "input_ids: expected a list of integers"),
        ({"input_ids": [True, False]}, "input_ids: expected a list of integers"),
        ({"input_ids": [[1, 2]]}, "input_ids: expected a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "input_ids: expected a list of integers"),
        ({"input_ids": [10**30]}, "input_ids: expected a list of integers"),
        ({"input_ids": [1, -1]}, "expected ids of 0 and more, got -1 to 1"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels: has 1 numbers, input_ids 2; expected as many"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "token 0 has the label 2 and the id 1; expected the id itself"),
        ({"input_ids": [1, 2], "completion_mask": [0, 1]}, "completion_mask: is not read; give labels"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask: expected 0 and 1, got 0 to 2; others are weights"),
        ({"input_ids": [1, 2], "weights": [1, -0.5]}, "expected numbers of 0 and more, token 1 has -0.5"),
        ({"input_ids": [1, 2], "weights": [float("nan"), 1]}, "token 0 has nan"),
        ({"input_ids": [1, 2], "weights": ["1", 1]}, "weights: expected a list of numbers"),
        ({"input_ids": [1, 2], "position_ids": [4, 5]}, "position_ids: token 0 has position 4; expected one more"),
        ({"input_ids": [1, 2], "position_ids": [[0, 1]] * 3}, "position_ids: expected a list of integers"),
        ({"input_ids": [1, 2], "seq_lengths": [1]}, "seq_lengths: expected documents of all 2 input_ids"),
        ({"input_ids": [1, 2], "seq_lengths": [3, -1]}, "seq_lengths: expected documents of all 2 input_ids"),
        ({"input_ids": [1, 2], "cu_seqlens": [0, 3]}, "cu_seqlens: expected documents of all 2 input_ids"),
    ],
)
def test_what_is_refused(record: Any, message: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_token_record(record)
    assert message in str(caught.value)


RECORDS = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
    {"input_ids": [5, 6]},
    {"input_ids": [9], "labels": [9]},
    {"input_ids": list(range(20, 30))},
    {"input_ids": list(range(30, 40)), "labels": [-100] * 9 + [39]},
]


def data(path: Path, **changes: Any) -> DataConfig:
    settings = {"kind": "tokens", "path": str(path), "tokenizer": "bytes", "seq_len": 5, "shuffle": False}
    return DataConfig.model_validate(settings | changes)


def write(path: Path, records: list[dict[str, Any]] = RECORDS) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_sequences_stay_whole_and_long_ones_are_cut_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = data(write(tmp_path / "a.jsonl"), packing=False)
    stream = open_stream(settings, tokens_of(settings, tmp_path, 64), 64, 3)
    batch = stream.next_batch()
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 0], [5, 6, 0, 0, 0], [20, 21, 22, 23, 24]]
    assert batch.targets.tolist() == [[-100, 3, 4, -100, -100], [6, *[-100] * 4], [21, 22, 23, 24, 25]]
    told = capsys.readouterr().err
    assert "5 records: 3 sequences, 12 tokens, 8 of them learned" in told
    assert f"1 too long, cut at the end ({tmp_path / 'a.jsonl'}, line 4)" in told
    assert f"1 too long, dropped ({tmp_path / 'a.jsonl'}, line 5)" in told
    assert f"1 without a token to learn, dropped ({tmp_path / 'a.jsonl'}, line 3)" in told


def test_packed_sequences_stand_side_by_side(tmp_path: Path) -> None:
    settings = data(write(tmp_path / "a.jsonl"), truncation="drop")
    batch = open_stream(settings, tokens_of(settings, tmp_path, 64), 64, 1).next_batch()
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]
    assert batch.targets.tolist() == [[-100, 3, 4, -100, 6]]


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    found = []
    for file in (write(tmp_path / "a.jsonl"), tmp_path / "a.parquet"):
        (folder,) = tokens_of(data(file), tmp_path, 64)
        found.append(
            [np.fromfile(folder / f"{name}.bin", np.uint8).tolist() for name in ("tokens", "lengths", "supervised")]
        )
    assert found[0] == found[1]


def test_weights_other_than_0_and_1_are_kept_as_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them comes after masks were written."""
    monkeypatch.setattr(token_files, "CHUNK_TOKENS", 1)
    weights = [[0, 1, 1], [0.5, 0.5], [1, 3]]
    records = [{"input_ids": list(range(1, len(own) + 1)), "weights": own} for own in weights]
    settings = data(write(tmp_path / "a.jsonl", records), packing=False)
    folders = tokens_of(settings, tmp_path, 64)
    assert is_whole(folders[0]) and is_weighted(folders[0])
    assert sorted(file.name for file in folders[0].glob("*.bin")) == ["lengths.bin", "loss_weights.bin", "tokens.bin"]
    stream = open_stream(settings, folders, 64, 3)
    batch = stream.next_batch()
    assert batch.loss_weights is not None
    assert batch.loss_weights.tolist() == [[1, 1, 0, 0, 0], [0.5, 0, 0, 0, 0], [3, 0, 0, 0, 0]]
    assert (batch.num_supervised, batch.total_weight) == (4, 5.5)
    (folders[0] / "loss_weights.bin").write_bytes(bytes(4 * 7))
    assert not is_whole(folders[0])


def test_bad_records_and_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"text": "x"}, {"input_ids": [1, 70]}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: no key 'input_ids'; its keys are 'text'"):
        tokens_of(data(file), tmp_path, 64)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3 has token id 70, but the model's vocab_size is 64"):
        tokens_of(data(file, bad_records="skip"), tmp_path, 64)
    with pytest.raises(ConfigError, match=r"data\.path: nothing to learn\n1 record: 0 sequences"):
        tokens_of(data(write(tmp_path / "b.jsonl", [{"input_ids": [3]}])), tmp_path, 64)
