"""Implements `megatrain data`: shows records as the model sees them, and counts what the data hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from megatrain_ray.config.data_groups import DataConfig, HeldOutConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import show
from megatrain_ray.console.startup import spinner
from megatrain_ray.data.data_sources import naming_held_out, open_windows, sources_of
from megatrain_ray.data.hub_sources import fix_commits
from megatrain_ray.data.marks_and_template import describe_template
from megatrain_ray.data.open_streams import open_streams
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.errors import ConfigError
from megatrain_ray.escapes import escaped
from megatrain_ray.io.batching.corpus import Corpus
from megatrain_ray.io.batching.windows import SpanWindows, Windows
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.io.tokens.image_files import IMAGE
from megatrain_ray.io.tokens.token_files import ADVANTAGE, TokenArray, read_meta
from megatrain_ray.io.tokens.tokenizer import Tokenizer, load_tokenizer
from megatrain_ray.model.open_model import read_model
from megatrain_ray.model.positions import check_length
from megatrain_ray.model.vision_tower import check_images
from megatrain_ray.run.run_files import RunFiles
from megatrain_ray.units import format_bytes, format_quantity

LEARNED_STYLE = "bold green"
OPEN, CLOSE = "«", "»"  # around what is learned, where there are no colours
MOST_TOKENS = 400  # of a record that are shown at its start, and half as many at its end
NUM_BARS = 8
BAR_WIDTH = 40


def show_data(config: TrainConfig) -> None:
    """Print three records, then totals of the training and the held-out data. Makes tokens as a run would.

    A run that has begun is shown with the commits of its data sets. Raises ConfigError for what is wrong with the data.
    """
    files = RunFiles(Path(config.run_dir).absolute())
    earlier = files.read_config() if files.holds_run and files.has_begun else None
    config = fix_commits(config.resolve(earlier))
    with spinner("reading the model's configuration"):
        source = read_model(config.model)
        vocab_size, num_positions = source.setting("vocab_size"), source.num_positions
    check_length(config.data, num_positions)
    check_images(config.data, source, config.train.vision)
    with scratch_folder("data") as folder:  # used only if the machine has no token cache
        opened = [_open(config.data, config.tokenizer, vocab_size, folder)]
        if (held_out := config.data.held_out) is not None:
            with naming_held_out(held_out):
                opened.append(_open(held_out, config.tokenizer, vocab_size, folder))
        _show_records(config, opened[0].windows, vocab_size)
        for part in opened:
            for line in _totals(part, config, num_positions):
                show(line)


class OpenedData(NamedTuple):
    """Holds the tokens of training or held-out data: windows and token folder of each source.

    share: of all files that the tokens are made of; less than 1 for a stream.
    """

    data: DataConfig
    windows: list[Windows]
    folders: tuple[Path, ...]
    share: float = 1.0


def _open(data: DataConfig, tokenizer: str, vocab_size: int, folder: Path) -> OpenedData:
    # The totals say what became of the records, so that nothing is printed twice.
    share, whole = 1.0, isinstance(data, HeldOutConfig)
    if data.stream is None:
        folders = tokenize(data, tokenizer, vocab_size, folder, reports=False)
    else:
        _, folders, share = open_streams(data, tokenizer, vocab_size, folder, None, starts_run=False)
        show(f"stream    of each source the portion is shown that a run begins with: {share:.2g} of all files")
    return OpenedData(data, open_windows(data, folders, vocab_size, whole=whole), folders, share)


# --- records ---


def _show_records(config: TrainConfig, sources: Sequence[Windows], vocab_size: int) -> None:
    corpora = [source.corpus for source in sources]
    tokenizer = _tokenizer(config)
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and not console.no_color
    has_two = config.data.in_pairs or config.data.is_labelled
    chosen = _both_documents(corpora) if has_two else _chosen(corpora)
    for corpus, number in chosen:
        start = int(corpus.document_lengths[:number].sum())
        part = slice(start, start + int(corpus.document_lengths[number]))
        ids, weights = corpus.tokens[part], _weights(corpus, part)
        name = _name(config.data, corpus, number, is_good=bool((weights > 0).any()))
        learned = "" if corpus.loss_weights is None else f", {int((weights[1:] != 0).sum())} learned"
        learned += _rewarded(corpus, part)
        where = f" of {corpus.name}" if len(corpora) > 1 else ""
        show(f"── {name}{where}: {ids.size} tokens{learned} ──")
        kept, counts = _without_repeats(corpus, part)
        console.print(_rendered(tokenizer, ids[kept], np.abs(weights)[kept], counts, has_colours=has_colours))
        show("")
    if any(corpus.loss_weights is not None for corpus in corpora):
        show(f"learned   {'green and bold text' if has_colours else f'what stands between {OPEN} and {CLOSE}'}")
    if config.data.has_chats:
        for line in describe_template(config.data, config.tokenizer, vocab_size):
            show(line)


def _without_repeats(corpus: Corpus, part: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the tokens of a document, one for each image, and how many tokens each stands for."""
    own = np.asarray(corpus.columns[IMAGE][part] if IMAGE in corpus.columns else np.zeros(part.stop - part.start))
    kept = np.flatnonzero(np.append(True, (own[1:] == 0) | (own[1:] != own[:-1])))
    return kept, np.diff(np.append(kept, own.size))


