"""Makes runs as users start them, and kills processes of them in named phases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.kill_campaign.live_run import LiveRun
from benchmarks.kill_campaign.phases import Phase, by_saves, by_words
from benchmarks.kill_campaign.processes import Actor
from benchmarks.kill_campaign.strike import Blow, Hit, strike
from tests.support.runs import command, config, write_config

STRIKE_S = 120.0
END_S = 100.0
SECOND_SAVE = by_saves("a second save being written", lambda s: bool(s.committed) and s.writing and s.num_bytes > 0)


def prepare(folder: Path, **changes: Any) -> tuple[dict[str, Any], Path]:
    """Write the configuration of a run whose model is so wide that an update of a layer takes long enough to be met."""
    shape = LlamaConfig(
        vocab_size=1024, hidden_size=384, intermediate_size=1152, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
    settings = {"train__precision": "bf16", "hardware__num_shards": 2, "save_every": 5, "save_keep": 2}
    tree = config(folder / "run", folder / "model", **settings | changes)
    return tree, write_config(folder / "config.yaml", tree)


@contextmanager
def training(folder: Path, path: Path) -> Iterator[LiveRun]:
    run = LiveRun(command("train", str(path)), folder / "run", folder / "output.txt")
    try:
        yield run
    finally:
        run.close()


def kill(run: LiveRun, phase: Phase, *actors: Actor) -> Hit:
    hit = strike(run, Blow(actors, phase, num_updates=2), STRIKE_S)
    assert hit is not None, f"{phase.name} did not come: {run.text()}"
    return hit


def mid_update(shard: int) -> Phase:
    return by_words("mid-update of a layer", lambda m: m.torn(shard) is not None)
