"""What a run is: the settings of a configuration file, checked when they are put together.

Sizes are bytes after construction, whatever they were written as. Keys that a later version brings are no fields: they
are refused by name (config_problems.py), never accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from megatrain_ray.config_problems import describe_problems, disagreements
from megatrain_ray.config_values import (
    Count,
    Group,
    Rate,
    Seed,
    Size,
    Text,
    WeightedPath,
    model_settings,
    name_patterns,
    names_of_data,
    only,
    optional_sources,
    sources_of_data,
)
from megatrain_ray.errors import ConfigError

SaveCompression = Literal["none", "zstd"]


class ModelConfig(Group):
    path: Text | None = None
    """Folder or hub id whose weights training starts from."""
    config: Annotated[dict[str, Any] | Text, BeforeValidator(model_settings)] | None = None
    """Mapping, or path of a config.json: this shape with random weights."""
    seed: Seed = 0
    """Of the random weights."""
    trust_remote_code: bool = False
    """Whether code that comes with a model may run."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How layers attend where a mask is needed: flex attention, or SDPA with whole masks. auto: flex where it works."""


class DataConfig(Group):
    kind: Literal["pretrain", "sft", "tokens"] = "pretrain"
    """Plain text; chats of which the answers are learned; or records that hold token ids."""
    path: Annotated[str | tuple[str, ...] | tuple[WeightedPath, ...], BeforeValidator(sources_of_data)]
    """Texts (.txt, .jsonl, .jsonl.zst, .parquet) or chats (.json, .jsonl, .jsonl.zst, .parquet, dataset_info.json):
    a path, a glob, a folder, a list of these or of {path, weight}."""
    eval_path: Annotated[str | tuple[str, ...] | tuple[WeightedPath, ...] | None, BeforeValidator(optional_sources)] = (
        None
    )
    """Held-out data, given as data.path is, for eval_every."""
    dataset: Annotated[str | tuple[str, ...], BeforeValidator(names_of_data)] | None = None
    """Names of chats in the dataset_info.json that data.path is."""
    eval_dataset: Annotated[str | tuple[str, ...], BeforeValidator(names_of_data)] | None = None
    """Names of chats in the dataset_info.json that data.eval_path is."""
    chat_format: Literal["auto", "alpaca", "sharegpt", "messages"] = "auto"
    """How records hold a chat; auto: recognised by their keys."""
    chat_template: Text | None = None
    """Jinja file that makes chats text. Unset: the tokenizer's own, else a plain one."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012, pydantic copies it
    """Variables of the chat template, such as enable_thinking."""
    truncation: Literal["turn", "drop"] = "turn"
    """A chat of more than seq_len + 1 tokens is cut after an answer, other token ids at the end; or they are left
    out."""
    text_field: Text = "text"
    """Key of a JSON line, or column of a Parquet file, that holds the text."""
    bad_records: Literal["error", "skip"] = "error"
    """Whether a record without a text or chat ends the start, or is skipped and counted."""
    tokenizer: Text | None = None
    """Folder, hub id, or `bytes` (ids 0-255, 256 ends a document). Unset: model.path's own."""
    seq_len: Count
    """Tokens of a sequence, inputs and targets alike (cut from windows of seq_len + 1)."""
    packing: bool = True
    """Join documents before cutting windows; false cuts each document alone."""
    shuffle: bool = True
    """Draw windows in a new random order each epoch."""
    seed: Seed = 0
    """Of the order."""

    @property
    def held_out(self) -> DataConfig | None:
        """What is evaluated, as data of its own: read and cut as the data of the training are."""
        if self.eval_path is None:
            return None
        own = {"path": self.eval_path, "dataset": self.eval_dataset, "eval_path": None, "eval_dataset": None}
        return self.model_copy(update=own)


class ParameterGroupConfig(Group):
    """Parameters with a learning rate or decay of their own."""

    match: Annotated[tuple[str, ...], BeforeValidator(name_patterns), Field(min_length=1)]
    """A pattern of parameter names, or a list of them."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Their peak learning rate; it follows the schedule in proportion. Unset: train.lr."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Of all that match, norms and biases too. Unset: train.weight_decay for matrices."""


