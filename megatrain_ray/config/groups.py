"""Defines the settings of a configuration file, in groups.

Sizes are numbers of bytes after construction, however they were written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatrain_ray.config.train_groups import LoraConfig, OptimizationConfig
from megatrain_ray.config.values import (
    Count,
    CpuList,
    GpuList,
    Group,
    ModelSettings,
    Names,
    NotNegative,
    Seed,
    Size,
    Sources,
    StepsOrEpochs,
    StepsOrSeconds,
    Switch,
    TemplateArguments,
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


class DataConfig(Group):
    kind: Literal["pretrain", "sft", "tokens", "pairs", "unpaired", "rollouts", "prompts"] = "pretrain"
    """pretrain: texts; sft: chats, of which answers are learned; tokens: token ids; pairs: chosen and rejected answers;
    unpaired: answers that are labelled good or bad; rollouts: sampled answers with rewards;
    prompts: the run samples these itself (train.rollouts).
    Keys of other kinds are refused."""
    path: Sources
    """File, glob, folder, URL (s3://…), hub id (OWNER/NAME), a list of these, or a list of {path, weight} or {hub,
    name, split, revision, weight}. Formats: .jsonl, .json, .csv, .tsv (each also
    with .gz or .zst), .parquet, .arrow; texts: .txt as well; chats: dataset_info.json as well."""
    eval_path: Sources | None = None
    """Held-out data for eval_every, given like data.path."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In place of data.eval_path: share of the records of data.path that are held out. A hash of each decides, so
    records that are added later change nothing for the others."""
    max_records: Count | None = None
    """Only the first records of each source (a list without weights is one), or of each data set of data.dataset, are
    used, held-out ones as well; null: all."""
    dataset: Names | None = None
    """sft, pairs, unpaired: names in the dataset_info.json that data.path is."""
    eval_dataset: Names | None = None
    """The same for data.eval_path."""
    chat_format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion"] = "auto"
    """sft, unpaired: format of the records; pairs: of their prompts; auto: by each record's keys."""
    chat_template: Text | None = None
    """Of chats: chatml, llama3, qwen, gemma, mistral, or a Jinja file; null: the tokenizer's own, else a plain one."""
    chat_template_args: TemplateArguments = {}  # noqa: RUF012, pydantic copies it
    """Variables of the template, such as {enable_thinking: false}."""
    images: bool = False
    """sft, pairs, unpaired: chats may hold images. The model's vision tower computes their features once, unless
    train.vision says otherwise."""
    learn: Literal["all", "last"] = "all"
    """sft: answers of a chat that are learned: all, or only the last."""
    learn_reasoning: bool = True
    """sft, pairs, unpaired: true: thoughts in answers are learned; false: answers are learned given their thoughts."""
    truncation: Literal["turn", "drop"] = "turn"
    """A longer chat is cut after an answer (turn) or left out (drop); token ids, pairs and rollouts are cut at the end
    or left out."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rollouts: an advantage is the reward - its group's mean, divided by the group's standard deviation (group), by
    that of all records of the source (batch), or not."""
    unfinished: Literal["learn", "drop"] = "learn"
    """rollouts: answers with `ended: false` are learned like others, or only their rewards count in their group."""
    text_field: Text = "text"
    """pretrain: JSON key or Parquet column of the text."""
    add_bos: bool | None = None
    """pretrain: begin each text with the tokenizer's bos token. null: if Transformers does, decided when a run
    begins."""
    add_eos: bool | None = None
    """pretrain without packing: end each text with the tokenizer's eos token, as packing does; sft with `bytes`: end
    each answer with id 256. null: if the model has that id, decided when a run begins."""
    bad_records: Literal["error", "skip"] = "error"
    """error: the first bad record ends the start; skip: bad records are counted."""
    tokenizer: Text | None = None
    """Folder with a tokenizer.json, hub id, or `bytes` (ids 0 to 255; 256 ends a document). null: model.path's own."""
    seq_len: Count
    """Inputs of a sequence, and as many targets, cut from windows of seq_len + 1 tokens."""
    stream: Size | None = None
    """pretrain, sft, tokens: fetch and tokenise the sources while training goes on, and keep at most so many bytes of
    them on disk, in run_dir/stream (20GB); null: sources are tokenised whole before it."""
    stream_portion: Size | None = None
    """Small files of a stream are fetched and tokenised up to so many bytes together; null: 256MB."""
    packing: bool = True
    """true: a row holds several documents, whole chats or pairs, which do not see one another; false: one, or one
    pair, of which each answer has half the row."""
    shuffle: bool = True
    """Order the windows anew each epoch."""
    seed: Seed = 0
    """Seed of the order."""

    def decided_marks(self, tokenizer: str) -> tuple[str, ...]:
        """Return the keys that are decided when a run begins: of texts, and of chats with the tokenizer `bytes`."""
        if self.kind == "pretrain":
            return "add_bos", "add_eos"
        return ("add_eos",) if self.has_chats and tokenizer == "bytes" else ()

    @property
    def held_out(self) -> HeldOutConfig | None:
        """Return the held-out data as a configuration of its own; None if there are none.

        They are read and cut like the training data.
        """
        own: dict[str, Any] = {}
        if self.eval_path is not None:
            own = {
                "path": self.eval_path, "dataset": self.eval_dataset, "eval_path": None, "eval_dataset": None,
                "stream": None,
            }  # fmt: skip
        elif self.eval_fraction is None:
            return None
        return HeldOutConfig.model_construct(**{**dict(self), **own})

    @property
    def key(self) -> str:
        """Return the key that names the files of these data."""
        return "data.path"

    @property
    def in_pairs(self) -> bool:
        """Return whether the data are preferences."""
        return self.kind == "pairs"

    @property
    def documents_per_record(self) -> int:
        """Return how many answers of a record the objective takes as wholes; 0: it is of single tokens."""
        return {"pairs": 2, "unpaired": 1, "rollouts": 1, "prompts": 1}.get(self.kind, 0)

    @property
    def has_chats(self) -> bool:
        """Return whether a chat template writes the data."""
        return self.kind in ("sft", "pairs", "unpaired", "rollouts", "prompts")

    @property
    def answers(self) -> Literal["learned", "preferred", "labelled"]:
        """Return what records say of their answers."""
        if self.is_labelled:
            return "labelled"
        return "preferred" if self.in_pairs else "learned"

    @property
    def is_labelled(self) -> bool:
        """Return whether the data are answers that are labelled good or bad."""
        return self.kind == "unpaired"

    @property
    def joins_documents(self) -> bool:
        """Return whether a window of the data may hold several documents. It holds one prompt."""
        return self.packing and self.kind != "prompts"

    def of_rollouts(self, file: Path) -> DataConfig:
        """Return how the answers to these prompts in a file are read."""
        return self.model_copy(update={"kind": "rollouts", "path": str(file), "shuffle": False})

    @property
    def hash_range(self) -> tuple[float, float]:
        """Return [start, stop): a record is one of these data if its hash, in [0, 1), is in that range."""
        return self.eval_fraction or 0.0, 1.0


class HeldOutConfig(DataConfig):
    """Describes held-out data as if they were training data."""

    @property
    def key(self) -> str:
        return "data.eval_path" if self.eval_fraction is None else "data.path"

    @property
    def hash_range(self) -> tuple[float, float]:
        return 0.0, self.eval_fraction or 1.0


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
