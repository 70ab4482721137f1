"""Recognises URLs among paths, and refuses those that hold a password or a key."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

URL = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*)://(?P<host>[^/?]*)(?P<path>[^?]*)(\?(?P<query>.*))?", re.DOTALL)
SECRET = re.compile(r"secret|token|password|passwd|credential|signature|\bsig\b|key", re.IGNORECASE)


class StoreUrl(NamedTuple):
    """Holds the parts of a URL: SCHEME://HOST/PATH?QUERY. The path is taken as it is written, without escapes.

    host: the bucket or container.
    path: without slashes at its ends.
    query: parameters for the library that opens the store.
    """

    scheme: str
    host: str
    path: str
    query: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the parts. Raises ValueError if the text is no URL."""
        match = URL.fullmatch(text)
        if match is None:
            raise ValueError(f"expected a URL such as s3://BUCKET/PATH, got {text!r}")
        return cls(match["scheme"].lower(), match["host"], match["path"].strip("/"), match["query"] or "")

    def at(self, path: str) -> Self:
        """Return the URL of another path in the same store."""
        return self._replace(path=path)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}" + (f"/{self.path}" if self.path else "")


def is_url(text: str) -> bool:
    """Return whether a text is a URL and no local path."""
    return URL.fullmatch(text) is not None


def without_secrets(text: str) -> str:
    """Return a text. Raises ValueError if it is a URL that holds a password or a key: a run saves and prints it."""
    if is_url(text):
        url = StoreUrl.parse(text)
        names = [part.partition("=")[0] for part in url.query.split("&")]
        if ":" in url.host.rpartition("@")[0] or any(map(SECRET.search, names)):
            raise ValueError(
                f"the URL of {url.scheme}://{url.host.rpartition('@')[2]} holds a password or a key, which a run would "
                "save and print; leave it out: the library reads credentials from the environment and its own files"
            )
    return text
