"""Finds the files of a data set on the Hugging Face hub and fetches them into huggingface_hub's own cache.

A data set is what its README.md describes (configurations with their files), else its data files by the split in their
names, else the Parquet files that the hub has converted it to. The datasets library chooses in the same way.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatrain_ray.config.values import HubDataset
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.hub import HUB_ID, explained
from megatrain_ray.io.files.atomic_file import write_atomically
from megatrain_ray.io.records.file_formats import suffix_of
from megatrain_ray.io.records.find_files import METADATA

CARD = "README.md"
CONVERTED = "refs/convert/parquet"  # branch of the hub's own conversion: CONFIGURATION/SPLIT/0000.parquet
CONVERTED_FILE = re.compile(r"(?P<name>[^/]+)/(?P<split>[^/]+)/\d+\.parquet")
SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[^./]*)?\..*")
UPLOADED = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}")
SPLIT_WORDS = {  # what a part of a path may call a split
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
TIMEOUT_S = 10.0
COMMIT = re.compile(r"[0-9a-f]{40}")

Splits = Mapping[str, Sequence[str]]  # files of each split


class Repository(NamedTuple):
    """Holds the names of the files that a repository has at a commit.

    is_cached: whether the names are those of the cache, which may have a part of them only.
    """

    commit: str
    names: tuple[str, ...]
    is_cached: bool


def short_form(source: str) -> HubDataset | None:
    """Return the data set that a path OWNER/NAME or OWNER/NAME@REVISION means; None if it means a local file."""
    match = HUB_ID.fullmatch(source)
    owner, _, rest = source.partition("/")
    if match is None or not rest or suffix_of(Path(source)) or Path(source).exists() or Path(owner).exists():
        return None
    return HubDataset(hub=match["repository"], revision=match["revision"])


def find_commit(source: HubDataset) -> HubDataset:
    """Return the data set with the commit to read: the newest of its revision, or the cached one without a network.

    Raises ConfigError if it is missing or not accessible, and if it has no such configuration, split or data files.
    """
    if source.commit is not None:
        return source
    problems = []
    for revision in ["main", CONVERTED] if source.revision is None else [source.revision]:
        try:
            repository = _repository(source.hub, revision)
        except ConfigError as error:
            problems.append(error)
            continue
        if _chosen(source, repository) is not None:
            return source.model_copy(update={"commit": repository.commit})
        problems.append(
            ConfigError(
                f"data.path: {source.hub}: holds no data files of a known format, and the hub has "
                "not converted it; download and convert it"
            )
        )
    raise problems[0]


def cached_files(source: HubDataset) -> tuple[str, ...]:
    """Return the names of the files that are read of a data set's cache without a network; none if the hub answers.

    The cache does not say whether the data set has more files.
    """
    assert source.commit is not None
    repository = _repository(source.hub, source.commit)
    return (_chosen(source, repository) or ()) if repository.is_cached else ()


def fetch(source: HubDataset) -> tuple[Path, ...]:
    """Return the files of a data set whose commit is known, after fetching those that the cache lacks.

    Raises ConfigError as find_commit, and if a file cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    paths = []
    for file in file_names(source):
        with explained("data.path", source.hub, file, "dataset"):
            path = hf_hub_download(source.hub, file, repo_type="dataset", revision=source.commit)
        paths.append(Path(path))
    return tuple(paths)


def file_names(source: HubDataset) -> tuple[str, ...]:
    """Return the names of the files of a data set whose commit is known, sorted. Raises ConfigError as find_commit."""
    assert source.commit is not None
    return _chosen(source, _repository(source.hub, source.commit)) or ()


@lru_cache(maxsize=64)  # a start asks several times
def _repository(hub: str, revision: str) -> Repository:
    """Return the files of a revision: as the hub has them, or if that fails as far as they are in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with explained("data.path", hub, "it", "dataset"):
        try:
            info = HfApi().dataset_info(hub, revision=revision, timeout=TIMEOUT_S)
        except HFValidationError:
            raise
        except Exception as error:  # of the hub's own classes, of its HTTP library, or OSError
            if cached := _cached(hub, revision):
                return cached
            raise error if isinstance(error, HfHubHTTPError) else ConnectionError(str(error)) from None
    commit = str(info.sha)
    _remember(hub, revision, commit)
    return Repository(commit, tuple(sorted(sibling.rfilename for sibling in info.siblings or ())), False)


def _cached(hub: str, revision: str) -> Repository | None:
    folder = _cache_folder(hub)
    commit = revision
    if not COMMIT.fullmatch(revision):
        reference = folder / "refs" / revision
        commit = reference.read_text().strip() if reference.is_file() else ""
    snapshot = folder / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        return None
    names = sorted(str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file())
    return Repository(commit, tuple(names), True)


def _remember(hub: str, revision: str, commit: str) -> None:
    """Write into the hub's cache which commit a branch is at, as its library does, for starts without a network."""
    if not COMMIT.fullmatch(revision):
        reference = _cache_folder(hub) / "refs" / revision
        with suppress(OSError):  # the cache may be read-only
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(reference, commit)


