"""Text to token ids: plain bytes, or the tokenizer of a Hugging Face folder, of this machine or of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.hub import find_on_hub
from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.long_documents import Joiner, Piece, cut_texts
from megatrain_ray.io.tokens.token_block import TokenArray, TokenBlock

BATCH_CHARS = 4 << 20  # encoded at a time; an encoded character takes some 30 bytes until its ids are taken
EMPTY_CHARS = 64  # what a text takes beside its characters, counted as these

# tokenizer.json is what is read here. The others go with exports: what AutoTokenizer and AutoProcessor read beside it,
# and what llama.cpp, vLLM and older Transformers read in its place.
FILE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"


class PlacedTokens(NamedTuple):
    """Ids of a text and the characters each stands for: [start, end). Tokens of one character share its place."""

    ids: TokenArray  # [num_tokens]
    starts: NDArray[np.int64]  # [num_tokens]
    ends: NDArray[np.int64]  # [num_tokens]


class Tokenizer(Protocol):
    @property
    def num_ids(self) -> int:
        """Every id is less."""

    @property
    def end_of_document(self) -> int | None:
        """The id that stands between two documents, None where the tokenizer names none."""

    def encode(self, text: str) -> TokenArray:
        """The ids of a text, 1-D. No special tokens are added."""

    def encode_placed(self, text: str) -> PlacedTokens:
        """The same ids, each with its place in the text."""

    def encode_all(self, blocks: Iterable[TextBlock]) -> Iterator[TokenBlock]:
        """The ids of documents in their order, each as `encode` gives them for its whole text, on all cores."""


class ByteTokenizer:
    """One id a byte of UTF-8, 0-255. Id 256 is the end of a document."""

    num_ids = 256
    end_of_document = 256

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_placed(self, text: str) -> PlacedTokens:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        starts = np.repeat(np.arange(codes.size), widths)
        return PlacedTokens(self.encode(text), starts, starts + 1)

    def encode_all(self, blocks: Iterable[TextBlock]) -> Iterator[TokenBlock]:
        for block in blocks:
            yield TokenBlock(self.encode(block.text), block.ends, block.read_bytes)


class FolderTokenizer:
    """The tokenizer.json of a Hugging Face folder: local, and data only, no code of the folder runs."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the folder or its tokenizer.json is missing or broken."""
        self._tokenizer = _read(folder)
        self._tokenizer.no_truncation()  # a stored limit would cut a document short, and silently
        self._tokenizer.no_padding()
        # It would add special tokens, which nothing here asks for, or take the space before a word out of its place.
        self._tokenizer.post_processor = processors.Sequence([])
        self._end_of_sequence = _end_of_sequence(folder)

    @property
    def num_ids(self) -> int:
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def end_of_document(self) -> int | None:
        """The eos token that the folder's tokenizer_config.json or special_tokens_map.json names."""
        token = self._end_of_sequence
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> TokenArray:
        return np.array(self._encode(text).ids, np.uint32)

    def encode_all(self, blocks: Iterable[TextBlock]) -> Iterator[TokenBlock]:
        joiner = Joiner(self._encode)
        for piece, encoding in self._encode_pieces(cut_texts(blocks)):
            if piece.is_whole:
                yield TokenBlock(np.array(encoding.ids, np.uint32), True, piece.read_bytes)
            else:
                yield from joiner.add(piece, encoding)

    def encode_placed(self, text: str) -> PlacedTokens:
        encoding = self._encode(text)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return PlacedTokens(np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1])

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_pieces(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Any]]:
        """A batch is encoded, by threads that need no Python, while the next is read and the one before looked at."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer") as pool:
            under_way: tuple[list[Piece], Future[Any]] | None = None
            for batch in _batches(pieces):
                texts = [piece.text for piece in batch]
                started = batch, pool.submit(self._tokenizer.encode_batch, texts, add_special_tokens=False)
                if under_way:
                    yield from zip(under_way[0], under_way[1].result(), strict=True)
                under_way = started
            if under_way:
                yield from zip(under_way[0], under_way[1].result(), strict=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) + EMPTY_CHARS
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a folder or repository of the hub that holds a tokenizer.json. Raises ConfigError."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(tokenizer_folder(name))


def tokenizer_folder(name: str) -> Path:
    """The folder that a name other than `bytes` means. What the hub has of it is fetched; a folder of this machine may
    be missing. Raises ConfigError as find_on_hub."""
    required, *optional = FILE_NAMES
    found = find_on_hub(name, "data.tokenizer", required, [*optional, TOOL_TEMPLATE_NAME])
    return found.path if found else Path(name)


def _read(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        missing = file if folder.is_dir() else folder
        raise ConfigError(
            f"data.tokenizer: no such {'file' if folder.is_dir() else 'folder'}: {missing}; "
            "expected `bytes`, a folder that holds a tokenizer.json, or a hub id"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError(f"data.tokenizer: cannot read {file}: {error}") from None


def tokenizer_files(name: str) -> tuple[Path, ...]:
    """The files that make up a tokenizer; none for `bytes`, and none where its folder is gone. Raises ConfigError as
    find_on_hub."""
    folder = None if name == "bytes" else tokenizer_folder(name)
    paths = [folder / file for file in FILE_NAMES] if folder else []
    return tuple(path for path in paths if path.is_file())


def _end_of_sequence(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        try:
            token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"data.tokenizer: cannot read {file}: {error}") from None
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            return text
    return None
