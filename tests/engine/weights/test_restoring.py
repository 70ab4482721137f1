"""Moments of a save as those of a run whose type is the other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.weights import saved_values
from megatrain_ray.io.saves.save_folder import load_manifest
from tests.support.saves import make_state, pieces_of, write_save

WIDE, NARROW = "bf16", "bf16 with bf16 moments"
TYPES = {WIDE: torch.float32, NARROW: torch.bfloat16}


@pytest.mark.parametrize(("saved", "restored"), [(WIDE, NARROW), (NARROW, WIDE), (NARROW, NARROW)])
def test_moments_are_converted_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: str, restored: str
) -> None:
    """Portions end in the middle of stored pieces and of buffers; everything else comes as it was."""
    monkeypatch.setattr(saved_values, "CONVERTED_BYTES", 4 * 1001)
    before, after = make_state(saved), make_state(restored, seed=None)
    folder = write_save(tmp_path, 1, before, saved, num_shards=2)
    for shard in range(3):
        pieces = list(pieces_of(after, restored, shard, 3))
        saved_values.restore_pieces(folder, load_manifest(tmp_path, 1), pieces)
    for (layer, kind), got in after.items():
        want = before[layer, kind]
        if kind in ("m", "v"):
            values = torch.frombuffer(want, dtype=TYPES[saved]).to(TYPES[restored])
            want = bytearray(values.view(torch.uint8).numpy().data)
        assert got == want, f"{kind} of {layer}"
