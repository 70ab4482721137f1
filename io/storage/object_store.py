"""Lists, reads and writes the objects of an object store by URL: by pyarrow's file systems, or an adapter of fsspec.

Credentials are found by these libraries: in the environment, in their own files, or on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatrain_ray.config.urls import StoreUrl
from megatrain_ray.errors import MegatrainError

CHUNK_BYTES = 8 << 20
# Streams are opened with compression=None: by default Arrow packs and unpacks what ends in .gz.
# Arrow uploads the parts of an object to S3 in threads, and keeps what waits for them in memory without a bound:
# 270 MiB of an object of 300 MB and a slow server; 110 MiB if it is flushed.
FLUSHED_CHUNKS = 8
# Google's library tries a request again for 15 minutes, in which nobody is told. Those for S3 and Azure end far sooner.
GCS = "gs", "gcs"
RETRY_LIMIT = "retry_limit_seconds"
GCS_RETRY_S = 30


class ObjectStoreError(MegatrainError):
    """Says that an object store cannot be reached, or refused a request, after the library's own retries."""


class StoredObject(NamedTuple):
    """Describes an object.

    name: the path below the URL of the store; empty if the URL is that of the object.
    modified_ns: time of its last change since 1970; None: the store does not tell.
    """

    name: str
    nbytes: int
    modified_ns: int | None


class ObjectStore:
    """Holds a connection to the objects at and below a URL. Threads may share it."""

    def __init__(self, url: StoreUrl) -> None:
        """Open the store. Raises ObjectStoreError if no library knows the scheme or a parameter of the URL."""
        self.url = url
        with self._explained("open", ""):
            self._files, base = _file_system(url)
        self._bucket = base.strip("/")
        # The base is empty where the URL names the container in its path: abfs://ACCOUNT@HOST/CONTAINER/PATH.
        self._root = f"{base.removesuffix('/')}/{url.path}" if base and url.path else base or url.path

    def find(self) -> list[StoredObject]:
        """Return the object at the URL, or all objects below it sorted by name; none if there are none."""
        from pyarrow.fs import FileSelector, FileType, PyFileSystem

        with self._explained("list", ""):
            if isinstance(self._files, PyFileSystem):
                self._files.handler.fs.invalidate_cache()  # adapters of fsspec may answer with an earlier listing
            (at,) = self._files.get_file_info([self._root])
            if at.type is FileType.File:
                return [StoredObject("", at.size, at.mtime_ns)]
            found = self._files.get_file_info(FileSelector(self._root, recursive=True, allow_not_found=True))
            first = len(self._root.rstrip("/")) + 1
            files = (info for info in found if info.type is FileType.File)
            return sorted(StoredObject(info.path[first:], info.size, info.mtime_ns) for info in files)

    def lacks_bucket(self) -> bool:
        """Return whether there is no bucket, or container, of the URL's name. False also if the store does not tell."""
        from pyarrow.fs import FileType

        with suppress(Exception):  # who may read objects may still be denied to ask for their bucket
            return bool(self._bucket) and self._files.get_file_info([self._bucket])[0].type is FileType.NotFound
        return False

    def stat(self, name: str) -> StoredObject | None:
        """Return an object; None if there is none."""
        from pyarrow.fs import FileType

        with self._explained("read", name):
            (info,) = self._files.get_file_info([self._at(name)])
        return StoredObject(name, info.size, info.mtime_ns) if info.type is FileType.File else None

    def read(self, name: str) -> bytes:
        """Return the bytes of a small object."""
        with self._explained("read", name), self._files.open_input_stream(self._at(name), compression=None) as source:
            return bytes(source.read())

    def download(self, found: StoredObject, target: Path) -> None:
        """Write the bytes of an object into a local file. Raises ObjectStoreError if it has changed meanwhile, OSError.

        found: the object as it was listed.
        """
        with target.open("wb") as file:
            with self._explained("read", found.name):
                source = self._files.open_input_stream(self._at(found.name), compression=None)
            with source:
                while chunk := self._next_chunk(source, found.name):
                    file.write(chunk)
            size = file.tell()
        if size != found.nbytes or self.stat(found.name) != found:
            raise ObjectStoreError(
                f"{self._shown(found.name)} changed while it was read: {size} of {found.nbytes} bytes"
            )

    def upload(self, source: Path, name: str, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the bytes of a local file into an object. Raises OSError if the file cannot be read.

        advance: is called with the bytes so far; what it raises ends the upload.
        """
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, source.stat().st_size))))
        with source.open("rb", buffering=0) as file, self._writing(name) as target:
            num_chunks = num_bytes = 0
            while count := file.readinto(buffer):
                # The pages just read would take memory from the run that made the save.
                os.posix_fadvise(file.fileno(), num_bytes, count, os.POSIX_FADV_DONTNEED)
                with self._explained("write", name):
                    target.write(buffer[:count])
                    num_chunks += 1
                    if num_chunks % FLUSHED_CHUNKS == 0:
                        target.flush()
                num_bytes += count
                advance(num_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Write bytes into an object."""
        with self._writing(name) as target, self._explained("write", name):
            target.write(data)

    def delete_folder(self, name: str) -> None:
        """Delete all objects below a path, if there are any."""
        from pyarrow.fs import FileType

        with self._explained("delete", name):  # not all libraries raise FileNotFoundError for one that is not there
            (info,) = self._files.get_file_info([self._at(name)])
            if info.type is not FileType.NotFound:
                with suppress(FileNotFoundError):  # GCS: the object that stands for an empty folder, after all others
                    self._files.delete_dir(self._at(name))

    def delete(self, name: str) -> None:
        """Delete an object, if it is there: the answer to an earlier try may have been lost."""
        with self._explained("delete", name), suppress(FileNotFoundError):
            self._files.delete_file(self._at(name))

    @contextmanager
    def _writing(self, name: str) -> Iterator[Any]:
        with self._explained("write", name):
            target = self._open_to_write(self._at(name))
        try:
            yield target
        finally:
            with self._explained("write", name):
                target.close()

    def _open_to_write(self, path: str) -> Any:
        try:
            return self._files.open_output_stream(path, compression=None)
        except FileNotFoundError:  # a file system in which folders must exist
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
            return self._files.open_output_stream(path, compression=None)

    def _next_chunk(self, source: Any, name: str) -> bytes:
        with self._explained("read", name):
            return bytes(source.read(CHUNK_BYTES))

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _shown(self, name: str) -> str:
        return f"{self.url}/{name}" if name else str(self.url)

    @contextmanager
    def _explained(self, action: str, name: str) -> Iterator[None]:
        """Turn what a library raises in the block, of whatever class, into an ObjectStoreError."""
        try:
            yield
        except Exception as error:
            raise ObjectStoreError(f"cannot {action} {self._shown(name)}: {error}") from error


def _file_system(url: StoreUrl) -> tuple[Any, str]:
    """Return a file system of pyarrow, and the path in it of the URL's host: its bucket or container."""
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    query = url.query
    if url.scheme in GCS and RETRY_LIMIT not in query:
        query = f"{query}&{RETRY_LIMIT}={GCS_RETRY_S}".lstrip("&")
    place = f"{url.at('')}/" + (f"?{query}" if query else "")
    try:
        files, root = FileSystem.from_uri(place)
        return files, str(root)
    except ArrowInvalid as error:
        if "Unrecognized filesystem type" not in str(error):
            raise
    from fsspec.core import url_to_fs

    files, root = url_to_fs(place)
    return PyFileSystem(FSSpecHandler(files)), str(root)
