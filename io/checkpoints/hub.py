"""Fetches files of the Hugging Face hub into huggingface_hub's own cache: once, then read without a network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain_ray.errors import ConfigError

# NAME or OWNER/NAME, perhaps with a branch, tag or commit.
HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubFolder:
    """Points to a commit of a repository in the cache.

    key: the setting that names the repository, for messages.
    path: the folder of the commit in the cache; its last part is the commit's hash.
    """

    key: str
    repository: str
    path: Path

    def require(self, files: Iterable[str]) -> None:
        """Fetch those of `files` that are not in the cache. Raises ConfigError if one cannot be fetched."""
        for file in files:
            if not (self.path / file).is_file():
                with explained(self.key, self.repository, file):
                    _fetch(self.repository, self.path.name, file)

    def add(self, files: Iterable[str]) -> bool:
        """Fetch those of `files` that the repository has and the cache has not, and return True.

        Without a network this returns False, with what the cache has. Raises ConfigError for any other failure.
        """
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        for file in files:
            if try_to_load_from_cache(self.repository, file, revision=self.path.name) is not None:
                continue
            with explained(self.key, self.repository, file), suppress(EntryNotFoundError):
                try:
                    _fetch(self.repository, self.path.name, file)
                except (LocalEntryNotFoundError, ConnectionError):
                    return False
        return True

    def add_matching(self, patterns: Sequence[str]) -> None:
        """Fetch the repository's files of these names, as far as the hub can be reached."""
        with suppress(ConfigError), explained(self.key, self.repository, "other files"):
            self._fetch_matching(patterns)

    def add_code(self) -> None:
        """Fetch the repository's Python files. Raises ConfigError."""
        with explained(self.key, self.repository, "Python code"):
            self._fetch_matching(["*.py"])

    def _fetch_matching(self, patterns: Sequence[str]) -> None:
        from huggingface_hub import snapshot_download

        revision = self.path.name
        is_cached = not _is_reached(self.repository, revision)
        snapshot_download(self.repository, revision=revision, allow_patterns=[*patterns], local_files_only=is_cached)


def find_on_hub(name: str, key: str, required: str | Sequence[str], optional: Iterable[str]) -> HubFolder | None:
    """Return the cached repository that `name` (OWNER/NAME, or with @REVISION) means, after fetching files of it.

    key: the setting that holds `name`, for messages.
    required, optional: files to fetch; the repository may lack the optional ones, and all but one of several required.

    A cached repository is used as it is: a branch stays at the commit that was fetched first. Returns None if `name` is
    a local file or folder, or cannot be a hub id. Raises ConfigError if the hub has no such repository or file, or if
    it cannot be reached and the cache has none.
    """
    match = HUB_ID.fullmatch(name)
    if match is None or Path(name).exists():
        return None
    repository, revision = match["repository"], match["revision"] or "main"
    files = [required] if isinstance(required, str) else required
    try:
        path = _first_cached(repository, revision, files)
    except ValueError:  # the hub's rules for names are stricter than HUB_ID
        return None
    if path is None:
        with explained(key, repository, files[0]):
            path = _fetch_one_of(repository, revision, files)
    folder = HubFolder(key, repository, path.parent)
    folder.add(optional)
    return folder


def _first_cached(repository: str, revision: str, files: Sequence[str]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def _fetch_one_of(repository: str, revision: str, files: Sequence[str]) -> Path:
    """Fetch the first of these files that the repository has. Raises as _fetch_first."""
    from huggingface_hub.errors import EntryNotFoundError

    for file in files[:-1]:
        with suppress(EntryNotFoundError):
            return _fetch_first(repository, revision, file)
    return _fetch_first(repository, revision, files[-1])


def _fetch_first(repository: str, revision: str, file: str) -> Path:
    """Fetch the first file of a repository. Raises ConnectionError at once without a network."""
    if not _is_reached(repository, revision):
        raise ConnectionError
    return _fetch(repository, revision, file)


def _is_reached(repository: str, revision: str) -> bool:
    """Return whether the hub answers. Its library asks for files, and for lists of them, again and again for 24 s."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(repository, "config.json", revision=revision))
    except HfHubHTTPError:  # an answer, if only that there is no such file
        return True
    except Exception:  # of the hub's HTTP library, or OSError
        return False
    return True


def _fetch(repository: str, revision: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, file, revision=revision))


@contextmanager
def explained(
    key: str, repository: str, file: str, repo_type: Literal["model", "dataset"] = "model", *, uses_cache: bool = True
) -> Iterator[None]:
    """Turn what the hub's library raises in the block into a ConfigError that says what to do.

    uses_cache: whether the file would be read from the cache of that library.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # of the hub's own classes, of its HTTP library, or OSError
        raise ConfigError(f"{key}: {repository}: {_reason(repository, file, error, repo_type, uses_cache)}") from None


def _reason(repository: str, file: str, error: Exception, repo_type: str, uses_cache: bool) -> str:
    from huggingface_hub import errors

    command = f"hf download {'--repo-type dataset ' * (repo_type == 'dataset')}{repository}"

    reasons: list[tuple[Any, str]] = [
        (errors.GatedRepoError, "the hub asks for its terms to be accepted there first, and for `hf auth login`"),
        (
            errors.RepositoryNotFoundError,
            f"no such folder (relative paths start at {Path.cwd()}), and no such repository on the hub, or a private "
            "one: `hf auth login`",
        ),
        (errors.RevisionNotFoundError, "the hub has this repository, but not in this revision"),
        (
            (errors.LocalEntryNotFoundError, ConnectionError),
            f"no such folder (relative paths start at {Path.cwd()}), and {file} is not in the hub's cache, while the "
            f"hub cannot be reached: give a local folder, or run `{command}` with a network"
            if uses_cache
            else "the hub cannot be reached, and a stream does not read its cache; data.stream: null does",
        ),
        (
            errors.EntryNotFoundError,
            f"the repository on the hub has no {file}",
        ),
    ]
    for kind, reason in reasons:
        if isinstance(error, kind):
            return reason
    return f"cannot fetch {file} from the hub: {type(error).__name__}: {error}"