def _rewarded(corpus: Corpus, part: slice) -> str:
    """Return the reward and the largest advantage of a rollout, each after a comma; nothing for other documents."""
    if ADVANTAGE not in corpus.columns:
        return ""
    reward, *advantages = corpus.columns[ADVANTAGE][part].tolist()
    return f", reward {reward:.3g}, advantage {max(advantages, key=abs):.3g}"


def _name(data: DataConfig, corpus: Corpus, number: int, *, is_good: bool) -> str:
    """Return what a document is called. is_good: of a labelled answer; of a mismatched one, whether there is one."""
    record = f"{number // 2 + 1} of {corpus.num_documents // 2}"
    if data.in_pairs:
        return f"pair {record}, {('chosen', 'rejected')[number % 2]}"
    if data.is_labelled:
        names = ("without one to another prompt", "mismatched") if number % 2 else ("bad", "good")
        return f"answer {record}, {names[is_good]}"
    return f"{'text' if corpus.loss_weights is None else 'sequence'} {number + 1} of {corpus.num_documents}"


def _both_documents(corpora: Sequence[Corpus]) -> Iterator[tuple[Corpus, int]]:
    """Yield both documents of the records that the chosen documents belong to."""
    for corpus, record in dict.fromkeys((corpus, number // 2) for corpus, number in _chosen(corpora)):
        yield from ((corpus, 2 * record), (corpus, 2 * record + 1))


def _chosen(corpora: Sequence[Corpus]) -> Iterator[tuple[Corpus, int]]:
    """Yield three documents: the first of each of three sources, or the first, middle and longest of one."""
    if len(corpora) >= 3:
        yield from ((corpus, 0) for corpus in corpora[:3] if corpus.num_documents)
        return
    for corpus in corpora:
        longest = int(np.argmax(corpus.document_lengths)) if corpus.num_documents else 0
        wanted = (0, corpus.num_documents // 2, longest) if len(corpora) == 1 else (0, longest)
        yield from ((corpus, number) for number in dict.fromkeys(wanted) if number < corpus.num_documents)


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    """Return the tokenizer; None if records hold ids and there is none, so that ids are shown."""
    try:
        return load_tokenizer(config.tokenizer)
    except ConfigError:
        if config.data.kind == "tokens":
            return None
        raise


def _weights(corpus: Corpus, part: slice) -> NDArray[Any]:
    """Return the loss weights of tokens; that of a document's first token, which is never a target, is 0."""
    size = part.stop - part.start
    weights = np.ones(size) if corpus.loss_weights is None else corpus.loss_weights[part].astype(np.float64)
    if corpus.loss_weights is not None:
        weights[:1] = 0
    return weights


def _rendered(
    tokenizer: Tokenizer | None, ids: TokenArray, weights: NDArray[Any], counts: NDArray[np.int64], *, has_colours: bool
) -> Text:
    """Return the text of a document, what is learned marked, with its middle left out if it is long.

    counts: how many equal tokens each stands for.
    """
    text = Text()
    everywhere = bool((weights == 1).all())
    if ids.size <= 2 * MOST_TOKENS:
        parts = [slice(0, ids.size)]
    else:
        parts = [slice(0, MOST_TOKENS), slice(ids.size - MOST_TOKENS // 2, ids.size)]
    for number, part in enumerate(parts):
        if number:
            text.append(f"\n[… {part.start - parts[0].stop} tokens …]\n", "dim")
        for run, weight in _runs(tokenizer, ids[part], weights[part], counts[part]):
            if weight == 0 or everywhere:
                text.append(run)
                continue
            factor = "" if weight == 1 else f"×{weight:g} "
            if has_colours:
                text.append(factor, "dim").append(run, LEARNED_STYLE)
            else:
                text.append(f"{OPEN}{factor}{run}{CLOSE}")
    return text


def _runs(
    tokenizer: Tokenizer | None, ids: TokenArray, weights: NDArray[Any], counts: NDArray[np.int64]
) -> Iterator[tuple[str, float]]:
    """Yield the text of each run of tokens of one weight, with that weight. `counts`: as for _rendered."""
    differs = (weights[1:] != weights[:-1]) | (counts[1:] != 1) | (counts[:-1] != 1)
    ends = [*(np.flatnonzero(differs) + 1).tolist(), ids.size]
    start, before = 0, ""
    for end in ends:
        if tokenizer is None:
            yield " ".join(map(str, ids[start:end].tolist())) + " ", float(weights[start])
        else:
            # Decoded from the start: some decoders treat a first blank as their own.
            whole = tokenizer.decode(ids[:end])
            piece = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids[start:end])
            times = f" × {counts[start]}" if counts[start] > 1 else ""
            yield escaped(piece, keep="\n") + times, float(weights[start])
            before = whole
        start = end


# --- totals ---


def _totals(part: OpenedData, config: TrainConfig, num_positions: int | None) -> Iterator[str]:
    names, rollouts = list(sources_of(part.data)), config.train.rollouts
    answer_tokens = rollouts.max_new_tokens if rollouts else None
    for name, windows, folder in zip(names, part.windows, part.folders, strict=True):
        yield name if name.startswith(part.data.key) else f"{part.data.key}: {name}"
        corpus, seq_len = windows.corpus, part.data.seq_len
        lines = [*_records(folder, windows, seq_len, num_positions, answer_tokens), *_lengths(corpus)]
        yield from (f"  {line}" for line in (*lines, *(() if rollouts else _rows(windows, seq_len))))
    if not isinstance(part.data, HeldOutConfig):
        num_rows = sum(windows.num_windows for windows in part.windows) * (rollouts.group_size if rollouts else 1)
        num_rows = round(num_rows / part.share)
        batch_size = config.num_step_rows
        row = "answer" if rollouts else "row"
        num_steps = num_rows / batch_size
        steps = f"{num_steps:{'.3g' if num_steps < 1000 else '.0f'}} steps of {format_quantity(batch_size, row)}"
        about = "" if part.share == 1 else "about "
        yield f"an epoch is {about}{format_quantity(num_rows, row)}, {steps}"


def _records(
    folder: Path, windows: Windows, seq_len: int, num_positions: int | None, answer_tokens: int | None
) -> Iterator[str]:
    """Yield what became of the records: the lines of the tally, or the counts of texts.

    answer_tokens: most tokens of the answer that a run samples to each; None: it samples none.
    """
    meta = read_meta(folder)
    assert meta is not None  # it was just opened
    yield from meta.report
    needed = meta.longest - 1 if answer_tokens is None else meta.longest + answer_tokens
    if needed > seq_len:
        too_long = num_positions is not None and needed > num_positions
        limit = f", and the model has {num_positions} positions: divide it" if too_long else ""
        answered = "" if answer_tokens is None else " with an answer, and training refuses longer ones"
        yield f"data.seq_len={needed} would hold the longest record{answered}{limit}"
    if not meta.report:
        skipped = [(meta.num_empty, "empty"), (meta.num_bad, "bad")]
        more = "".join(f", {count} {what} ones skipped" for count, what in skipped if count)
        yield f"{format_quantity(meta.num_documents, 'text')}, {meta.num_tokens} tokens{more}"
        yield from (f"  {place}" for place in meta.places)
    if meta.num_images:
        yield f"{format_quantity(meta.num_images, 'image')}, {format_bytes(meta.image_bytes)}; equal ones count once"
    corpus = windows.corpus
    if windows.labelled and corpus.loss_weights is not None:
        firsts = np.cumsum([0, *corpus.document_lengths[:-1]])
        is_good = np.logical_or.reduceat(np.asarray(corpus.loss_weights) > 0, firsts)[::2]  # the others: mismatched
        yield f"{int(is_good.sum())} answers are labelled good, {int((~is_good).sum())} bad"
    if corpus.weighted and corpus.loss_weights is not None and not windows.documents_per_record:
        weights = np.asarray(corpus.loss_weights)
        learned = weights[weights != 0]
        yield (
            f"weights {learned.min():g} to {learned.max():g}, {int((learned != 1).sum())} tokens of another weight "
            "than 1"
        )


def _lengths(corpus: Corpus) -> Iterator[str]:
    """Yield a histogram of the lengths of documents, in tokens, by powers of two."""
    lengths = np.asarray(corpus.document_lengths)
    top = int(lengths.max()).bit_length()
    low = max(int(lengths.min()).bit_length() - 1, top - NUM_BARS, 0)
    edges = [0, *(1 << power for power in range(low + 1, top + 1))]
    counts, _ = np.histogram(lengths, edges)
    yield f"tokens each: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}"
    width = len(str(edges[-1]))
    for count, first, after in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        bar = "█" * -(-BAR_WIDTH * count // int(counts.max()))
        yield f"  {max(first, int(lengths.min())):>{width}}–{min(after - 1, int(lengths.max())):<{width}} {bar} {count}"


def _rows(windows: Windows, seq_len: int) -> Iterator[str]:
    room = windows.num_windows * (seq_len + 1) * (2 if windows.labelled else 1)
    used = int(windows.lengths.sum()) if isinstance(windows, SpanWindows) else min(room, windows.num_places)
    yield f"{format_quantity(windows.num_windows, 'row')} of {seq_len} inputs, {used / room:.0%} filled"
    left = windows.corpus.tokens.size - used
    if isinstance(windows, SpanWindows) and left > 0:
        yield f"{left} tokens are in no row: short ends of texts"
