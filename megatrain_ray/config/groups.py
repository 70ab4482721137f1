"""Defines the settings of a configuration file, in groups.

Sizes are numbers of bytes after construction, however they were written.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.train_groups import LoraConfig, OptimizationConfig
from megatrain_ray.config.values import (
    Count,
    CpuList,
    GpuList,
    Group,
    ModelSettings,
    NotNegative,
    Seed,
    Size,
    StepsOrEpochs,
    StepsOrSeconds,
    Switch,
    Text,
    Url,
    wandb_project,
)  # fmt: skip

SaveCompression = Literal["none", "zstd"]


class ModelConfig(Group):
    path: Text | None = None
    """Folder of a Hugging Face model (safetensors), or a hub id: training starts from its weights."""
    config: ModelSettings | None = None
    """Mapping, or path of a config.json: this shape with random weights. Set exactly one of the two."""
    seed: Seed = 0
    """Seed of the random weights."""
    trust_remote_code: bool = False
    """Whether code in the model's folder may run, if Transformers lacks the model."""
    attention: Literal["sdpa", "flex", "auto"] = "auto"
    """For several documents in a row and sliding windows. sdpa: masks of seq_len² bytes a sequence; flex: flex
    attention (on a GPU, if Transformers allows it); auto: flex if possible. Without masks it is SDPA."""


class NodeConfig(Group):
    """Describes a NUMA node in place of the kernel's description."""

    cpus: CpuList
    """Its CPUs, as in 0-15,32-47: an optimizer shard works on them."""
    memory: NotNegative | None = None
    """The kernel's number of the node that its memory is taken from. Unset: its place in the list, from 0 on."""
    gpu: bool = False
    """All GPUs of a host are attached to it: GPU workers work on its CPUs, and gradients wait in its memory."""
    gpus: GpuList | None = None
    """The GPUs that are attached to it, as torch numbers those of a host (0-3): where not all are on one node."""


class HardwareConfig(Group):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where layers run; auto: a GPU if there is one."""
    num_gpus: Count = 1
    """GPUs on all hosts, each with its share of every batch; on the CPU device as many processes."""
    num_hosts: Count = 1
    """Machines of a Ray cluster with these GPUs, as many on each. They share optimizer state and working copies."""
    all_gather: Switch = "auto"
    """true: each GPU uploads a part of a layer and gets the rest from the others; false: each uploads all. auto: the
    faster; always true on several hosts."""
    hbm_limit: Size | None = None
    """Largest GPU memory for plan and run; null: what is there."""
    ram_limit: Size | None = None
    """Largest host memory for the plan; null: what is there."""
    hbm_layers: NotNegative | None = None
    """Layers, from the embedding on, whose weights and optimizer state stay in GPU memory; null: all that fit (CPU:
    none)."""
    num_shards: Count | None = None
    """Optimizer processes; null: one per NUMA node."""
    nodes: Annotated[tuple[NodeConfig, ...], Field(strict=False)] = ()
    """NUMA nodes instead of the kernel's, each `{cpus: 0-15, memory: 0, gpus: 0-3}`, or with `gpu: true` for all GPUs.
    One entry: no placement."""
    profile: Text = "auto"
    """File with the rates for plans, or a card for `megatrain plan`, such as rtx4090; auto: measured once on a GPU,
    built-in elsewhere."""
    compile: Switch = "auto"
    """Compile layers and loss by torch.compile; what cannot be compiled runs as it is. auto: on a GPU, unless
    train.deterministic."""
    block_parts: Literal["auto"] | Count = "auto"
    """Most parts of a block, so that blocks larger than GPU memory train; parts are not compiled. auto: 1 if whole
    blocks fit."""
    cuda_graphs: Switch = "auto"
    """Run a step as one CUDA graph if all layers stay in GPU memory; else layer by layer. auto: if launching layers
    takes longer than computing."""


class SpillConfig(Group):
    path: Text | None = None
    """Folder on a local NVMe drive for what host memory has no room for; null: all is in memory."""
    limit: Size | None = None
    """Most bytes there for the plan; null: what is free, minus 1 GiB."""
    io: Literal["auto", "posix", "kvikio"] = "auto"
    """posix: own threads, past the page cache; kvikio: an extra that needs CUDA's driver; auto: kvikio if measured
    faster."""
    compression: Literal["auto", "none", "zstd"] = "auto"
    """zstd: compress floats, except activations, for CPU time and 96 MiB of host memory for each optimizer shard; auto:
    if measured faster."""


class WandbConfig(Group):
    """Names a run of Weights & Biases."""

    project: Text
    """Project of the run."""
    entity: Text | None = None
    """User or team that the project belongs to; null: the account's default."""
    name: Text | None = None
    """Name of the run; null: that of run_dir."""
    tags: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tags of the run."""


class LogConfig(Group):
    every: StepsOrSeconds | None = None
    """A line is printed every N steps, or after seconds (30s). null: about 50 lines a start, and one a minute at
    least."""
    tensorboard: bool = True
    """Write event files to run_dir/tensorboard."""
    wandb: Annotated[WandbConfig | None, BeforeValidator(wandb_project)] = None
    """Project of Weights & Biases, or {project, entity, name, tags} (`pip install wandb`)."""
    mlflow: Text | None = None
    """Experiment of MLflow (`pip install mlflow-skinny`) at MLFLOW_TRACKING_URI."""
    prometheus: bool = True
    """Publish series for Prometheus through Ray's agents."""
    trace: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """[first step, last step]: write a timeline for Perfetto."""


