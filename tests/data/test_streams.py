"""Sources that are read as streams: the same batches whatever is on disk, within a limit, from any position."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data import portion_supply
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.make_portion import make_portion
from megatrain_ray.data.open_streams import StreamedTokens, open_streams
from megatrain_ray.data.portion_supply import AGAIN_S
from megatrain_ray.data.stream_folder import PortionId, StreamFolder, StreamSpec, bytes_below
from megatrain_ray.errors import CapacityError, ConfigError, MegatrainError, NotPreparedError
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.batching.portion_stream import PortionFacts
from megatrain_ray.io.files.owned_folder import FolderKind, OwnedFolder
from megatrain_ray.io.tokens.token_files import IGNORED
from tests.support.tiny import TEXT, VOCAB_SIZE

NUM_FILES = 6
LIMIT = 26_000  # of about four portions of 3,300 bytes, of which tokens take twice as many
TEXTS = [TEXT.read_text()[at : at + 300] for at in range(0, 18_000, 300)]


class Inline:
    """Makes portions in this process, when the outcome is asked for, in place of PortionProcess."""

    most_bytes = 0  # that were ever on disk
    made_portions: tuple[str, ...] = ()

    def __init__(self, spec: StreamSpec) -> None:
        self._folder = StreamFolder(spec)

    def begin(self, portion: PortionId) -> None:
        self._portion = portion

    def made(self) -> tuple[PortionFacts | None, MegatrainError | None]:
        Inline.made_portions += (f"{self._portion.source}.{self._portion.number}",)
        try:
            return make_portion(self._folder, self._portion, print, self._measure, ()), None
        except MegatrainError as error:
            return None, error
        finally:
            self._measure()

    def _measure(self, *_: int) -> None:
        Inline.most_bytes = max(Inline.most_bytes, bytes_below(self._folder.spec.folder))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portion_supply, "PortionProcess", Inline)
    monkeypatch.setattr(Inline, "most_bytes", 0)
    monkeypatch.setattr(Inline, "made_portions", ())


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(**settings(write_files(tmp_path / "files")))


def write_files(folder: Path) -> str:
    """Write NUM_FILES files of ten texts each, and return their glob."""
    folder.mkdir()
    for number in range(NUM_FILES):
        lines = (json.dumps({"text": text}) + "\n" for text in TEXTS[10 * number : 10 * number + 10])
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return str(folder / "*.jsonl")


def settings(path: Any, **changes: Any) -> dict[str, Any]:
    return {"path": path, "tokenizer": "bytes", "seq_len": 32, "stream": LIMIT, "stream_portion": 1, **changes}


def opened(data: DataConfig, run: Path, position: Mapping[str, Any] | None = None) -> StreamedTokens:
    return open_streams(data, "bytes", VOCAB_SIZE, run, position)


def worker(data: DataConfig, spec: StreamSpec, step: int = 0, position: Mapping[str, Any] | None = None) -> DataWorker:
    return DataWorker(data, (), VOCAB_SIZE, 4, step, position, streamed=spec)


def batches(ours: DataWorker, steps: range) -> list[list[list[int]]]:
    """Return the ids of the batches of steps, each asked for until it is there."""
    return [_batch(ours, step).input_ids.tolist() for step in steps]


def _batch(ours: DataWorker, step: int) -> Batch:
    for _ in range(20):
        with suppress(NotPreparedError):
            return ours.batch(step)
    raise AssertionError(f"the batch of step {step} is not there after 20 questions")


def test_batches_are_the_same_whatever_is_on_disk_and_from_any_position(data: DataConfig, tmp_path: Path) -> None:
    """Two epochs of 546 windows, in steps of 4."""
    spec = opened(data, tmp_path / "small").spec
    ours = worker(data, spec)
    expected = batches(ours, range(1, 274))
    assert Inline.most_bytes <= LIMIT, "more bytes on disk than data.stream"
    assert len(Inline.made_portions) >= 2 * NUM_FILES - 5, "old ones are deleted, and made again in the second epoch"
    assert len({json.dumps(batch) for batch in expected}) == 273

    Inline.made_portions = ()
    large = data.model_copy(update={"stream": 10 * LIMIT})
    assert batches(worker(large, opened(large, tmp_path / "large").spec), range(1, 274)) == expected
    assert len(Inline.made_portions) == NUM_FILES - 1, "each once: all have room, and the first one was there"

    for step in (1, 22, 23, 100, 137):
        position = json.loads(json.dumps(ours.position_after(step)))
        Inline.made_portions = ()
        resumed = opened(data, tmp_path / f"resumed_{step}", position)  # where nothing is on disk
        assert len(list(resumed.spec.folder.glob("source_*"))) == 1, "the current portion only"
        theirs = worker(data, resumed.spec, step, position)
        assert batches(theirs, range(step + 1, step + 40)) == expected[step : step + 39]
        assert theirs.position_after(step + 39) == ours.position_after(step + 39)
    # Another data process of the attempt skips over portions that are not on disk any more.
    assert batches(worker(data, spec), range(270, 274)) == expected[269:]
    assert batches(ours, range(100, 104)) == expected[99:103], "one that makes steps once more"


def test_a_batch_may_need_more_portions_than_two_and_a_portion_all_the_room(data: DataConfig, tmp_path: Path) -> None:
    small = data.model_copy(update={"path": [f"{tmp_path}/files/0.jsonl"], "stream": 20_000})
    ours = DataWorker(small, (), VOCAB_SIZE, 300, 0, None, streamed=opened(small, tmp_path / "small").spec)
    assert len(_batch(ours, 1).input_ids) == 300, "three epochs and more of one portion"
    # Tokens per byte of the first file say little of those of the second, which does not fit beside the first.
    lines = [{"text": TEXTS[0] * 6, "ignored": "x" * 2200}, {"text": TEXTS[1] * 14}]
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(line) + "\n")
    tight = DataConfig(**settings(f"{tmp_path}/*.jsonl", stream=12_000, shuffle=False))
    batches(worker(tight, opened(tight, tmp_path / "tight").spec), range(1, 100))
    assert Inline.most_bytes <= 12_000


def test_a_failure_of_one_source_keeps_none_of_another_away(data: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    for number in range(2):
        (tmp_path / "others" / f"{number}.jsonl").write_text(json.dumps({"text": TEXTS[number] * 20}) + "\n")
    path = [{"path": f"{tmp_path}/others", "weight": 1}, {"path": data.path, "weight": 3}]
    mixed = DataConfig(**settings(path, stream=10 * LIMIT))
    ours = worker(mixed, opened(mixed, tmp_path / "run").spec)
    for file in (tmp_path / "others").iterdir():
        file.write_text("")
    batches(ours, range(1, 150))
    with pytest.raises(MegatrainError, match=r"others/.\.jsonl has changed"):
        for step in range(150, 250):
            ours.prepared(step - 1)
            _batch(ours, step)


def test_a_mixture_of_streams_goes_on_and_stays_within_the_limit(data: DataConfig, tmp_path: Path) -> None:
    """One source is so small that it is one portion, which stays."""
    few = tmp_path / "few.txt"
    few.write_text("".join(TEXTS[:2]))
    path = [
        {"path": data.path, "weight": 3},
        {"path": str(few), "weight": 1},
        {"path": f"{tmp_path}/files/1*", "weight": 1},
    ]
    mixed = DataConfig(**settings(path, stream=40_000))
    ours = worker(mixed, opened(mixed, tmp_path / "run").spec)
    expected = batches(ours, range(1, 150))
    assert Inline.most_bytes <= 40_000
    assert "1.0" not in Inline.made_portions
    position = json.loads(json.dumps(ours.position_after(80)))
    theirs = worker(mixed, opened(mixed, tmp_path / "other", position).spec, 80, position)
    assert batches(theirs, range(81, 150)) == expected[80:]
    mixed = DataConfig(**settings(path[1::-1]))
    ours = worker(mixed, opened(mixed, tmp_path / "full").spec)
    batches(ours, range(1, 120))
    assert all(path.exists() for path in opened(mixed, tmp_path / "full").folders), "the oldest portion is needed"


def test_chats_are_streamed_and_records_of_any_portion_may_have_weights(tmp_path: Path) -> None:
    for number, weight in enumerate((1, 2, 0.5)):
        turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes", "weight": weight}]
        (tmp_path / f"{number}.jsonl").write_text(8 * (json.dumps({"messages": turns}) + "\n"))
    sft = DataConfig(**settings(str(tmp_path / "*.jsonl"), kind="sft", seq_len=128, packing=False))
    ours, seen = worker(sft, opened(sft, tmp_path / "run").spec), set()
    for step in range(1, 7):
        batch = _batch(ours, step)
        assert batch.loss_weights is not None
        seen |= set(batch.loss_weights[batch.targets != IGNORED].tolist())
    assert seen == {0.5, 1.0, 2.0}


def test_steps_are_prepared_ahead_and_a_failure_counts_only_when_there_is_nothing_left(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A portion has 22 steps and three windows."""
    now_s = 0.0
    monkeypatch.setattr(portion_supply.time, "monotonic", lambda: now_s)
    spec = opened(data, tmp_path / "run").spec
    ours = worker(data, spec)
    assert ours.prepared(0) == 8
    batches(ours, range(1, 20))
    assert ours.prepared(19) == 27, "the next portion is there"
    for file in (tmp_path / "files").glob("*.jsonl"):
        file.write_text("")
    batches(ours, range(20, 46))
    assert len(Inline.made_portions) == 2, "the one after it failed once, and is not tried again at once"
    assert ours.prepared(44) == 45
    with pytest.raises(NotPreparedError):
        ours.batch(46)
    now_s = AGAIN_S
    for _ in range(2):
        with pytest.raises(MegatrainError, match=r"jsonl has changed since .* \d+ bytes then, 0 bytes now"):
            ours.prepared(45)
    assert len(Inline.made_portions) == 2
    assert ours.position_after(45)["num_drawn"] == 180, "the run saves before it ends"
    theirs = worker(data, spec, 40, ours.position_after(40))
    assert theirs.prepared(40) == 45
    now_s += AGAIN_S
    batches(theirs, range(41, 44))
    assert len(Inline.made_portions) == 3
    now_s += AGAIN_S
    batches(theirs, range(44, 46))
    assert len(Inline.made_portions) == 4, "tried again while there is something to draw"


