"""Rewards for examples/grpo.yaml, with the signature that TRL's GRPOTrainer calls."""

from __future__ import annotations

from collections.abc import Sequence


def digits(completions: Sequence[list[dict[str, str]] | str], **columns: object) -> list[float]:
    """Return the share of digits among the characters of each completion."""
    texts = [made if isinstance(made, str) else made[-1]["content"] for made in completions]
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in texts]
