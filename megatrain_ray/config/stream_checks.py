"""Finds settings that do not go with a stream. Each problem is one line, as in checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain_ray.config.groups import Settings


def stream_disagreements(config: Settings) -> Iterator[str]:
    """Yield problems of data.stream with other settings."""
    data, default = config.data, type(config.data).model_fields
    if data.stream is None:
        if data.stream_portion is not None:
            yield "data.stream_portion: goes with data.stream; set that, or leave the key out"
        return
    if config.counts_epochs:
        yield (
            "data.stream: the rows of a stream are not counted before it ends; give train.steps in place of "
            "train.epochs, and save_every and eval_every in steps"
        )
    if config.train.reference_model is not None:
        yield "data.stream: a reference or teacher reads all data before training; leave data.stream out"
    for key, instead in (
        ("eval_fraction", "set data.eval_path"),
        ("max_records", "train.steps is how far a stream is read"),
        ("dataset", "name the files as data.path"),
        ("images", "features of images are computed before training"),
    ):
        if getattr(data, key) != default[key].default:
            yield f"data.{key}: does not go with data.stream ({instead}); leave one of the two out"