def test_a_process_that_dies_is_replaced(data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = worker(data, opened(data, tmp_path / "run").spec)
    with monkeypatch.context() as patch:
        patch.setattr(Inline, "made", dead)
        batches(ours, range(1, 23))
        with pytest.raises(MegatrainError, match=r"the process that prepares data died \(exit code None\)"):
            ours.prepared(22)
    theirs = worker(data, opened(data, tmp_path / "run").spec)
    assert len(batches(theirs, range(1, 30))) == 29


def dead(process: Inline) -> None:
    raise EOFError


def test_a_portion_with_nothing_to_learn_is_passed_over_and_a_bad_record_is_an_error(
    data: DataConfig, tmp_path: Path
) -> None:
    for number in (0, 2):
        (tmp_path / "files" / f"{number}.jsonl").write_text('{"text": ""}\n')
    in_order = data.model_copy(update={"shuffle": False})
    spec = opened(in_order, tmp_path / "run").spec
    ours = worker(in_order, spec)
    assert len({json.dumps(batch) for batch in batches(ours, range(1, 92))}) == 91, "an epoch of 364 windows"
    assert ours.position_after(91)["epoch"] == 1
    (tmp_path / "files" / "4.jsonl").write_text('{"text": "a b"}\n{"no": 1}\n')
    with pytest.raises(ConfigError, match=r"4\.jsonl, line 2: no key 'text'"):
        opened(in_order.model_copy(update={"path": str(tmp_path / "files" / "4.jsonl")}), tmp_path / "bad")


def test_what_does_not_fit_is_said_before_the_run(data: DataConfig, tmp_path: Path) -> None:
    little = data.model_copy(update={"stream": 12_000})
    with pytest.raises(
        CapacityError, match=r"data\.stream: 11\.72 KiB are too little: .* set data\.stream to 1[4-9]\.\d+ KiB"
    ):
        opened(little, tmp_path / "run")
    with pytest.raises(CapacityError, match=r"data\.stream: 1\.95 KiB hold no further portion: "):
        opened(data.model_copy(update={"stream": 2000}), tmp_path / "less")
    with pytest.raises(CapacityError, match=r"no room for the portions of data\.stream in "):
        opened(data.model_copy(update={"stream": 1 << 60}), tmp_path / "more")


def test_only_what_a_stream_made_is_deleted(
    data: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (run / "stream").mkdir(parents=True)
    (run / "stream" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="stream is there, and no stream made it: move it away"):
        opened(data, run)
    assert (run / "stream" / "mine.txt").read_text() == "mine"
    (run / "stream" / "mine.txt").unlink()
    (tmp_path / "files" / "mine.pdf").touch()
    folder = opened(data.model_copy(update={"path": str(tmp_path / "files")}), run).spec.folder
    assert "files of other formats are not read: mine.pdf" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(ConfigError, match="copy/stream is not deleted: it is a copy of what this program made"):
        opened(data, tmp_path / "copy")
    whole = {path.name: path.stat().st_ino for path in folder.glob("source_*")}
    # What a kill leaves: a portion whose facts were not noted, half a portion, and fetched files.
    for name in ("source_0_portion_5", ".source_0_portion_4.partial", "fetched"):
        OwnedFolder.make(folder / name, FolderKind.RUN_PART).release()
    opened(data, run)
    assert {path.name: path.stat().st_ino for path in folder.glob("source_*")} == whole, "found, and not made again"
    assert not list(folder.glob(".*"))
    batches(worker(data, opened(data, run).spec), range(1, 24))
    assert not (folder / "fetched").exists()
    (damaged,) = (folder / name / "tokens.bin" for name in whole)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    opened(data, run)
    assert damaged.read_bytes()[-1:] != b"x", "it is made again"
    opened(data.model_copy(update={"bad_records": "skip"}), run)
    assert len(list(folder.glob("source_*"))) == 1, "with other settings all are made again"
    assert len(list((tmp_path / "files").iterdir())) == NUM_FILES + 1
