"""Makes sequences from files of chats and preferences."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatrain_ray.io.chat.chat_template import ChatTemplate
from megatrain_ray.io.chat.conversation_formats import ChatLayout, Learn
from megatrain_ray.io.chat.encode_chats import ChatEncoder, EncodedRecord, RecordEncoder, Truncation, tallied
from megatrain_ray.io.chat.find_chats import ChatSource
from megatrain_ray.io.chat.preferences import PairLayout, UnpairedLayout, with_mismatched
from megatrain_ray.io.images.image_processor import ImageProcessor
from megatrain_ray.io.records.choose_records import ALL_RECORDS, RecordChoice, RecordChooser
from megatrain_ray.io.records.file_formats import ARROW, PARQUET, suffix_of
from megatrain_ray.io.records.process_map import map_in_order
from megatrain_ray.io.records.read_records import BadRecords, RecordTally, as_written, read_records
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.image_files import IMAGE as IMAGE_COLUMN
from megatrain_ray.io.tokens.token_files import LossWeights, TokenArray, TokenBlock
from megatrain_ray.io.tokens.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class ChatRecipe:
    """Makes sequences from chats. Each is a document of at most `seq_len` + 1 tokens.

    A preference makes two, the chosen one first, which have at most `seq_len` tokens together, so that all of these are
    inputs. In place of the loss weight of the chosen one's first token, which is never a target, it has the margin.

    A labelled answer makes two as well, the mismatched one second (preferences.py); the loss weights of a bad one are
    negative.

    halves: whether each sequence of a preference has half of seq_len instead, without what the other one leaves.
    processor: of the images that chats hold; None: they hold none.
    """

    sources: tuple[ChatSource, ...]
    tokenizer: str
    template: ChatTemplate
    truncation: Truncation
    seq_len: int
    bad_records: BadRecords
    num_processes: int = 1  # processes that tokenise; the sequences do not depend on it
    choice: RecordChoice = ALL_RECORDS
    learn: Learn = "all"  # answers of a conversation that are learned
    learn_reasoning: bool = True  # whether thoughts are
    halves: bool = False
    processor: ImageProcessor | None = None

    has_weights: ClassVar[bool] = True

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(source.file for source in self.sources)

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.processor is None else (IMAGE_COLUMN,)

    def settings(self) -> dict[str, Any]:
        return {
            "layouts": [_described(source.layout) for source in self.sources],
            **self.template.settings(),
            "truncation": self.truncation,
            "seq_len": self.seq_len,
            "bad_records": self.bad_records,
            **({"lists": lists} if any(lists := [source.images for source in self.sources]) else {}),
            **({"datasets": [source.dataset for source in self.sources]} if self.choice.max_records else {}),
            **load_tokenizer(self.tokenizer).extension,
            **self.choice.settings(),
            "learn": [self.learn, self.learn_reasoning],
            **({"halves": True} if self.halves else {}),
            "turns": True,  # are checked for what a template leaves out; an earlier release did not
            **({"margins": True} if any(isinstance(source.layout, PairLayout) for source in self.sources) else {}),
            **(self.processor.settings() if self.processor else {}),
            **({"nulls": False} if any(suffix_of(file) in (PARQUET, ARROW) for file in self.files) else {}),
        }

    def blocks(self, tokenizer: Tokenizer | None, tally: RecordTally) -> Generator[TokenBlock]:
        """Yield every sequence with something to learn, in the order of the files.

        Raises ConfigError as `tallied` and for a file that cannot be read, MegatrainError if a process dies.
        """
        assert tokenizer is not None
        encoder = ChatEncoder(tokenizer, self.template, learn_reasoning=self.learn_reasoning, processor=self.processor)
        layouts = [source.layout for source in self.sources]
        images = [(source.file.parent, source.images) for source in self.sources] if self.processor else None
        work = RecordEncoder(encoder, layouts, self.seq_len, self.truncation, self.learn, self.halves, images)
        with closing(map_in_order(work, self._numbered(), self.num_processes)) as records:
            yield from tallied(self._mismatched(records) if self.is_unpaired else records, tally)

    @property
    def is_unpaired(self) -> bool:
        """Return whether records are labelled answers, as then all are."""
        return all(isinstance(source.layout, UnpairedLayout) for source in self.sources)

    def _mismatched(
        self, records: Iterable[tuple[RecordLocation, EncodedRecord]]
    ) -> Iterator[tuple[RecordLocation, EncodedRecord]]:
        def sequence_of(item: tuple[RecordLocation, EncodedRecord]) -> tuple[TokenArray, LossWeights] | None:
            return next(((kept.ids, kept.loss_weights) for kept in item[1].kept), None)

        for (location, record), mismatched in with_mismatched(records, sequence_of, self.seq_len + 1):
            more = [] if mismatched is None else [record.kept[0].mismatched(*mismatched)]
            yield location, record._replace(kept=[*record.kept, *more])

    def _numbered(self) -> Iterator[tuple[RecordLocation, tuple[int, Any]]]:
        """Yield the records that are used, each with the number of its source."""
        chooser, dataset = RecordChooser(self.choice), None
        for number, source in enumerate(self.sources):
            if source.dataset != dataset:
                chooser.restart()
            dataset = source.dataset
            for location, record in chooser.of(read_records(source.file)):
                yield location, (number, as_written(location, record))
        chooser.check()


def _described(layout: ChatLayout | PairLayout | UnpairedLayout) -> list[Any]:
    """Return a layout as data for JSON. Sets are sorted, because their own order differs between processes."""
    if isinstance(layout, UnpairedLayout):
        return [type(layout).__name__, _described(layout.answer), layout.label]
    if isinstance(layout, PairLayout):
        return [type(layout).__name__, _described(layout.prompt), layout.chosen, layout.rejected]
    fields = {key: sorted(value) if isinstance(value, frozenset) else value for key, value in asdict(layout).items()}
    return [type(layout).__name__, fields]
