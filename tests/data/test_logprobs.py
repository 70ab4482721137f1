"""Log-probabilities of a reference: their files, and how they come with batches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_sources import open_windows
from megatrain_ray.data.data_worker import DataWorker, HeldOutData
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.batch_stream import HeldOut
from megatrain_ray.io.files.disk_errors import DiskError
from megatrain_ray.io.tokens.logprob_files import (
    LOGPROBS_NAME,
    LogprobWriter,
    begin_logprobs,
    begun_logprobs,
    holds_logprobs,
    open_logprobs,
    read_logprob_meta,
)
from megatrain_ray.io.tokens.teacher_files import TEACHER_NAME, RecordSize
from megatrain_ray.io.tokens.token_files import IGNORED, TOKENS_NAME, derived_provenance, read_meta
from tests.support.texts import tokens_of, write
from tests.support.tiny import VOCAB_SIZE

CHATS = [
    {
        "messages": [
            {"role": "user", "content": "ab" * (k % 3 + 1)},
            {"role": "assistant", "content": "xyz" * (k % 4 + 1)},
        ]
    }
    for k in range(1, 30)
]


def data_of(folder: Path, kind: str) -> DataConfig:
    """Return data of one kind, with short last windows, held-out records, and two sources if they are mixed."""
    write(folder, a="".join(chr(97 + k % 26) for k in range(150)), b="0123456789" * 5, c="held out text")
    write(folder, chats_jsonl="".join(json.dumps(chat) + "\n" for chat in CHATS))
    texts: list[Any] = [str(folder / "a.txt"), str(folder / "b.txt")]
    tree: dict[str, Any] = {"path": texts, "tokenizer": "bytes", "seq_len": 8, "seed": 3}
    tree |= {"eval_path": str(folder / "c.txt")}
    if kind == "chats":
        tree |= {"kind": "sft", "path": str(folder / "chats.jsonl"), "seq_len": 140, "eval_path": None}
        tree |= {"eval_fraction": 0.2}
    if kind == "mixed":
        tree |= {"path": [{"path": path, "weight": weight} for path, weight in zip(texts, (3, 1), strict=True)]}
    if kind == "apart":
        tree |= {"packing": False}
    return DataConfig.model_validate(tree)


def made_up(batch: Batch) -> NDArray[np.float32]:
    """Return a number for each target that depends on all of its row before it, and 0 for those that do not count."""
    sums = np.cumsum(batch.input_ids, axis=1) + 1000 * batch.targets
    return np.where(batch.targets == IGNORED, 0, -sums / 1024).astype(np.float32)


def predicted(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return made-up records of a teacher: two ids and three log-probabilities of each target, by `made_up`."""
    values = made_up(batch)[..., None]
    ids = np.where(values == 0, 0, batch.input_ids[..., None] + [1, 2])
    return ids.astype(np.int32), (values * np.array([1, 2, 3], np.float32)).astype(np.float32)


def written(
    data: DataConfig, tokens: tuple[Path, ...], root: Path, record: RecordSize | None = None
) -> tuple[Path, ...]:
    """Write made-up numbers as a pass does, the last batch first. `record`: of a teacher's predictions, as well."""
    sources = open_windows(data, tokens, VOCAB_SIZE, whole=True)
    batches = HeldOut(sources, batch_size=4, micro_batch_size=2)
    folders = tuple(root / f"logprobs {k}" for k in range(len(tokens)))
    for folder, of, windows in zip(folders, tokens, sources, strict=True):
        folder.mkdir()
        begin_logprobs(folder, derived_provenance(of, "tokens", {}, []), windows.num_places, record)
    writers = [LogprobWriter(folder, record) for folder in folders]
    for index in reversed(range(batches.num_batches)):
        batch, writer = batches.batch(index), writers[batches.source_of(index)]
        values = made_up(batch)
        if record is not None:
            ids, logprobs = predicted(batch)
            values = np.concatenate([values[..., None], ids.view(np.float32), logprobs], -1)
        for _ in range(2):  # as after a death of a process
            writer.write(batches.rows_of(index), batches.places(index), values, batch.num_supervised)
    for writer, windows in zip(writers, sources, strict=True):
        assert writer.written.num_rows == windows.num_windows
        writer.finish()
    return folders


