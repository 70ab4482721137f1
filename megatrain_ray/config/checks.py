"""Finds settings that are valid one by one but not together. Each problem is one line with what to set instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.config.groups import NodeConfig, Settings
from megatrain_ray.config.objective_checks import objective_disagreements, rollout_disagreements
from megatrain_ray.config.train_groups import OptimizationConfig
from megatrain_ray.config.urls import is_url
from megatrain_ray.units import format_ranges, parse_ranges

# Keys of `data` that are valid for some kinds of data only, and these kinds.
RECORDED = ("pretrain", "sft", "tokens", "pairs", "unpaired")
KINDS_OF_KEY = {
    "eval_path": (*RECORDED, "rollouts", "prompts"),
    "bad_records": (*RECORDED, "rollouts"),
    "text_field": ("pretrain",),
    "add_bos": ("pretrain",),
    "add_eos": ("pretrain", "sft", "pairs", "unpaired", "rollouts", "prompts"),
    "dataset": ("sft", "pairs", "unpaired"),
    "eval_dataset": ("sft", "pairs", "unpaired"),
    "chat_format": ("sft", "pairs", "unpaired", "prompts"),
    "chat_template": ("sft", "pairs", "unpaired", "rollouts", "prompts"),
    "chat_template_args": ("sft", "pairs", "unpaired", "rollouts", "prompts"),
    "images": ("sft", "pairs", "unpaired"),
    "learn": ("sft",),
    "learn_reasoning": ("sft", "pairs", "unpaired"),
    "truncation": ("sft", "tokens", "pairs", "unpaired", "rollouts"),
    "eval_fraction": (*RECORDED, "prompts"),  # of rollouts it would tear groups apart
    "scale_rewards": ("rollouts", "prompts"),
    "unfinished": ("rollouts",),
    "stream": ("pretrain", "sft", "tokens"),
}


def disagreements(config: Settings) -> Iterator[str]:
    """Yield problems of settings that are valid one by one but not together; each line says what to set instead."""
    train = config.train
    yield from _model_disagreements(config)
    if train.compute == "fp8" and train.precision != "bf16":
        yield f"train.compute: fp8 goes with train.precision: bf16, and that is {train.precision}; set bf16"
    if train.min_lr > train.lr:
        yield f"train.min_lr: {train.min_lr} is more than train.lr: {train.lr}; set it to at most that"
    yield from _length_disagreements(config)
    for number, group in enumerate(train.groups):
        if group.lr is None and group.weight_decay is None and group.optimizer is None:
            yield f"train.groups.{number}: no lr, weight_decay or optimizer; set one of them, or leave the group out"
    yield from _node_disagreements(config.hardware.nodes)
    yield from _gpu_disagreements(config)
    yield from _several_hosts_disagreements(config)
    yield from _missing_paths(config)
    yield from _save_disagreements(config)
    yield from _muon_disagreements(train)
    yield from _kind_disagreements(config.data)
    yield from _stream_disagreements(config)
    yield from objective_disagreements(config)
    yield from rollout_disagreements(config)
    yield from _image_disagreements(config)
    yield from _batch_disagreements(config)


def _model_disagreements(config: Settings) -> Iterator[str]:
    model = config.model
    if model.path is not None and model.config is not None:
        yield "model.path and model.config are both set: keep path to start from its weights, config for random ones"
    if model.path is None and model.config is None:
        yield "model.path or model.config is required: a folder with weights, or a shape to fill with random ones"
    if model.config is not None and model.path is None and config.data.tokenizer is None:
        yield "data.tokenizer is required with model.config: a folder with a tokenizer.json, or bytes"


def _length_disagreements(config: Settings) -> Iterator[str]:
    train, trace = config.train, config.log.trace
    if train.steps is None and train.epochs is None:
        yield "train.steps or train.epochs is required: how long to train, in updates or in passes over the data"
    if train.steps is not None and train.epochs is not None:
        yield f"train.steps: {train.steps} and train.epochs: {train.epochs:g} are both set; set one of them to null"
    if train.steps == 0 and not config.evaluates:
        yield "train.steps: 0 makes no update, and no held-out data are evaluated; set train.steps or data.eval_path"
    if train.steps is not None and train.warmup_steps > train.steps:
        remedy = f"set train.warmup_steps to {train.steps} or fewer, or train.steps to {train.warmup_steps} or more"
        yield f"train.warmup_steps: {train.warmup_steps} is more than train.steps: {train.steps}; {remedy}"
    if trace and not trace[0] <= trace[1] <= (train.steps or trace[1]):
        yield f"log.trace: {list(trace)}: expected two steps with 1 ≤ first ≤ last ≤ train.steps: {train.steps}"


def relative_paths(config: Settings) -> Iterator[str]:
    """Yield the beginning of a message for each of run_dir and spill.path that is relative."""
    for key, path in (("run_dir", config.run_dir), ("spill.path", config.spill.path)):
        if path is not None and not Path(path).is_absolute():
            yield f"{key}: {path} is relative"


def _node_disagreements(nodes: Sequence[NodeConfig]) -> Iterator[str]:
    for k, node in enumerate(nodes):
        for j, earlier in enumerate(nodes[:k]):
            for key, remedy in (("cpus", "give each CPU to one"), ("gpus", "each is attached to one")):
                numbers, others = (set(parse_ranges(getattr(each, key) or "")) for each in (node, earlier))
                if shared := numbers & others:
                    yield f"hardware.nodes.{k}.{key}: {format_ranges(shared)} is of hardware.nodes.{j} too; {remedy}"
            if node.gpu and earlier.gpu:
                yield (
                    f"hardware.nodes.{k}.gpu: hardware.nodes.{j} has it too, and it is all GPUs; name those of each "
                    "node as gpus"
                )
    if any(node.gpu for node in nodes) and any(node.gpus for node in nodes):
        yield "hardware.nodes: gpu: true is all GPUs, and gpus some of them; give one of the two keys alone"


def _gpu_disagreements(config: Settings) -> Iterator[str]:
    hardware, train = config.hardware, config.train
    num_gpus, num_hosts = hardware.num_gpus, hardware.num_hosts
    if num_gpus % num_hosts:
        yield (
            f"hardware.num_gpus: {num_gpus}, of all hosts together, cannot be divided among hardware.num_hosts: "
            f"{num_hosts}; set a multiple of {num_hosts}"
        )
    if hardware.all_gather is True and num_gpus == 1:
        yield "hardware.all_gather: true takes several GPUs, and hardware.num_gpus is 1; leave one of the two out"
    if train.split_is_free and (train.batch_size or num_gpus) % num_gpus:
        yield (
            f"train.batch_size: {train.batch_size} sequences cannot be divided among hardware.num_gpus: {num_gpus}; "
            f"set a multiple of {num_gpus}"
        )
    if hardware.cuda_graphs is True and num_gpus > 1:
        yield (
            f"hardware.cuda_graphs: true goes with one GPU so far, and hardware.num_gpus is {num_gpus}; leave one of "
            "the two out"
        )


def _several_hosts_disagreements(config: Settings) -> Iterator[str]:
    num_hosts = config.hardware.num_hosts
    if num_hosts == 1:
        return
    if config.hardware.all_gather is False:
        yield (
            f"hardware.all_gather: false needs whole layers on every host, and each of hardware.num_hosts: "
            f"{num_hosts} has a part; leave it out"
        )
    for setting, is_set, why in (
        ("log.trace", config.log.trace is not None, "clocks of several are not one"),
        ("train.optimizer: muon", config.train.optimizer == "muon", "a matrix would be divided among several"),
    ):
        if is_set:
            yield (
                f"{setting} goes with one host so far, since {why}, and hardware.num_hosts is {num_hosts}; leave one "
                "of the two out"
            )
    for problem in relative_paths(config):
        yield f"{problem}, and other hosts have other working directories; give an absolute path"


def _missing_paths(config: Settings) -> Iterator[str]:
    data = config.data
    if config.eval_every and data.held_out is None:
        yield (
            f"data.eval_path or data.eval_fraction is required with eval_every: {config.eval_every}: held-out files, "
            "given as data.path is, or a share of its records"
        )
    if data.eval_fraction is not None and (data.eval_path is not None or data.eval_dataset is not None):
        other = "eval_dataset" if data.eval_path is None else "eval_path"
        yield f"data.eval_fraction: {data.eval_fraction:g} and data.{other} are both set; keep one of the two"
    for key, path, more in (
        ("run_dir", config.run_dir, "; save_mirror copies its saves to a URL"),
        ("spill.path", config.spill.path, ""),
    ):
        if path is not None and is_url(path):
            yield f"{key}: it is a URL; name a folder of this machine{more}"
    if config.spill.limit is not None and config.spill.path is None:
        yield f"spill.path is required with spill.limit: {config.spill.limit}: a folder on the disk that it is of"


def _save_disagreements(config: Settings) -> Iterator[str]:
    for key, is_set in (("save_best: true", config.save_best), ("eval_patience", config.eval_patience is not None)):
        if is_set and not config.eval_every:
            yield f"eval_every is required with {key}: after how many updates the held-out data are evaluated"
    if config.save_best and config.save_every is None:
        yield "save_best: true needs saves, and save_every: null makes none; set save_every: 0 or more"
    if config.save_mirror is not None and config.save_every is None:
        yield "save_mirror: needs saves, and save_every: null makes none; set save_every: 0 or more"
    every, kept = config.save_every, config.save_keep_every
    if kept is not None and (not every or isinstance(every, str)):
        shown = "null" if every is None else every
        yield (
            f"save_keep_every: {kept} keeps some of the saves of save_every, which is {shown}; set save_every: {kept}, "
            "or a number that divides it"
        )
    elif kept is not None and isinstance(every, int) and kept % every:
        multiple = every * max(1, round(kept / every))
        yield f"save_keep_every: {kept} is no multiple of save_every: {every}; set save_keep_every: {multiple}"


def _muon_disagreements(train: OptimizationConfig) -> Iterator[str]:
    if train.optimizer == "muon":
        if train.moments != "fp32":
            yield f"train.moments: {train.moments} goes with AdamW alone, and train.optimizer is muon; set fp32"
        return
    for number, group in enumerate(train.groups):
        if group.optimizer == "muon":
            yield f"train.groups.{number}.optimizer: muon goes with train.optimizer: muon; set that, or leave it out"
    for key, field in type(train.muon).model_fields.items():
        if getattr(train.muon, key) != field.default:
            yield f"train.muon.{key}: goes with train.optimizer: muon; set that, or leave the key out"


def _kind_disagreements(data: DataConfig) -> Iterator[str]:
    for key, kinds in KINDS_OF_KEY.items():
        if data.kind not in kinds and getattr(data, key) != type(data).model_fields[key].default:
            expected = " or ".join(kinds)
            yield f"data.{key}: goes with data.kind: {expected}, and data.kind is {data.kind}; leave the key out"
    if data.add_eos is not None and data.has_chats and data.tokenizer != "bytes":
        yield "data.add_eos: the chat template decides how an answer ends, but with data.tokenizer: bytes; leave it out"
    if data.add_eos and data.kind == "pretrain" and data.packing:
        yield "data.add_eos: data.packing joins texts by the eos token already; leave the key out, or pack nothing"


def _image_disagreements(config: Settings) -> Iterator[str]:
    yield from _vision_disagreements(config)
    if not config.data.images:
        return
    if config.train.objective in ("distill", "reward"):
        yield f"data.images: true does not go with train.objective: {config.train.objective} so far; leave one out"
    if config.hardware.num_hosts > 1:
        yield "data.images: every GPU worker reads the features of images from one disk; set hardware.num_hosts: 1"
    if config.hardware.cuda_graphs is True:
        yield "data.images: rows differ in their images, so hardware.cuda_graphs: true cannot be; set it to auto"
    if config.data.tokenizer == "bytes":
        yield "data.images: the tokenizer bytes has no token for images; set data.tokenizer to the model's folder"


def _vision_disagreements(config: Settings) -> Iterator[str]:
    vision = config.train.vision
    if vision == "frozen":
        return
    if not config.data.images:
        yield f"train.vision: {vision} goes with data.images: true; set that, or leave the key out"
    if config.train.compute == "fp8":
        yield f"train.vision: {vision} does not go with train.compute: fp8 so far; leave one of the two out"
    if config.hardware.block_parts not in ("auto", 1):
        yield f"train.vision: {vision} does not go with hardware.block_parts so far; leave one of the two out"


def _stream_disagreements(config: Settings) -> Iterator[str]:
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


def _batch_disagreements(config: Settings) -> Iterator[str]:
    train, num_gpus = config.train, config.hardware.num_gpus
    if train.batch_size is None or train.split_is_free:
        return
    micro_batch_size, accumulate = config.split()
    product = config.num_step_rows
    if product == train.batch_size:
        return
    factor, rest = divmod(train.batch_size, product)
    remedy = f"train.batch_size: {product}"
    if rest == 0 and train.accumulate is None:
        remedy = f"train.accumulate: {factor}"
    elif rest == 0 and train.micro_batch_size is None:
        remedy = f"train.micro_batch_size: {factor}"
    yield (
        f"train.batch_size: {train.batch_size} disagrees with micro_batch_size × accumulate × num_gpus = "
        f"{micro_batch_size} × {accumulate} × {num_gpus} = {product} (each 1 when unset); set {remedy}"
    )
