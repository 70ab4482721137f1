"""Finds the log-probabilities of a model in the cache beside the tokens, or has them made by a pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import spinner
from megatrain_ray.data.data_sources import cut_for_pass, sources_of
from megatrain_ray.data.data_worker import HeldOutData, PassData
from megatrain_ray.data.marks_and_template import ALL_IDS
from megatrain_ray.data.tokenize_data import writable_cache
from megatrain_ray.driver.run_context import DataTokens
from megatrain_ray.engine.objectives.distillation import TopTokens
from megatrain_ray.errors import MegatrainError
from megatrain_ray.io.batching.batch_stream import HeldOut
from megatrain_ray.io.files.disk_errors import check_room, explained
from megatrain_ray.io.tokens.cache_pruning import held, mark_used
from megatrain_ray.io.tokens.logprob_files import LogprobWriter, begin_logprobs, begun_logprobs, holds_logprobs
from megatrain_ray.io.tokens.teacher_files import RecordSize
from megatrain_ray.io.tokens.token_cache import key_of, locked_folder, new_folder
from megatrain_ray.io.tokens.token_files import derived_provenance, read_meta
from megatrain_ray.units import format_count, format_duration
from megatrain_ray.workers.messages import HeldOutLoss

STALL_S = 3600.0  # without a batch after which a pass of another process counts as stuck: a large model loads for long


class ModelIdentity(NamedTuple):
    """Says by what a model's log-probabilities are found again: its settings, and the identities of its files."""

    settings: dict[str, Any]
    files: list[Any]


class LogprobFolders(NamedTuple):
    """Holds a folder of log-probabilities for each source of the training data, and of the held-out data."""

    training: tuple[Path, ...] = ()
    held_out: tuple[Path, ...] = ()


@dataclass(frozen=True)
class LogprobPass:
    """Holds the sources that a pass goes over, and the writers that take what it computes.

    data: tokens of all data, also of sources that the pass leaves out since the cache has their log-probabilities.
        Without held-out data they are those that are trained on.
    names: of all sources, by the folder of their tokens.
    mismatched: as for cut_for_pass.
    teacher: what is recorded of the model's predictions as well; None: nothing.
    writers: of the sources of the pass, in its order, by the folder of their tokens. What an earlier pass has written
        is left out.
    num_tokens: inputs that are no pads, by batch.
    num_rows: of each writer that are not written yet.
    """

    data: DataTokens
    names: Mapping[Path, str]
    mismatched: bool
    teacher: TopTokens | None = None
    writers: dict[Path, LogprobWriter] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)
    num_rows: list[int] = field(default_factory=list)

    @property
    def record(self) -> RecordSize | None:
        """Return the size of a teacher's records; None: there are none."""
        return RecordSize(self.teacher.num_ids, self.teacher.num_logprobs) if self.teacher else None

    def evaluated(self, held_out: HeldOutData) -> PassData:
        """Return the data of the pass, in batches like those of `held_out`."""
        tokens = tuple(self.writers)
        names = tuple(self.names[folder] for folder in tokens)
        starts = tuple(writer.written.num_rows for writer in self.writers.values())
        return PassData(
            **vars(held_out) | {"tokens": tokens, "names": names, "starts": starts, "mismatched": self.mismatched}
        )

    def keep(self, batches: HeldOut, index: int, loss: HeldOutLoss) -> None:
        """Write the log-probabilities of a batch. Raises MegatrainError as LogprobWriter.write."""
        assert loss.logprobs is not None
        writer = list(self.writers.values())[batches.source_of(index)]
        self.num_tokens[index] = loss.num_tokens
        writer.write(batches.rows_of(index), batches.places(index), loss.logprobs, loss.num_supervised)

    def describe(self, seconds: float) -> str:
        """Return how large and fast the pass was, as a line."""
        num_tokens = sum(self.num_tokens.values())
        speed = format_count(num_tokens / seconds)
        return f"log-probabilities: {format_count(num_tokens)} tokens in {format_duration(seconds)}, {speed} tokens/s"


class _Notes:
    """Says that a folder cannot be made at once."""

    def wait(self, folder: Path) -> None:
        say(f"waiting for another process that makes the log-probabilities in {folder}")

    def replace(self, folder: Path) -> None:
        say(f"the log-probabilities in {folder} are damaged: they are made again")