def _cache_folder(hub: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"datasets--{hub.replace('/', '--')}"


def _chosen(source: HubDataset, repository: Repository) -> tuple[str, ...] | None:
    """Return the names of the files of the configuration and split; None if there are no data files at all.

    Raises ConfigError for several configurations of which none is named, for an unknown one, and for an unknown split.
    """
    names = [name for name in repository.names if suffix_of(Path(name)) and PurePosixPath(name).name not in METADATA]
    if not names or f"{source.hub.partition('/')[2]}.py" in repository.names:  # a script reads what is there
        return None
    configurations = _configurations(source, repository, names)
    chosen = _configuration(source, configurations)
    splits = {split: files for split, files in configurations[chosen].items() if files}
    where = f"{source.hub} ({chosen})" if chosen else source.hub
    cached = " in the hub's cache, and the hub cannot be reached" if repository.is_cached else ""
    if not splits:
        raise ConfigError(
            f"data.path: {where}: no data file has a name that its {CARD} gives{cached}; download the files, and name "
            "them as data.path"
        )
    if source.split not in splits:
        raise ConfigError(
            f"data.path: {where} has no split {source.split!r}{cached}; set split to one of {', '.join(splits)} (for a "
            "part of one there are data.max_records and data.eval_fraction)"
        )
    if repository.is_cached:
        _check_whole(source, splits[source.split])
    return tuple(sorted(splits[source.split]))


def _configuration(source: HubDataset, configurations: Mapping[str, Any]) -> str:
    known = ", ".join(name for name in configurations if name) or "none by a name"
    if source.name is not None:
        if source.name not in configurations:
            raise ConfigError(f"data.path: {source.hub} has no configuration {source.name!r}; it has {known}")
        return source.name
    if len(configurations) == 1:
        return next(iter(configurations))
    if "default" in configurations:
        return "default"
    raise ConfigError(
        f"data.path: {source.hub} has several configurations ({known}); name one: {{hub: {source.hub}, name: "
        f"{next(iter(configurations))}}}"
    )


def _configurations(source: HubDataset, repository: Repository, names: Sequence[str]) -> dict[str, Splits]:
    """Return the splits of each configuration by its name; that of the default stands under `default` as well."""
    described = _card(source, repository).get("configs") if CARD in repository.names else None
    if isinstance(described, list) and described:
        entries = [entry for entry in described if isinstance(entry, dict)]
        found = {str(entry.get("config_name", "default")): _described(entry, names) for entry in entries}
        defaults = [_described(entry, names) for entry in entries if entry.get("default")]
        return found | ({"default": defaults[0]} if defaults else {})
    matches = [CONVERTED_FILE.fullmatch(name) for name in names]
    if all(matches):
        converted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for match in filter(None, matches):
            converted[match["name"]][match["split"]].append(match[0])
        return dict(converted)
    return {"": _by_name(names)}


def _card(source: HubDataset, repository: Repository) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    with explained("data.path", source.hub, CARD, "dataset"):
        file = hf_hub_download(source.hub, CARD, repo_type="dataset", revision=repository.commit)
        return metadata_load(file) or {}


def _described(entry: Mapping[str, Any], names: Sequence[str]) -> Splits:
    """Return the splits of a configuration of a README: `data_files` are patterns, or {split, path} of each."""
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
    given = entry.get("data_files")
    if given is None:
        return _by_name(inside)
    parts = given if isinstance(given, list) and all(isinstance(part, dict) for part in given) else [{"path": given}]
    splits: dict[str, list[str]] = defaultdict(list)
    for part in parts:
        patterns = part.get("path")
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            wanted = re.compile(_regex(f"{folder}/{pattern}" if folder else str(pattern)))
            splits[str(part.get("split", "train"))] += filter(wanted.fullmatch, names)
    return splits


def _regex(pattern: str) -> str:
    """Return a glob of a README as a regular expression: `**` reaches into folders, `*` and `?` do not."""
    pattern = re.sub(r"(\*\*/)+", "**/", re.sub(r"\*{3,}", "**", pattern))  # repeated ones would be tried in every way
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meanings.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))


def _by_name(names: Sequence[str]) -> Splits:
    """Return files of the most frequent format by the split that their path names; if none names one: `train`."""
    formats = Counter(suffix_of(Path(name)) for name in names)
    data = [name for name in names if suffix_of(Path(name)) == max(formats, key=lambda suffix: formats[suffix])]
    splits: dict[str | None, list[str]] = defaultdict(list)
    for name in data:
        splits[_split_of(name)].append(name)
    named = {split: files for split, files in splits.items() if split is not None}
    return named or {"train": data}


def _split_of(name: str) -> str | None:
    """Return the split that the name of a file, or else of a folder around it, holds as a word.

    A series of files that the datasets library uploaded may have any word for its split: data/train_sft-00000-of-00004.
    """
    if uploaded := UPLOADED.match(name):
        return uploaded["split"]
    for part in reversed(PurePosixPath(name).parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in SPLIT_WORDS.items():
            if not known.isdisjoint(words):
                return split
    return None


def _check_whole(source: HubDataset, names: Sequence[str]) -> None:
    """Raise ConfigError if files of a series, `train-00000-of-00004`, are missing in the cache."""
    for match in filter(None, map(SHARD.fullmatch, names)):
        num_cached = sum(name.startswith(f"{match['stem']}-") for name in names)
        if num_cached < int(match["count"]):
            raise ConfigError(
                f"data.path: {source.hub}: the hub cannot be reached, and its cache has {num_cached} of "
                f"{int(match['count'])} files of {match['stem']}: run `hf download --repo-type dataset {source.hub}` "
                "with a network"
            )
