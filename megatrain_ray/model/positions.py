"""Says how many positions a model has: those that it was trained on, or those that its YaRN stretches them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.errors import ConfigError

NAME = "max_position_embeddings"


def written_positions(config: Mapping[str, Any]) -> int | None:
    """Return the positions of a configuration if it holds them under their common name, else None.

    This needs no import of Transformers.
    """
    texts = config.get("text_config") or config
    positions = texts.get(NAME) if isinstance(texts, Mapping) else None
    return stretched(positions, texts) if isinstance(positions, int) else None


def positions_of(config: Any) -> int | None:
    """Return the positions of a Transformers configuration; None if it has no limit."""
    texts = config.get_text_config()
    positions = getattr(texts, NAME, None)
    names = "rope_parameters", "rope_scaling"
    return None if positions is None else stretched(positions, {name: getattr(texts, name, None) for name in names})


def check_length(data: DataConfig, positions: int | None) -> None:
    """Raise ConfigError if rows are longer than the model allows.

    positions: number of positions of the model; None if it is unlimited.
    """
    if positions is not None and data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len: {data.seq_len} is more than the model's {positions} positions "
            "(max_position_embeddings); lower it, or stretch them by YaRN (rope_scaling) in the model's config.json"
        )


def stretched(positions: int, texts: Mapping[str, Any]) -> int:
    """Return the positions with those that YaRN adds.

    Pages of models say to set `rope_scaling` for longer texts, and leave max_position_embeddings as it was. YaRN then
    reaches `factor` times the original positions, which are max_position_embeddings if it names no others.
    """
    for rope in _ropes(texts.get("rope_parameters") or texts.get("rope_scaling")):
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or positions
        if rope.get("rope_type", rope.get("type")) == "yarn" and isinstance(factor, int | float):
            positions = max(positions, int(factor * original))
    return positions


def _ropes(settings: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each rotary embedding: some models have one for each type of layer."""
    if isinstance(settings, Mapping):
        yield settings
        yield from (inner for inner in settings.values() if isinstance(inner, Mapping))
