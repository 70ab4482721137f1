"""Imitates the Hugging Face hub's files, by a small server on this machine and by a cache made by hand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(
    cache: Path, repository: str, files: Mapping[str, bytes], commit: str = COMMIT, kind: str = "models"
) -> Path:
    """Write what huggingface_hub leaves of a repository's main branch, and return the folder of its files.

    kind: models or datasets.
    """
    root = cache / f"{kind}--{repository.replace('/', '--')}"
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def commit_of(branch: str) -> str:
    """Return the commit that the server has a branch at."""
    return COMMIT if branch == "main" else hashlib.sha1(branch.encode()).hexdigest()


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@dataclass
class Hub:
    """Holds the address of the server, the files of each repository, and in `asked` all requests in order."""

    repositories: Mapping[str, Mapping[str, bytes] | None]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    connections: list[Any] = field(default_factory=list)  # those that the server has not closed yet
    closed: threading.Condition = field(default_factory=threading.Condition)

    def wait_closed(self) -> None:
        """Wait until the server has closed all connections, so that none counts as left behind."""
        with self.closed:
            assert self.closed.wait_for(lambda: not self.connections, timeout=60)


@contextmanager
def serve(repositories: Mapping[str, Mapping[str, bytes] | None]) -> Iterator[Hub]:
    """Serve main and COMMIT as huggingface.co does, as far as a download of single files and a list of them need it.

    A data set is named as in addresses, `datasets/OWNER/NAME`. Another branch of it has `@BRANCH` behind its name, and
    `commit_of(BRANCH)` as its commit. The name of a repository that is gated maps to None.
    """
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_content=False)

        def do_GET(self) -> None:
            self._answer(with_content=True)

        def _answer(self, *, with_content: bool) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            is_list = self.path.startswith("/api/")
            mark = "/revision/" if is_list else "/resolve/"
            repository, _, rest = self.path.removeprefix("/").removeprefix("api/").partition(mark)
            revision, _, name = (unquote(part) for part in rest.partition("?")[0].partition("/"))
            branches = {"main": repository} | {
                known.partition("@")[2]: known for known in hub.repositories if known.startswith(f"{repository}@")
            }
            by_revision = branches | {commit_of(branch): known for branch, known in branches.items()}
            files = hub.repositories.get(by_revision.get(revision, ""))
            problem = (
                "RepoNotFound"
                if repository not in hub.repositories
                else "RevisionNotFound"
                if revision not in by_revision
                else "GatedRepo"
                if files is None
                else "EntryNotFound"
                if name not in files and not is_list
                else None
            )
            commit = commit_of(next((b for b in branches if revision in (b, commit_of(b))), "main"))
            content = b""
            if files is not None and problem is None:
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                info = {"id": repository.removeprefix("datasets/"), "sha": commit, "siblings": siblings}
                content = json.dumps(info).encode() if is_list else files[name]
            self.send_response(200 if problem is None else 403 if problem == "GatedRepo" else 404)
            self.send_header("X-Repo-Commit", commit)
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

    class Server(ThreadingHTTPServer):
        def process_request(self, request: Any, client_address: Any) -> None:
            hub.connections.append(request)
            super().process_request(request, client_address)

        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            with hub.closed:
                hub.connections.remove(request)
                hub.closed.notify_all()

    with Server(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
