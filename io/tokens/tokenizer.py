"""Turns text into token ids: plain bytes, or the tokenizer of a local or hub Hugging Face folder."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import processors

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.hub import find_on_hub
from megatrain_ray.io.records.read_texts import TextBlock
from megatrain_ray.io.tokens.byte_tokenizer import ByteTokenizer, PlacedTokens
from megatrain_ray.io.tokens.long_documents import Joiner, TextPiece, cut_texts
from megatrain_ray.io.tokens.rebuilt_tokenizer import VOCABULARIES, build_of_vocabulary, differ, rebuild
from megatrain_ray.io.tokens.token_files import TokenArray, TokenBlock
from megatrain_ray.read_file import parse_json, regular_file

BATCH_CHARS = 4 << 20  # characters encoded at a time; each takes about 30 bytes until the ids are extracted
EMPTY_CHARS = 64  # memory of a text in addition to its characters, in characters

# Read here are tokenizer.json and the tokens that the next three add or name. The rest is copied into exports:
# AutoTokenizer and AutoProcessor read some of them, and llama.cpp, vLLM and older Transformers read others instead.
FILE_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "spiece.model", "tiktoken.model",
)  # fmt: skip
CONFIG_NAME = "config.json"  # of the model, which decides about the tokenizer's class too
ADDITIONAL_TEMPLATES = "additional_chat_templates"  # folder of templates by name
# Files of chat templates in addition to those above. A repository of the hub can only be asked for names.
TEMPLATE_NAMES = (f"{ADDITIONAL_TEMPLATES}/tool_use.jinja", "chat_template.json")

# Transformers' names of special tokens, in the order in which it adds those that tokenizer.json lacks.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderTokenizer:
    """Encodes as AutoTokenizer does with a local Hugging Face folder.

    No code of the folder runs.

    Its methods are those of ByteTokenizer. `encode_all` uses all cores.
    """

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of `folder`. Raises ConfigError if the folder or its files are missing or bad."""
        settings, config = (read_settings(folder / name) for name in ("tokenizer_config.json", CONFIG_NAME))
        is_extended, differs = False, True
        if (folder / FILE_NAMES[0]).exists():
            self._tokenizer, names, is_extended = _read_extended(folder)
            rebuilt = rebuild(folder, settings, config)
            differs = rebuilt is not None and differ(self._tokenizer, rebuilt.tokenizer)
        else:
            rebuilt = build_of_vocabulary(folder)
        self.extension: Mapping[str, bool | str] = {"extended": True} if is_extended else {}
        if rebuilt is not None:
            self._tokenizer, names = rebuilt
            self.extension = {"extended": rebuilt.digest} if differs else self.extension
        self._tokenizer.no_truncation()  # a stored limit would silently truncate a document
        self._tokenizer.no_padding()
        self._end_of_sequence = names.get("eos_token")
        self.bos = self.id_of(names["bos_token"]) if "bos_token" in names else None
        # In Transformers the post-processor decides, whatever `add_bos_token` in tokenizer_config.json says.
        self.adds_bos = self.bos is not None and self._tokenizer.encode("a").ids[:1] == [self.bos]
        # A post-processor adds special tokens, which are added by the callers if they are wanted, or excludes the space
        # before a word from the token's character range.
        self._tokenizer.post_processor = processors.Sequence([])

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, added ones included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @property
    def num_ids(self) -> int:
        return max(self.vocabulary.values(), default=-1) + 1

    @property
    def end_of_document(self) -> int | None:
        """Return the id of the eos token that the folder's settings name; None: they name none."""
        token = self._end_of_sequence
        return None if token is None else self.id_of(token)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary has no such token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str:
        """Return the token of an id, or the id as text if the vocabulary has no such id."""
        return self._tokenizer.id_to_token(token_id) or str(token_id)

    @property
    def mark_ids(self) -> frozenset[int]:
        """Return the ids of tokens that are no pieces of text but marks, such as the end of a turn."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode(self, text: str) -> TokenArray:
        return np.array(self._encode(text).ids, np.uint32)

    def encode_all(self, blocks: Iterable[TextBlock]) -> Generator[TokenBlock]:
        joiner = Joiner(self._encode)
        for piece, encoding in self._encode_pieces(cut_texts(blocks)):
            if piece.is_whole:
                yield TokenBlock(np.array(encoding.ids, np.uint32), True, piece.location)
            else:
                yield from joiner.add(piece, encoding)

    def decode(self, ids: TokenArray) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def encode_placed(self, text: str) -> PlacedTokens:
        encoding = self._encode(text)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return PlacedTokens(np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1])

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_pieces(self, pieces: Iterable[TextPiece]) -> Iterator[tuple[TextPiece, Any]]:
        """Yield each piece with its encoding. Threads encode a batch while its neighbours are read and consumed."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer") as pool:
            under_way: tuple[list[TextPiece], Future[Any]] | None = None
            for batch in _batches(pieces):
                texts = [piece.text for piece in batch]
                started = batch, pool.submit(self._tokenizer.encode_batch, texts, add_special_tokens=False)
                if under_way:
                    yield from zip(under_way[0], under_way[1].result(), strict=True)
                under_way = started
            if under_way:
                yield from zip(under_way[0], under_way[1].result(), strict=True)


