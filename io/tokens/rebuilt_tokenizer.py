"""Asks Transformers for the tokenizer of a folder whose class rebuilds it, instead of reading tokenizer.json as it is.

LlamaTokenizer, GPT2Tokenizer and others take the vocabulary and merges of tokenizer.json, and have rules of their own
for blanks, the beginning of a text, and special tokens that no file names.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from megatrain_ray.errors import ConfigError

log = logging.getLogger(__name__)

# Classes that read tokenizer.json as it is, if no model's configuration stands beside it.
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
# Files from which Transformers makes a tokenizer where there is no tokenizer.json, some by further packages.
VOCABULARIES = ("vocab.json", "tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json")
MODEL_FLAGS = ("unk_token", "byte_fallback", "fuse_unk", "ignore_merges", "continuing_subword_prefix", "dropout")


class RebuiltTokenizer(NamedTuple):
    """Holds what Transformers makes of a folder, and the special tokens by their names (`eos_token`)."""

    tokenizer: tokenizers.Tokenizer
    names: dict[str, str]

    @property
    def digest(self) -> str:
        """Return a hash that differs where ids may: another Transformers or config.json may make another tokenizer."""
        return hashlib.sha256(repr((self.tokenizer.to_str(), sorted(self.names.items()))).encode()).hexdigest()


def rebuild(folder: Path, settings: dict[str, Any], config: dict[str, Any]) -> RebuiltTokenizer | None:
    """Return what AutoTokenizer makes of a folder; None if it would read tokenizer.json as it is, or cannot read it.

    settings, config: of its tokenizer_config.json and config.json; empty if they are missing.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named in PLAIN_CLASSES and "model_type" not in config:
        return None
    try:
        return _as_transformers(folder)
    except Exception as error:  # of code of the folder's own, which does not run, or of a class without a backend
        log.info("%s: tokenizer.json is read as it is: %s: %s", folder, type(error).__name__, error)
        return None


def build_of_vocabulary(folder: Path) -> RebuiltTokenizer:
    """Return what AutoTokenizer makes of a folder without a tokenizer.json, as OPT's is. Raises ConfigError."""
    vocabulary = next((name for name in VOCABULARIES if (folder / name).is_file()), None)
    if vocabulary is None:
        missing = folder / "tokenizer.json" if folder.is_dir() else folder
        raise ConfigError(
            f"data.tokenizer: no such {'file' if folder.is_dir() else 'folder'}: {missing}; "
            "expected `bytes`, a folder that holds a tokenizer.json, or a hub id"
        )
    try:
        rebuilt = _as_transformers(folder)
        if rebuilt.tokenizer.encode("a", add_special_tokens=False).ids:
            return rebuilt
        reason = "its class finds no vocabulary there"
    except Exception as error:  # each class has its own
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise ConfigError(
        f"data.tokenizer: {folder} has no tokenizer.json, and Transformers makes no tokenizer of its {vocabulary} here "
        f"({reason}); where it can, write one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def write_whole(folder: Path, target: Path) -> None:
    """Write the tokenizer of a folder without tokenizer.json with one, so that it needs no config.json."""
    _load(folder).save_pretrained(target)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import: not for folders without a class

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _as_transformers(folder: Path) -> RebuiltTokenizer:
    found = _load(folder)
    return RebuiltTokenizer(found.backend_tokenizer, {k: str(v) for k, v in found.special_tokens_map.items()})


def differ(one: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    """Return whether two tokenizers of one vocabulary may give other ids."""
    return _rules(one) != _rules(other)


def _rules(tokenizer: tokenizers.Tokenizer) -> list[Any]:
    parts: list[Any] = [tokenizer.normalizer, tokenizer.pre_tokenizer]
    states = [part and part.__getstate__() for part in parts]
    flags = [getattr(tokenizer.model, flag, None) for flag in MODEL_FLAGS]
    return [states, flags, {token: repr(added) for token, added in tokenizer.get_added_tokens_decoder().items()}]