class Settings(Group):
    """Holds all groups of settings. `TrainConfig` (schema.py) checks that they agree."""

    model: ModelConfig
    """The model: model.path (weights from there) or model.config (random weights)."""
    data: DataConfig
    """The text: data.path and data.seq_len at least."""
    train: OptimizationConfig
    """The updates: train.steps or train.epochs at least."""
    lora: LoraConfig | None = None
    """Train adapters beside the frozen model; null: train the model."""
    hardware: HardwareConfig = HardwareConfig()
    """The machine."""
    spill: SpillConfig = SpillConfig()
    """Where optimizer state goes that host memory has no room for."""
    run_dir: Text
    """Folder of the run: configuration, plan, metrics, saves."""
    resume: bool = True
    """true: continue the run in run_dir; false: it must hold none."""
    save_every: StepsOrEpochs | None = 0
    """0: save at the end and when interrupted; N: every N updates too; 1 epoch, 0.5 epochs: so often; null: never."""
    save_keep: Count = 2
    """Newest saves kept. The disk needs room for one more (else exit 3)."""
    save_keep_every: Count | None = None
    """N, a multiple of save_every: saves after multiples of N are kept for ever, beside those of save_keep."""
    save_best: bool = False
    """Save after every evaluation's step too, and keep the save with the least held-out loss."""
    save_compress: SaveCompression = "none"
    """zstd: bf16 weights shrink by 1.46, FP32 state by about 1.2, at 0.5 to 1 GB/s a core."""
    save_mirror: Url | None = None
    """URL (s3://bucket/run): saves are copied there while training goes on, and a start in an empty run_dir goes on
    from there. The disk needs room for one more save."""
    eval_every: StepsOrEpochs | None = None
    """N: evaluate held-out data before the first update, after every N and after the last; null: only before the first
    and after the last; 0: never."""
    eval_patience: Count | None = None
    """N evaluations in a row without a better held-out loss end the run early; null: never."""
    max_failures: NotNegative = 3
    """Deaths of processes, or GPU failures, that one start recovers from."""
    max_skipped: Count = 10
    """Steps in a row, skipped for a gradient norm that is not finite, that end the run."""
    log: LogConfig = LogConfig()
    """Where metrics go beside metrics.jsonl."""

    @property
    def save_interval(self) -> float | None:
        """Return the fewest updates between two saves; 0: there is one at the end only; None: there is none.

        It is infinite if it is a number of epochs, before TrainConfig.with_steps has counted their updates.
        """
        saved, evaluated = (math.inf if isinstance(n, str) else n for n in (self.save_every, self.eval_every))
        if saved is None or evaluated is None or not self.save_best:
            return saved
        return min(saved or evaluated, evaluated)

    @property
    def save_steps(self) -> int | None:
        """Return save_every in updates. TrainConfig.with_steps has replaced epochs by then."""
        assert not isinstance(self.save_every, str)
        return self.save_every

    @property
    def evaluates(self) -> bool:
        """Return whether there are held-out data that are evaluated."""
        return self.eval_every != 0 and self.data.held_out is not None

    @property
    def eval_steps(self) -> int:
        """Return the updates between two evaluations; 0: there are none. Epochs are replaced, as for `save_steps`."""
        assert not isinstance(self.eval_every, str)
        if not self.evaluates:
            return 0
        return max(1, self.train.num_steps) if self.eval_every is None else self.eval_every

    @property
    def counts_epochs(self) -> bool:
        """Return whether any setting is given in epochs, so that the rows of the data must be known."""
        return self.train.epochs is not None or any(isinstance(n, str) for n in (self.save_every, self.eval_every))

    def split(self) -> tuple[int, int]:
        """Return (micro_batch_size, accumulate) of one GPU; micro-batches of 1 if the plan is to choose them."""
        train = self.train
        if train.split_is_free:
            num_gpus = self.hardware.num_gpus
            return 1, (train.batch_size or num_gpus) // num_gpus
        return train.micro_batch_size or 1, train.accumulate or 1

    @property
    def num_step_rows(self) -> int:
        """Return the sequences of an update, over all GPUs: train.batch_size, also where that is left out."""
        return math.prod(self.split()) * self.hardware.num_gpus