class OptimizationConfig(Group):
    steps: Count
    """Updates in total, those before a resume included."""
    batch_size: Count | None = None
    """Sequences of an update, over all GPUs."""
    micro_batch_size: Count | None = None
    """Sequences of one forward on one GPU."""
    accumulate: Count | None = None
    """Micro-batches of an update."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate that the schedule ends at."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """How the learning rate falls from its peak over `steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates until the learning rate has its peak."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled decay of matrices per update, times the learning rate."""
    trainable: Annotated[tuple[str, ...], BeforeValidator(name_patterns)] = ()
    """Patterns (regular expressions) of parameter names: whatever none of them matches is frozen. Empty: nothing is."""
    freeze: Annotated[tuple[str, ...], BeforeValidator(name_patterns)] = ()
    """Patterns of the parameters that are frozen, out of the trainable ones."""
    groups: Annotated[tuple[ParameterGroupConfig, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or decay of their own: {match, lr, weight_decay}; the first match counts."""
    betas: Annotated[tuple[Rate, Rate], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments per update."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of AdamW's second moment."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global norm of the gradients; null: no clipping."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Times logsumexp(logits)² of each supervised token, added to its loss."""
    label_smoothing: Rate = 0.0
    """Share of a target's probability that is spread over the vocabulary."""
    seed: Seed = 0
    """Of dropout."""
    precision: Literal["bf16", "fp32", "tf32"] = "bf16"
    """Number format of the compute; masters are FP32 always."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients summed over micro-batches leave the device."""
    deterministic: bool = False
    """Use kernels that give the same bits on every run."""

    @property
    def split_is_free(self) -> bool:
        """Whether the plan may choose the micro-batches."""
        return self.micro_batch_size is None and self.accumulate is None


class HardwareConfig(Group):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where layers run; auto: a GPU where there is one."""
    num_gpus: Annotated[Count, only(1)] = 1
    """GPUs that share an update."""
    hbm_limit: Size | None = None
    """Bytes of GPU memory to use at most; null: what is there."""
    ram_limit: Size | None = None
    """Bytes of host memory to use at most; null: what is there."""
    num_shards: Count | None = None
    """Optimizer processes; null: one per NUMA node."""


class LogConfig(Group):
    tensorboard: bool = True
    """Event files in run_dir/tensorboard."""
    wandb: Text | None = None
    """Project of Weights & Biases to log to; its package and login are the user's."""
    mlflow: Text | None = None
    """Experiment of MLflow to log to, at the server that MLFLOW_TRACKING_URI names."""


class TrainConfig(Group):
    """A whole configuration. Raises ConfigError, with a line for every problem, when it is constructed."""

    model: ModelConfig
    """The model: model.path (weights from there) or model.config (random weights)."""
    data: DataConfig
    """The text: data.path and data.seq_len at least."""
    train: OptimizationConfig
    """The updates: train.steps at least."""
    hardware: HardwareConfig = HardwareConfig()
    """The machine."""
    run_dir: Text
    """Folder of the run: configuration, plan, metrics, saves."""
    resume: bool = True
    """Continue the run that run_dir holds; false: it must hold none."""
    save_every: Annotated[int, Field(ge=0)] | None = 0
    """Updates between saves; 0: at the end and on interrupt only; null: never."""
    save_keep: Count = 2
    """Newest saves that are kept."""
    save_compress: SaveCompression = "none"
    """Whether saves are compressed on their way to the disk."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Updates between evaluations of data.eval_path, which is also evaluated before the first update and after the
    last; 0: never."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Deaths of optimizer shards and arena owner that are made good within one start of the run."""
    log: LogConfig = LogConfig()
    """Where metrics go beside metrics.jsonl."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(value)
        except ValidationError as error:
            raise ConfigError(describe_problems(error, cls)) from None
        if problems := list(disagreements(config)):
            raise ConfigError("\n".join(problems))
        return config

    @property
    def tokenizer(self) -> str:
        """data.tokenizer, or model.path's own."""
        name = self.data.tokenizer or self.model.path
        assert name is not None  # disagreements
        return name

    def split(self) -> tuple[int, int]:
        """(micro_batch_size, accumulate) of one GPU. Micro-batches of 1 where batch_size alone is given."""
        train = self.train
        if train.split_is_free:
            return 1, (train.batch_size or 1) // self.hardware.num_gpus
        return train.micro_batch_size or 1, train.accumulate or 1

    def resolve(self, earlier: TrainConfig | None = None) -> TrainConfig:
        """The same with split and tokenizer filled in; a split that is left open stays that of the `earlier` run."""
        micro_batch_size, accumulate = self.split()
        batch_size = micro_batch_size * accumulate * self.hardware.num_gpus
        if earlier and self.train.split_is_free and earlier.resolve().train.batch_size == batch_size:
            micro_batch_size, accumulate = earlier.split()
        split = {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "accumulate": accumulate}
        return self.model_copy(
            update={
                "train": self.train.model_copy(update=split),
                "data": self.data.model_copy(update={"tokenizer": self.tokenizer}),
            }
        )
