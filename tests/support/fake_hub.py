"""Imitates the Hugging Face hub's files, by a small server on this machine and by a cache made by hand."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(cache: Path, repository: str, files: Mapping[str, bytes], commit: str = COMMIT) -> Path:
    """Write what huggingface_hub leaves of a repository's main branch, and return the folder of its files."""
    root = cache / f"models--{repository.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@dataclass
class Hub:
    """Holds the address of the server, the files of each repository, and in `asked` all requests in order."""

    repositories: Mapping[str, Mapping[str, bytes]]
    url: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def serve(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve main and COMMIT as huggingface.co does, as far as a download of single files needs it."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, *, with_content: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            repository, _, rest = self.path.removeprefix("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            files = hub.repositories.get(repository)
            problem = (
                "RepoNotFound"
                if files is None
                else "RevisionNotFound"
                if revision not in ("main", COMMIT)
                else "EntryNotFound"
                if name not in files
                else None
            )
            content = files[name] if files is not None and problem is None else b""
            self.send_response(404 if problem else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            if problem:
                self.send_header("X-Error-Code", problem)
            else:
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.end_headers()
            if with_content:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
