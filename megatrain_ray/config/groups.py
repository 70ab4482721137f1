"""Defines the settings of a configuration file, in groups.

Sizes are numbers of bytes after construction, however they were written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megatrain_ray.config.values import (
    Count,
    CpuList,
    GpuList,
    Group,
    ModelSettings,
    Names,
    NotNegative,
    Patterns,
    Positive,
    Rate,
    Seed,
    Size,
    Sources,
    Switch,
    Text,
)  # fmt: skip

SaveCompression = Literal["none", "zstd"]


class ModelConfig(Group):
    path: Text | None = None
    """Folder of a Hugging Face model (safetensors), or a hub id: training starts from its weights."""
    config: ModelSettings | None = None
    """Mapping, or path of a config.json: this shape with random weights. Exactly one of the two."""
    seed: Seed = 0
    """Of the random weights."""
    trust_remote_code: bool = False
    """true: code that comes in the model's folder may run, where Transformers has no such model itself."""
    attention: Literal["sdpa", "flex", "auto"] = "auto"
    """How layers attend where plain causal attention over whole rows is not enough (several documents in a row, sliding
    windows). sdpa: with whole masks of seq_len² bytes a sequence; flex: flex attention, which needs a GPU and a model
    that Transformers lets use it; auto: flex where it works, else sdpa. Where no mask is needed it is SDPA always, or
    what a model without SDPA has."""


class DataConfig(Group):
    kind: Literal["pretrain", "sft", "tokens"] = "pretrain"
    """pretrain: texts; sft: chats of which the answers are learned; tokens: records of token ids. A key of
    another kind is refused."""
    path: Sources
    """A path, a glob, a folder, a list of these, or a list of {path, weight}. Texts: .txt, .jsonl, .jsonl.zst,
    .parquet; chats: .json, .jsonl, .jsonl.zst, .parquet, dataset_info.json; token ids: as chats, without the
    last."""
    eval_path: Sources | None = None
    """Held-out data, given as data.path is, for eval_every."""
    dataset: Names | None = None
    """sft: a name, or a list of names, in the dataset_info.json that data.path is."""
    eval_dataset: Names | None = None
    """sft: the same of the dataset_info.json that data.eval_path is."""
    chat_format: Literal["auto", "alpaca", "sharegpt", "messages"] = "auto"
    """sft: how records hold a chat; auto: recognised by the keys of each record."""
    chat_template: Text | None = None
    """sft: a Jinja file that makes chats text; null: the tokenizer's own, else a plain one."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012, pydantic copies it
    """sft: variables of the template, such as {enable_thinking: false}."""
    truncation: Literal["turn", "drop"] = "turn"
    """sft: a chat of more than seq_len + 1 tokens is cut after an answer (turn) or left out (drop). tokens: a
    sequence is cut at the end, or left out."""
    text_field: Text = "text"
    """pretrain: key of a JSON line, or column of a Parquet file, that holds the text."""
    bad_records: Literal["error", "skip"] = "error"
    """skip: records without a text, and chats that are wrong, are skipped and counted; error: the first one ends
    the start."""
    tokenizer: Text | None = None
    """Folder with a tokenizer.json, hub id, or `bytes` (ids 0 to 255; 256 ends a document). null: model.path's
    own."""
    seq_len: Count
    """Inputs of a sequence, and as many targets, cut from windows of seq_len + 1 tokens. The last short window
    of a document is dropped unless it is the only one."""
    packing: bool = True
    """Documents are joined before windows are cut, chats stand whole in rows side by side, and none sees
    another; false: each is cut alone."""
    shuffle: bool = True
    """A new order of windows each epoch."""
    seed: Seed = 0
    """Of the order."""

    @property
    def held_out(self) -> DataConfig | None:
        """Return the held-out data as a configuration of its own; None if data.eval_path is not set.

        They are read and cut like the training data.
        """
        if self.eval_path is None:
            return None
        own = {"path": self.eval_path, "dataset": self.eval_dataset, "eval_path": None, "eval_dataset": None}
        return self.model_copy(update=own)


class ParameterGroupConfig(Group):
    """Gives a group of parameters their own learning rate, decay or optimizer."""

    match: Annotated[Patterns, Field(min_length=1)]
    """A pattern of parameter names, or a list of them."""
    lr: Positive | None = None
    """Their peak learning rate; it follows the schedule in proportion. Unset: train.lr."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Of all that match, norms and biases too. Unset: train.weight_decay for matrices."""
    optimizer: Literal["adamw", "muon"] | None = None
    """With train.optimizer: muon, what trains them. Unset: Muon the matrices of the layers, AdamW the rest."""


