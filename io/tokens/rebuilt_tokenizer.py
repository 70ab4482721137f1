"""Asks Transformers for the tokenizer of a folder whose class rebuilds it, instead of reading tokenizer.json as it is.

LlamaTokenizer, GPT2Tokenizer and others take the vocabulary and merges of tokenizer.json, and have rules of their own
for blanks, the beginning of a text, and special tokens that no file names.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

log = logging.getLogger(__name__)

# Classes that read tokenizer.json as it is, if no model's configuration stands beside it.
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
MODEL_FLAGS = ("unk_token", "byte_fallback", "fuse_unk", "ignore_merges", "continuing_subword_prefix", "dropout")


class RebuiltTokenizer(NamedTuple):
    """Holds what Transformers makes of a folder, and the special tokens by their names (`eos_token`)."""

    tokenizer: tokenizers.Tokenizer
    names: dict[str, str]


def rebuild(folder: Path, settings: dict[str, Any], config: dict[str, Any]) -> RebuiltTokenizer | None:
    """Return what AutoTokenizer makes of a folder; None if it would read tokenizer.json as it is, or cannot read it.

    settings, config: of its tokenizer_config.json and config.json; empty if they are missing.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named in PLAIN_CLASSES and "model_type" not in config:
        return None
    from transformers import AutoTokenizer  # takes seconds to import: not for folders without a class

    try:
        found: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return RebuiltTokenizer(found.backend_tokenizer, {k: str(v) for k, v in found.special_tokens_map.items()})
    except Exception as error:  # of code of the folder's own, which does not run, or of a class without a backend
        log.info("%s: tokenizer.json is read as it is: %s: %s", folder, type(error).__name__, error)
        return None


def differ(one: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    """Return whether two tokenizers of one vocabulary may give other ids."""
    return _rules(one) != _rules(other)


def _rules(tokenizer: tokenizers.Tokenizer) -> list[Any]:
    parts: list[Any] = [tokenizer.normalizer, tokenizer.pre_tokenizer]
    states = [part and part.__getstate__() for part in parts]
    flags = [getattr(tokenizer.model, flag, None) for flag in MODEL_FLAGS]
    return [states, flags, {token: repr(added) for token, added in tokenizer.get_added_tokens_decoder().items()}]
