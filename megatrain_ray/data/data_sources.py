"""Names the sources of the data, and opens the windows of each from its folder of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.values import Source, WeightedPath, listed, weight_of
from megatrain_ray.errors import ConfigError, NothingToLearnError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.io.batching.windows import SpanWindows, Windows, cut
from megatrain_ray.io.tokens.logprob_files import open_logprobs
from megatrain_ray.io.tokens.token_files import read_meta


def sources_of(data: DataConfig) -> dict[str, tuple[Source, ...]]:
    """Return what data.path, or data.eval_path, holds for each source, by its name in messages.

    Without weights there is one.
    """
    parts = listed(data.path)
    names = [part.path if isinstance(part, WeightedPath) else str(part) for part in parts]
    if data.hash_range[1] < 1:
        names = [f"{name} (held out)" for name in names]
    if weights_of(data):
        return {f"{data.key}[{k}], {name}": (part,) for k, (name, part) in enumerate(zip(names, parts, strict=True))}
    return {", ".join(names): parts}


def weights_of(data: DataConfig) -> list[float]:
    """Return the weight of each source; none if data.path is one source."""
    return [weight for source in listed(data.path) if (weight := weight_of(source)) is not None]


@contextmanager
def naming_held_out(data: DataConfig) -> Iterator[None]:
    """Rename data.path and data.dataset in a ConfigError of the block to the keys that `data` are given by."""
    try:
        yield
    except ConfigError as error:
        is_share = data.key == "data.path"  # the files are named there; that nothing is left is due to the share
        if is_share and not isinstance(error, NothingToLearnError):
            raise
        key = "data.eval_fraction" if is_share else r"data.eval_\1"
        raise ConfigError(*(re.sub(r"\bdata\.(path|dataset)\b", key, line) for line in error.args)) from None


def open_windows(
    data: DataConfig, tokens: Sequence[Path], vocab_size: int, logprobs: Sequence[Path] = (), *, whole: bool
) -> list[Windows]:
    """Open the windows of each source from its folder of tokens.

    logprobs: a folder of each source with log-probabilities of a reference; none if there is no reference.
    whole: as for `cut`.

    Images are numbered over all sources. Raises ConfigError as open_corpus, open_logprobs and cut.
    """
    sources = sources_of(data)
    named = zip(sources, tokens, strict=True)
    windows = numbered([cut_source(data, name, folder, vocab_size, whole=whole) for name, folder in named], tokens)
    if not logprobs:
        return windows
    return [
        replace(source, logprobs=open_logprobs(name, folder, source.num_places))
        for name, folder, source in zip(sources, logprobs, windows, strict=True)
    ]


def numbered(sources: list[Windows], tokens: Sequence[Path]) -> list[Windows]:
    """Return the windows of several sources with their images numbered over all of them."""
    counts = (meta.num_images if (meta := read_meta(folder)) else 0 for folder in tokens)
    firsts = accumulate(counts, initial=0)
    return [
        replace(windows, first_image=first) if isinstance(windows, SpanWindows) else windows
        for windows, first in zip(sources, firsts, strict=False)
    ]


def cut_source(data: DataConfig, name: str, tokens: Path, vocab_size: int, *, whole: bool) -> Windows:
    """Open the windows of one source. Raises ConfigError as open_corpus and cut."""
    return cut(
        open_corpus(name, tokens, vocab_size),
        seq_len=data.seq_len,
        packing=data.joins_documents,
        vocab_size=vocab_size,
        whole=whole,
        documents_per_record=data.documents_per_record,
        labelled=data.is_labelled,
    )


def cut_for_pass(data: DataConfig, name: str, tokens: Path, vocab_size: int, *, mismatched: bool) -> Windows:
    """Open all windows of one source. Raises ConfigError as cut_source.

    mismatched: include the windows of mismatched answers, after all others.
    """
    windows = cut_source(data, name, tokens, vocab_size, whole=True)
    if not isinstance(windows, SpanWindows) or not windows.labelled:
        return windows
    firsts = windows.firsts if mismatched else windows.firsts[: windows.num_windows + 1]
    return replace(windows, labelled=False, firsts=firsts)
