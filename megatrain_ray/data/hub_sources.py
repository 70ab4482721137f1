"""Fixes the commits of a run's data sets of the hub, and fetches sources of data that are no local paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.urls import is_url
from megatrain_ray.config.values import HubDataset, Source, WeightedPath, listed, weight_of
from megatrain_ray.console.logs import say
from megatrain_ray.data.data_sources import naming_held_out
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.files.cache_folder import cache_folder
from megatrain_ray.io.records.hub_datasets import cached_files, fetch, find_commit, short_form
from megatrain_ray.io.records.remote_sources import local_copy


def fix_commits(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the commit of each data set of the hub that has none yet, and print these.

    Raises ConfigError as find_commit.
    """
    update = {}
    keys = ["path", "eval_path"] if config.evaluates else ["path"]
    for key in keys:
        sources = getattr(config.data, key)
        if sources is not None:
            with naming_held_out((config.data.held_out if key == "eval_path" else None) or config.data):
                found = tuple(map(_with_commit, listed(sources)))
            update[key] = sources if found == listed(sources) else found
    return config.model_copy(update={"data": config.data.model_copy(update=update)})


def local_paths(sources: Iterable[Source], *, may_fetch: bool = True) -> list[str]:
    """Return the paths of sources, after fetching the files of URLs and of data sets of the hub.

    may_fetch: whether files may be fetched; if not, these sources are left out.

    Raises ConfigError as find_commit and fetch, and as local_copy, which also raises CapacityError and DiskError.
    """
    paths: list[str] = []
    for source in map(_as_dataset, sources):
        if isinstance(source, HubDataset):
            paths += map(str, fetch(find_commit(source))) if may_fetch else ()
            continue
        path = source if isinstance(source, str) else source.path
        if not is_url(path):
            paths.append(path)
        elif may_fetch:
            paths.append(local_copy(path, _copies(), say))
    return paths


def named_sources(sources: Iterable[Source]) -> list[str | HubDataset]:
    """Return sources as paths, URLs, and data sets of the hub with their commits. Raises ConfigError as find_commit."""
    return [
        find_commit(source) if isinstance(source, HubDataset) else source if isinstance(source, str) else source.path
        for source in map(_as_dataset, sources)
    ]


def _copies() -> Path:
    """Return the folder of copies of files in object stores. Raises ConfigError for a user without a home."""
    try:
        return cache_folder() / "sources"
    except RuntimeError as error:
        raise ConfigError(f"data.path: there is no cache to fetch files into ({error}); set XDG_CACHE_HOME") from None


def _with_commit(source: Source) -> Source:
    named = _as_dataset(source)
    if not isinstance(named, HubDataset) or named.commit is not None:
        return named
    found = find_commit(named)
    say(f"{found}: commit {found.commit} on the hub, which a run that begins now goes on reading")
    if files := cached_files(found):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        say(
            f"warning: the hub cannot be reached: of {found} its cache has {files[0]}{more}, and does not say whether "
            f"that is all; if not, run `hf download --repo-type dataset {found.hub}` with a network"
        )
    return found


def _as_dataset(source: Source) -> Source:
    """Return the data set of the hub that a source means by its id; any other source as it is."""
    if isinstance(source, HubDataset):
        return source
    path = source.path if isinstance(source, WeightedPath) else source
    named = short_form(path)
    return source if named is None else named.model_copy(update={"weight": weight_of(source)})