class MuonConfig(Group):
    """Holds Muon's own settings; learning rate and decay are those of `train`."""

    momentum: Rate = 0.95
    """Weight of the old momentum in the new one."""
    nesterov: bool = True
    """What is orthogonalised is a step ahead of the momentum: as much of the gradient again."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz steps that orthogonalise a matrix, in bf16."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What a matrix's shape makes of its learning rate. match_rms_adamw: × 0.2·√max(rows, columns), so that a learning
    rate and decay that suit AdamW suit Muon; original: × √max(1, rows/columns)."""


class OptimizationConfig(Group):
    steps: Count
    """Updates in total, those before a resume included."""
    batch_size: Count | None = None
    """Sequences of an update = batch_size, or micro_batch_size × accumulate; null: what the others say, 1 where
    none does."""
    micro_batch_size: Count | None = None
    """Sequences of one forward; with batch_size alone the plan chooses it."""
    accumulate: Count | None = None
    """Micro-batches of an update."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that the schedule ends at."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """How the learning rate falls from its peak to min_lr over train.steps, after a linear warm-up."""
    warmup_steps: NotNegative = 0
    """Updates until the learning rate has its peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay per update, times the learning rate; none on norms and biases."""
    trainable: Patterns = ()
    """Patterns (regular expressions) of parameter names: whatever none of them matches is frozen. Empty: nothing is."""
    freeze: Patterns = ()
    """Patterns of the parameters that are frozen, out of the trainable ones."""
    groups: Annotated[tuple[ParameterGroupConfig, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or decay of their own: {match, lr, weight_decay, optimizer}; the first match
    counts."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon trains the matrices of the layers, AdamW all else (embeddings, head, norms, biases)."""
    muon: MuonConfig = MuonConfig()
    """Muon's own numbers."""
    betas: Annotated[tuple[Rate, Rate], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments per update."""
    eps: Positive = 1e-8
    """Added to the root of AdamW's second moment."""
    clip: Positive | None = 1.0
    """Largest global norm of the gradients; null: off, and updates start under the backward."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """This times logsumexp(logits)² of each supervised token is added to its loss, which keeps logits near zero;
    PaLM used 1e-4."""
    label_smoothing: Rate = 0.0
    """This share of a target's probability is spread over the vocabulary, as torch's CrossEntropyLoss does."""
    seed: Seed = 0
    """Of dropout, and of what moments in bf16 are rounded with."""
    precision: Literal["bf16", "fp32", "tf32"] = "bf16"
    """Number format of the compute; masters are FP32 always."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """bf16: AdamW's moments take half the room, rounded stochastically, which is not what plain PyTorch computes; not
    with Muon."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16: sums over micro-batches are rounded once before they leave the device."""
    deterministic: bool = False
    """Use kernels that give the same bits on every run."""

    @property
    def split_is_free(self) -> bool:
        """Return whether the plan may choose micro-batch size and accumulation."""
        return self.micro_batch_size is None and self.accumulate is None


class LoraConfig(Group):
    """Configures low-rank adapters: pairs of thin trained matrices added to frozen linear layers."""

    match: Annotated[Patterns, Field(min_length=1)]
    """Patterns (regular expressions) over the paths of linear modules: those that get a pair. All else is frozen
    but what train.trainable matches."""
    rank: Count = 16
    """The thin side of a pair's two matrices."""
    alpha: Positive = 32.0
    """The product of a pair is scaled by alpha ÷ rank."""
    dropout: Rate = 0.0
    """Of what goes into a pair."""
    path: Text | None = None
    """Folder of an adapter (peft's format), or a hub id, to go on from. null: a new one."""


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
    """Where layers run; auto: a GPU where there is one."""
    num_gpus: Count = 1
    """GPUs that train together, on all hosts, each on its share of every batch; on the CPU device as many processes
    that stand for them."""
    num_hosts: Count = 1
    """Machines of a Ray cluster that these GPUs are on, as many on each; each has its share of the optimizer state, and
    of the working copies in host memory."""
    all_gather: Switch = "auto"
    """Each of several GPUs uploads its part of a layer alone and has the rest from the others, by an all-gather; else
    each uploads all of it. auto: where that is predicted to be faster, and always of several hosts, each of which has a
    part alone."""
    hbm_limit: Size | None = None
    """Bytes of GPU memory that the plan may use, and that the run takes at most; null: what is there."""
    ram_limit: Size | None = None
    """Bytes of host memory that the plan may use; null: what is there."""
    hbm_layers: NotNegative | None = None
    """Layers, from the embedding on, whose weights, gradients and optimizer state live in GPU memory; null: as many as
    there is room for (none on the CPU)."""
    num_shards: Count | None = None
    """Optimizer processes; null: one per NUMA node."""
    nodes: Annotated[tuple[NodeConfig, ...], Field(strict=False)] = ()
    """NUMA nodes by hand, each `{cpus: 0-15, memory: 0, gpus: 0-3}`, or with `gpu: true` for all GPUs, in the place of
    those that the kernel shows; one alone: nothing is put on any node."""
    profile: Text = "auto"
    """File with the rates that plans are chosen by; auto: measured once on a GPU, built-in ones elsewhere."""
    compile: Switch = "auto"
    """Layers and the loss run through torch.compile, before the first step once for each kind of layer; one that cannot
    be compiled runs as it is, and the log says why. auto: on a GPU, unless train.deterministic."""
    block_parts: Literal["auto"] | Count = "auto"
    """Layers that each block is divided into at most, between attention, the matrices of its MLP and groups of experts:
    each has slots, gradients and updates of its own, so that blocks larger than GPU memory train; they are not
    compiled. auto: 1, or where whole blocks do not fit what is predicted to be the fastest."""
    cuda_graphs: Switch = "auto"
    """A step's forward and backward are one CUDA graph, which the GPU launches by itself, where all layers live in its
    memory; a step that cannot be captured runs layer by layer, and the log says why. auto: where launching layers takes
    longer than computing them."""


class SpillConfig(Group):
    path: Text | None = None
    """Folder, made when missing, for activations and gradients that wait, optimizer state and weights of layers that
    host memory has no room for; it should be on a local NVMe drive. Nothing of it stays on the disk after a run,
    however that ended. null: all is in memory."""
    limit: Size | None = None
    """Bytes of that disk that the plan may use; null: what is free there but for 1 GiB."""
    io: Literal["auto", "posix", "kvikio"] = "auto"
    """Who reads and writes there: posix, threads of ours past the page cache; kvikio, those of that library, an extra
    that needs CUDA's driver; auto: kvikio where it is installed, works there and was measured to be faster."""
    compression: Literal["auto", "none", "zstd"] = "auto"
    """zstd: what is alike in floats, but for activations, takes less of that disk, for the work of some cores and 96
    MiB of host memory for each optimizer shard; auto: where that was measured to be faster and there is the room."""


class LogConfig(Group):
    tensorboard: bool = True
    """Event files in run_dir/tensorboard."""
    wandb: Text | None = None
    """Project of Weights & Biases (`pip install megatrain-ray[wandb]`); its own environment variables name
    server and account. A tracker that fails while the run is up is given up with a warning."""
    mlflow: Text | None = None
    """Experiment of MLflow (`pip install megatrain-ray[mlflow]`), at the server that MLFLOW_TRACKING_URI names."""
    prometheus: bool = True
    """Series for Prometheus, which Ray's agent on each node exports."""
    trace: Annotated[tuple[Count, Count], Field(strict=False)] | None = None
    """[first step, last step]: a timeline of all processes in these steps, as a file in run_dir that Perfetto opens."""


class Settings(Group):
    """Holds all groups of settings. `TrainConfig` (schema.py) checks that they agree."""

    model: ModelConfig
    """The model: model.path (weights from there) or model.config (random weights)."""
    data: DataConfig
    """The text: data.path and data.seq_len at least."""
    train: OptimizationConfig
    """The updates: train.steps at least."""
    lora: LoraConfig | None = None
    """Train adapters and leave the model as it is; null: train the model."""
    hardware: HardwareConfig = HardwareConfig()
    """The machine."""
    spill: SpillConfig = SpillConfig()
    """Where optimizer state goes that host memory has no room for."""
    run_dir: Text
    """Folder of the run: configuration, plan, metrics, saves."""
    resume: bool = True
    """Continue the run that run_dir holds; false: it must hold none."""
    save_every: NotNegative | None = 0
    """0: at the end and when interrupted; N: every N updates as well; null: never, and no room on the disk is
    asked for."""
    save_keep: Count = 2
    """Newest saves that are kept; while one more is written there must be room for that too, or the start is
    refused (exit 3)."""
    save_compress: SaveCompression = "none"
    """zstd: bf16 weights shrink by 1.46, FP32 masters and moments by about 1.2, at 0.5 to 1 GB/s a core."""
    eval_every: NotNegative = 0
    """N: data.eval_path is evaluated before the first update, after every N and after the last; 0: never."""
    max_failures: NotNegative = 3
    """Deaths of the run's processes, or failures of its GPU, that are made good within one start of the run; one more
    ends it with exit 1."""
    max_skipped: Count = 10
    """Steps in a row that may be skipped for a gradient norm that is not finite; so many end the run with exit 1, and
    the saves before them stay."""
    log: LogConfig = LogConfig()
    """Where metrics go beside metrics.jsonl."""

    def split(self) -> tuple[int, int]:
        """Return (micro_batch_size, accumulate) of one GPU; micro-batches of 1 if the plan is to choose them."""
        train = self.train
        if train.split_is_free:
            num_gpus = self.hardware.num_gpus
            return 1, (train.batch_size or num_gpus) // num_gpus
        return train.micro_batch_size or 1, train.accumulate or 1