def _batches(pieces: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    batch: list[TextPiece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) + EMPTY_CHARS
        if num_chars >= BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


Tokenizer = ByteTokenizer | FolderTokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that `name` means: `bytes`, or a folder or hub repository. Raises ConfigError."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(tokenizer_folder(name))


def tokenizer_folder(name: str) -> Path:
    """Return the folder, perhaps missing, or the cached hub repository that a name means. Raises as find_on_hub."""
    optional = [*FILE_NAMES, *TEMPLATE_NAMES, CONFIG_NAME]
    found = find_on_hub(name, "data.tokenizer", (FILE_NAMES[0], *VOCABULARIES), optional)
    return found.path if found else Path(name)


def holds_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of which a tokenizer can be made."""
    return any((folder / name).is_file() for name in (FILE_NAMES[0], *VOCABULARIES))


def _read_extended(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], bool]:
    """Return what tokenizer.json holds, with the tokens that other files add, their names, and whether any were added.

    Raises ConfigError for a bad file.
    """
    tokenizer = _read(folder / FILE_NAMES[0])
    try:
        to_add = _tokens_to_add(tokenizer, folder)
        tokenizer.add_tokens(to_add)
        return tokenizer, named_tokens(folder), bool(to_add)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"data.tokenizer: cannot read the tokens that settings in {folder} add: {error}") from None


def _read(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(regular_file(file)))
    # The library raises bare Exception for whatever is wrong with the file, and a panic, which is none, for a damaged
    # precompiled charsmap.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ConfigError(f"data.tokenizer: cannot read {file}: {error}") from None


def _tokens_to_add(tokenizer: tokenizers.Tokenizer, folder: Path) -> list[tokenizers.AddedToken]:
    """Return the tokens that AutoTokenizer adds to those of tokenizer.json, in its order.

    They are those of added_tokens_decoder in tokenizer_config.json, else of added_tokens.json, and then named ones such
    as eos_token. Without them they would be cut into pieces. Raises ConfigError if a file cannot be read.
    """
    settings = read_settings(folder / "tokenizer_config.json")
    there = tokenizer.get_added_tokens_decoder().values()
    if (decoder := settings.get("added_tokens_decoder")) is not None:
        listed = [_added_token(value) for _, value in sorted(decoder.items(), key=lambda item: int(item[0]))]
        as_written = {repr(token) for token in there}  # the settings override other flags of a token
        new = [token for token in listed if repr(token) not in as_written]
    else:
        special = named_tokens(folder).values()
        by_id = sorted(read_settings(folder / "added_tokens.json").items(), key=lambda item: int(item[1]))
        listed = [tokenizers.AddedToken(t, special=t in special, normalized=t not in special) for t, _ in by_id]
        new = [token for token in listed if token.content not in {known.content for known in there}]
    known = {token.content for token in (*there, *new)}
    named = {token.content: token for token in _special_tokens(tokenizer, folder, settings)}
    return new + [token for text, token in named.items() if text not in known]


def _special_tokens(
    tokenizer: tokenizers.Tokenizer, folder: Path, settings: dict[str, Any]
) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that the settings name (`eos_token`, …), and those that they list without a name."""
    written = read_settings(folder / "special_tokens_map.json") | settings
    if tokenizer.padding is not None:
        written = {"pad_token": tokenizer.padding["pad_token"], **written}
    names = [*SPECIAL_TOKENS, *named_tokens(folder)]  # ids are given in this order
    extra = written.get("extra_special_tokens") or written.get("additional_special_tokens") or []
    values = [written.get(name) for name in dict.fromkeys(names)]
    for value in (*filter(None, values), *(extra.values() if isinstance(extra, dict) else extra)):
        yield _added_token(value if isinstance(value, dict) else {"content": value}, special=True)


def _added_token(value: dict[str, Any], **flags: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(**{key: part for key, part in value.items() if key != "__type"} | flags)


def tokenizer_files(name: str) -> tuple[Path, ...]:
    """Return the existing files of a tokenizer; none for `bytes`. Raises ConfigError as find_on_hub."""
    folder = None if name == "bytes" else tokenizer_folder(name)
    paths = [folder / file for file in FILE_NAMES] if folder else []
    return tuple(path for path in paths if path.is_file())


def named_tokens(folder: Path) -> dict[str, str]:
    """Return bos_token, eos_token and the other `*_token` settings of a tokenizer's folder. Raises ConfigError."""
    tokens: dict[str, str] = {}
    # A null in tokenizer_config.json removes what the map names.
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / "tokenizer_config.json")
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and text and isinstance(text, str):
            tokens[key] = text
    return tokens


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings of a file of a tokenizer; none if it is missing. Raises ConfigError."""
    try:
        settings = parse_json(regular_file(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.tokenizer: cannot read {file}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"data.tokenizer: cannot read {file}: expected a mapping")
    return settings