def find_or_make(
    config: TrainConfig, data: DataTokens, model: ModelIdentity, run_dir: Path, make: Callable[[LogprobPass], None],
    teacher: TopTokens | None = None,
) -> LogprobFolders:  # fmt: skip
    """Return the folders of a model's log-probabilities, made if they are missing.

    They lie where tokens are cached, or else in `run_dir`.

    data: tokens of all sources.
    make: runs the pass. If it fails or is interrupted, what it has written is kept, and the next call goes on there.
    teacher: as for LogprobPass.

    Raises ConfigError, CapacityError if a teacher's records have no room, MegatrainError if the disk fails, and what
    `make` raises.
    """
    mismatched = not config.data.is_labelled or config.train.estimates_kl
    settings = {
        "model": model.settings, "precision": config.train.precision, "seq_len": config.data.seq_len,
        "packing": config.data.packing, **({"compute": config.train.compute} if config.train.compute else {}),
        **({"teacher": asdict(teacher)} if teacher else {}), **({} if mismatched else {"mismatched": False}),
    }  # fmt: skip
    names = dict(_named(config, data))
    made_of = {tokens: derived_provenance(tokens, "tokens", settings, model.files) for tokens in names}
    beside = {tokens: tokens.with_name(key_of(provenance)) for tokens, provenance in made_of.items()}
    with spinner("checking log-probabilities"):  # the cache may be read-only
        found = {tokens: folder for tokens, folder in beside.items() if holds_logprobs(folder)}
    if missing := [tokens for tokens in names if tokens not in found]:
        evaluated = data.training if data.held_out is None else data.held_out  # a run of no steps needs some
        scored = LogprobPass(data._replace(held_out=evaluated), names, mismatched, teacher)
        with writable_cache(run_dir) as root:
            made = {tokens: root / key_of(made_of[tokens]) for tokens in missing}
            if scored.record is not None:
                _check_room(root, [tokens for tokens in missing if not made[tokens].exists()], scored.record)
            _make_all(config.data, scored, made, made_of, make)
        found |= made
    for folder in found.values():
        mark_used(folder)
    return LogprobFolders(
        tuple(found[tokens] for tokens in data.training), tuple(found[tokens] for tokens in data.held_out or ())
    )


def _make_all(
    data: DataConfig, scored: LogprobPass, made: Mapping[Path, Path], made_of: Mapping[Path, Mapping[str, Any]],
    make: Callable[[LogprobPass], None],
) -> None:  # fmt: skip
    """Fill folders with log-probabilities by a pass, unless other processes have made all of them meanwhile.

    made: each folder by its folder of tokens.
    made_of: what each is made of, by its folder of tokens.
    """
    with ExitStack() as stack:
        begun = [
            stack.enter_context(_begun(data, scored, tokens, made[tokens], made_of[tokens]))
            for tokens in sorted(made, key=made.__getitem__)  # in one order, whoever takes the locks
        ]
        if scored.writers:
            make(scored)
        metas = [writer.finish() for writer in filter(None, begun)]
        if scored.teacher is not None and metas:
            num_targets = max(1, sum(meta.num_targets for meta in metas))
            known = sum(meta.known * meta.num_targets for meta in metas) / num_targets
            say(f"the {scored.teacher.num_ids} likeliest tokens have {known:.2%} of the teacher's probability")


@contextmanager
def _begun(
    data: DataConfig, scored: LogprobPass, tokens: Path, folder: Path, provenance: Mapping[str, Any]
) -> Iterator[LogprobWriter | None]:
    """Yield the writer of a folder, which goes on where an earlier one stopped; None if the folder is whole.

    It is added to the pass unless all rows are written. Raises MegatrainError if the disk fails, or has no room.
    """
    with locked_folder(folder, folder, _Notes(), STALL_S):
        if holds_logprobs(folder):  # another process has just made it
            yield None
            return
        windows = cut_for_pass(data, name := scored.names[tokens], tokens, ALL_IDS, mismatched=scored.mismatched)
        if (writer := begun_logprobs(folder, windows.num_places, scored.record)) is None:
            with new_folder(folder, _Notes()) as partial:
                begin_logprobs(partial, provenance, windows.num_places, scored.record)
            with explained("read", folder):
                writer = LogprobWriter(folder, scored.record)
        if (done := writer.written.num_rows) < windows.num_windows:
            scored.writers[tokens] = writer
            scored.num_rows.append(windows.num_windows - done)
        if done:
            say(f"{name}: the log-probabilities of {done} of {windows.num_windows} rows are there already")
        mark_used(folder)
        with held([folder]):
            try:
                yield writer
            except BaseException:
                with suppress(MegatrainError):  # of what ended the pass
                    writer.sync()
                raise


def _check_room(root: Path, tokens: Sequence[Path], record: RecordSize) -> None:
    """Raise CapacityError unless the records of all targets of these folders of tokens fit on the disk of `root`."""
    metas = [meta for folder in tokens if (meta := read_meta(folder))]
    counts = (meta.num_tokens + meta.num_documents if (n := meta.num_supervised) is None else n for meta in metas)
    needed_bytes = sum(counts) * record.kind.itemsize
    check_room(
        root, needed_bytes, "the teacher's predictions",
        "set a lower train.distillation.top_k, or name a folder on another disk in XDG_CACHE_HOME",
    )  # fmt: skip


def _named(config: TrainConfig, data: DataTokens) -> Iterator[tuple[Path, str]]:
    """Yield the tokens of each source, and its name."""
    yield from zip(data.training, sources_of(config.data), strict=True)
    held_out = config.data.held_out
    if held_out is not None and data.held_out is not None:
        yield from zip(data.held_out, sources_of(held_out), strict=True)
