"""What processes of a run load. A run begins when the last of them has: PyTorch takes 2 s, Transformers 3 s."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from ray import cloudpickle

from megatrain_ray.crew.actors import waiting
from megatrain_ray.workers.arena_owner import ArenaOwner
from tests.support.family_models import build_family
from tests.support.run_engine import folder_source
from tests.support.runs import ROOT


def test_the_arena_owner_loads_no_torch(tmp_path: Path) -> None:
    """Its class comes through Ray as in a run."""
    (tmp_path / "class").write_bytes(cloudpickle.dumps(waiting(ArenaOwner)))
    code = (
        "import pathlib, pickle, sys\n"
        "pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())(()).setup({}, ())\n"
        "assert 'megatrain_ray.workers.arena_owner' in sys.modules\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "class"], check=True, cwd=ROOT)


def test_a_shard_reads_weights_without_transformers(tmp_path: Path) -> None:
    """The model's checkpoint holds its experts apart."""
    source = folder_source(build_family("Mixtral", tmp_path / "model"))
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    code = (
        "import pathlib, pickle, sys, megatrain_ray.workers.shard_worker\n"
        "weights = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()).weights()\n"
        "assert weights.read('model.layers.0.mlp.experts.gate_up_proj', 0, 8).numel() == 8\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "source"], check=True, cwd=ROOT)