@pytest.mark.parametrize("kind", ["packed", "apart", "chats", "mixed"])
def test_each_batch_has_the_numbers_of_its_targets(tmp_path: Path, kind: str) -> None:
    data = data_of(tmp_path, kind)
    tokens, held_out = tokens_of(data, tmp_path), data.held_out
    logprobs = written(data, tokens, tmp_path)
    ours = DataWorker(data, tokens, VOCAB_SIZE, 3, 0, None, logprobs=logprobs)
    without = DataWorker(data, tokens, VOCAB_SIZE, 3, 0, None)
    for step in (1, 2, 30, 7):  # several epochs, each in another order
        batch = ours.batch(step)
        assert batch.reference_logprobs is not None
        assert batch.reference_logprobs.dtype == np.float32
        assert np.array_equal(batch.reference_logprobs, made_up(batch))
        assert np.count_nonzero(batch.reference_logprobs) == batch.num_supervised > 0
        assert np.array_equal(batch.input_ids, without.batch(step).input_ids)
    resumed = DataWorker(data, tokens, VOCAB_SIZE, 3, 2, without.position_after(2), logprobs=logprobs)
    assert np.array_equal(resumed.batch(9).reference_logprobs, ours.batch(9).reference_logprobs)
    assert without.batch(1).reference_logprobs is None

    assert held_out is not None
    evaluated = HeldOutData(held_out, tokens_of(held_out, tmp_path), VOCAB_SIZE, 4, 2)
    (tmp_path / "held").mkdir()
    folders = written(held_out, evaluated.tokens, tmp_path / "held")
    worker = DataWorker(
        data, tokens, VOCAB_SIZE, 3, 0, None, HeldOutData(held_out, evaluated.tokens, VOCAB_SIZE, 4, 2, folders)
    )
    for index in range(evaluated.open().num_batches):
        batch = worker.held_out_batch(index)
        assert np.array_equal(batch.reference_logprobs, made_up(batch))


@pytest.mark.parametrize("kind", ["chats", "mixed"])
def test_each_batch_has_what_a_teacher_predicts_of_its_targets(tmp_path: Path, kind: str) -> None:
    """Of a held-out batch the last rows are pads."""
    data = data_of(tmp_path, kind)
    tokens, record = tokens_of(data, tmp_path), RecordSize(2, 3)
    logprobs = written(data, tokens, tmp_path, record)
    assert all(map(holds_logprobs, logprobs))
    (meta, *_) = map(read_logprob_meta, logprobs)
    values = np.fromfile(logprobs[0] / LOGPROBS_NAME, "<f4").astype(np.float64)
    values = values[values != 0]
    assert meta is not None
    assert meta.known == pytest.approx((np.exp(values) + np.exp(2 * values)).mean(), rel=1e-6)
    worker = DataWorker(data, tokens, VOCAB_SIZE, 3, 0, None, logprobs=logprobs)
    held_out = HeldOut(open_windows(data, tokens, VOCAB_SIZE, logprobs, whole=True), batch_size=4, micro_batch_size=3)
    for batch in (*map(worker.batch, (1, 2, 30, 7)), *map(held_out.batch, range(held_out.num_batches))):
        assert batch.teacher is not None
        assert batch.reference_logprobs is None
        assert all(map(np.array_equal, batch.teacher, predicted(batch)))
    with (logprobs[0] / TEACHER_NAME).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert not holds_logprobs(logprobs[0])


