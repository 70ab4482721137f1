"""What processes of a run load. A run begins when the last of them has: PyTorch takes 1.4 s, Transformers 2 s."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from ray import cloudpickle

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.crew.actors import GpuActor
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.model.open_model import open_model
from megatrain_ray.workers.arena_owner import ArenaOwner
from megatrain_ray.workers.early_imports import waiting
from megatrain_ray.workers.shard_worker import ShardWorker
from tests.support.family_models import build_family
from tests.support.run_engine import folder_source
from tests.support.runs import ROOT
from tests.support.texts import tokens_of
from tests.support.tiny import TEXT, VOCAB_SIZE


def test_arena_owner_and_data_process_load_no_torch(tmp_path: Path) -> None:
    """Their classes come through Ray as in a run, and batches go through it. No class brings its module with it."""
    data = DataConfig(path=str(TEXT), tokenizer="bytes", seq_len=8)
    starts = (
        (waiting(ArenaOwner), ({}, ())),
        (waiting(DataWorker), (data, tokens_of(data, tmp_path), VOCAB_SIZE, 2, 0, None)),
    )
    (tmp_path / "starts").write_bytes(cloudpickle.dumps((starts, waiting(ShardWorker), waiting(GpuActor))))
    code = (
        "import pathlib, pickle, sys\n"
        "starts, *others = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "for kind, arguments in starts:\n"
        "    (actor := kind()).setup(*arguments)\n"
        "pickle.dumps(actor.batch(1))\n"
        "assert {'megatrain_ray.workers.arena_owner', 'megatrain_ray.data.data_worker'} <= sys.modules.keys()\n"
        "assert not {'torch', 'pyarrow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "starts"], check=True, cwd=ROOT)


def test_a_shard_reads_weights_without_transformers(tmp_path: Path) -> None:
    """A checkpoint may hold experts apart. Random weights are filled as the driver has found."""
    folder = folder_source(build_family("Mixtral", tmp_path / "model"))
    drawn = open_model(ModelConfig(config={"model_type": "mixtral", "num_hidden_layers": 1})).with_fills()
    (tmp_path / "sources").write_bytes(pickle.dumps([folder, drawn]))
    code = (
        "import pathlib, pickle, sys, megatrain_ray.workers.shard_worker\n"
        "for source in pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()):\n"
        "    for name in ('mlp.experts.gate_up_proj', 'input_layernorm.weight'):\n"
        "        assert source.weights().read(f'model.layers.0.{name}', 0, 8).numel() == 8\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "sources"], check=True, cwd=ROOT)