def test_a_folder_says_what_it_holds_and_whether_it_is_whole(tmp_path: Path) -> None:
    data = data_of(tmp_path, "packed")
    tokens = tokens_of(data, tmp_path)
    (folder,) = written(data, tokens, tmp_path)
    meta = read_logprob_meta(folder)
    assert meta is not None
    values = np.fromfile(folder / LOGPROBS_NAME, "<f4")
    assert (meta.num_values, meta.num_targets) == (201, np.count_nonzero(values))
    assert meta.mean == pytest.approx(values[values != 0].mean(), rel=1e-6)
    assert holds_logprobs(folder)
    described = (folder / "meta.json").read_text()
    for name, forged in (("mean", "x"), ("num_targets", "2"), ("num_targets", 202), ("num_targets", -1)):
        tree = json.loads(described)
        tree["logprobs"][name] = forged
        (folder / "meta.json").write_text(json.dumps(tree))
        assert read_logprob_meta(folder) is None, (name, forged)
    (folder / "meta.json").write_text("[" * 100_000)
    assert (read_logprob_meta(folder), read_meta(folder)) == (None, None)
    (folder / "meta.json").write_text(described)
    provenance = json.loads((folder / "meta.json").read_text())["provenance"]
    assert provenance["tokens"] == tokens[0].name
    assert [Path(file[0]).name for file in provenance["files"]] == ["a.txt", "b.txt"]
    with pytest.raises(ConfigError, match=r"the log-probabilities of a are not in .*, where they were"):
        open_logprobs("a", folder, 200)
    with (folder / LOGPROBS_NAME).open("r+b") as file:
        file.write(b"x")
    assert not holds_logprobs(folder)
    with (folder / LOGPROBS_NAME).open("ab") as file:
        file.write(b"x")
    assert read_logprob_meta(folder) is None


def test_a_file_that_another_program_cuts_off_or_deletes_ends_a_pass_and_a_run(tmp_path: Path) -> None:
    """Nothing becomes zero instead: the writer of a pass refuses to go on, and the reader of a batch as well."""
    places, values = np.array([[0, 1]]), np.ones((1, 2, 6), np.float32)
    for name, spoil, message in (
        (TEACHER_NAME, Path.unlink, f"cannot write .*{TEACHER_NAME}: No such file"),
        (LOGPROBS_NAME, Path.unlink, f"cannot write .*{LOGPROBS_NAME}: No such file"),
        (TEACHER_NAME, cut_off, f"{TEACHER_NAME} has 39 bytes instead of 40: another program cut it off"),
        (LOGPROBS_NAME, cut_off, f"{LOGPROBS_NAME} has 7 bytes instead of 8: another program cut it off"),
    ):
        folder = tmp_path / f"{name} {spoil.__name__}"
        folder.mkdir()
        begin_logprobs(folder, {}, 2, RecordSize(2, 3))
        writer = LogprobWriter(folder, RecordSize(2, 3))
        writer.write(range(1), places, values, 2)
        spoil(folder / name)
        with pytest.raises(DiskError, match=message):
            writer.write(range(1, 2), places, values, 2)
        with pytest.raises(DiskError, match=message):
            writer.finish()
        assert begun_logprobs(folder, 2, RecordSize(2, 3)) is None, "it is made anew"

    data = data_of(tmp_path, "packed")
    tokens = tokens_of(data, tmp_path)
    logprobs = written(data, tokens, tmp_path, RecordSize(2, 3))
    worker = DataWorker(data, tokens, VOCAB_SIZE, 3, 0, None, logprobs=logprobs)
    for file in (logprobs[0] / TEACHER_NAME, tokens[0] / TOKENS_NAME):
        cut_off(file)
        with pytest.raises(DiskError, match=f"{file.name} has been cut off by another program; start again"):
            worker.batch(1)
        file.unlink()
    worker.batch(1)  # what is mapped stays until the process ends


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def test_what_is_not_a_number_is_no_reference(tmp_path: Path) -> None:
    begin_logprobs(tmp_path, {}, 2)
    writer, places = LogprobWriter(tmp_path), np.array([[0, 1]])
    with pytest.raises(MegatrainError, match=r"rows 3 to 4: the model gives some targets no probability"):
        writer.write(range(3, 4), places, np.array([[-1.0, np.nan]], np.float32), 2)
