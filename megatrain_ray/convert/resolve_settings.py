"""Makes settings of what the tables found, where the meaning of a key depends on other keys, the model or the data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain_ray.config.checks import KINDS_OF_KEY
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.other_tools import RESOLVED_KEYS
from megatrain_ray.config.yaml_file import override
from megatrain_ray.convert.conversions import EVERY_LINEAR
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import PLAIN, load_chat_template, read_named_template

FREEZING = ("freeze_layers", "freeze_modules", "freeze_extra")
MAX_WARMUP_STEPS = 100  # upper limit of Axolotl's default warm-up
UNWARMED = "constant without warm-up"  # what shared.yaml makes of a schedule without warm-up
EMBEDDINGS = ["embed_tokens", "lm_head"]
GROUPS = ("model", "data", "train", "lora", "hardware")


def resolve(
    found: Mapping[str, Any],
    default_warmup: float,
    settings: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    *,
    num_gpus: int = 1,
) -> dict[str, Any]:
    """Return what a table has found as a tree of settings from which a configuration can be made.

    found: settings and names in `RESOLVED_KEYS`, by dotted key.
    default_warmup: share of the steps for warm-up if nothing is set.
    settings, overrides: settings that take precedence over `found`, overrides over both.
    num_gpus: as in `convert`.
    """
    theirs = {key: value for key, value in found.items() if key in RESOLVED_KEYS}
    given = {key: value for key, value in found.items() if key not in RESOLVED_KEYS}
    _resolve_model_and_data(given, theirs)
    _resolve_numbers(given, theirs)
    _resolve_lora(given, theirs)
    _resolve_batch(given, num_gpus)
    tree = _merged(_nested(given), settings or {})
    for text in overrides:
        override(tree, text)
    if "freeze_layers" in theirs and "trainable" not in tree["train"]:
        tree["train"]["trainable"] = _trainable_layers(tree["model"], theirs)
    if groups := _parameter_groups(theirs, tree["train"].get("lr", 0.0)):
        tree["train"].setdefault("groups", groups)
    _resolve_template(tree, theirs)
    _resolve_steps(tree, theirs, default_warmup)
    return {key: tree[key] for key in (*GROUPS, *tree) if key in tree}


def _resolve_model_and_data(given: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    if (revision := theirs.get("revision", "main")) != "main":
        given["model.path"] = f"{given.get('model.path')}@{revision}"
    if theirs.get("neat_packing"):
        given["data.packing"] = True
    if "enable_thinking" in theirs:
        given["data.chat_template_args"] = {"enable_thinking": bool(theirs["enable_thinking"])}
    for key, kinds in KINDS_OF_KEY.items():
        if given.get("data.kind", kinds[0]) not in kinds:  # unset where the data sets cannot be honoured
            given.pop(f"data.{key}", None)


def _resolve_numbers(given: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    given["train.betas"] = [theirs["beta1"], theirs["beta2"]]
    half = theirs.get("bf16") or theirs.get("fp16")
    given["train.precision"] = "bf16" if half else "tf32" if theirs.get("tf32") else "fp32"
    if (steps := theirs.get("logging_steps", 0)) >= 1:  # a number below 1 is a share of the steps
        given["log.every"] = int(steps)
    if theirs.get("optimizer") == "muon":
        given["train.optimizer"] = "muon"
    given["train.seed"] = theirs["seed"]
    given["data.seed"] = theirs.get("data_seed", theirs["seed"])
    if "min_lr_ratio" in theirs and "train.lr" in given:
        given["train.min_lr"] = theirs["min_lr_ratio"] * given["train.lr"]


def _resolve_lora(given: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Drop the settings of adapters if the method is not lora, as the tools do; otherwise complete them.

    A missing alpha becomes twice the rank, as in LLaMA-Factory.
    """
    lora = {key: given.pop(key) for key in list(given) if key.startswith("lora.")}
    if theirs.get("method", "full") != "lora":
        return
    if theirs.get("every_linear"):
        lora["lora.match"] = [EVERY_LINEAR, *lora.get("lora.match", [])]
    if "lora.rank" in lora:
        lora.setdefault("lora.alpha", 2 * lora["lora.rank"])
    given |= lora
    if modules_to_save := theirs.get("modules_to_save"):
        given["train.trainable"] = [*given.get("train.trainable", []), *modules_to_save]


def _resolve_batch(given: dict[str, Any], num_gpus: int) -> None:
    """Set the accumulation. A given batch size takes precedence.

    Here one GPU processes the micro-batches of `num_gpus` GPUs one after the other.
    """
    micro = given.get("train.micro_batch_size") or 1
    if batch := given.pop("train.batch_size", None):
        given["train.accumulate"] = max(1, batch // micro)
    else:
        given["train.accumulate"] *= num_gpus


def _nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return tree


def _merged(tree: dict[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the union of both trees, group by group. Values in `first` take precedence."""
    both = {key: {**tree.get(key, {}), **value} for key, value in first.items() if isinstance(value, Mapping)}
    return {**tree, **first, **both}


def _trainable_layers(model: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return patterns for `train.trainable` that correspond to LLaMA-Factory's freeze tuning.

    The last `freeze_layers` layers are trained, or if it is negative the first ones: of them the modules
    `freeze_modules`, where `all` stands for all of them. Parameters with a text of `freeze_extra` in their name are
    trained as well.
    """
    from megatrain_ray.model.open_model import open_model

    try:
        num_layers = open_model(ModelConfig.model_validate(model)).setting("num_hidden_layers")
    except ConfigError as error:
        raise ConfigError(
            f"freeze_trainable_layers cannot be followed, as the model's layers cannot be counted: {error}; or give "
            "train.trainable=[PATTERN] after the file"
        ) from None
    number = theirs["freeze_layers"]
    layers = range(max(0, num_layers - number), num_layers) if number > 0 else range(min(-number, num_layers))
    numbers = "|".join(map(str, layers))
    modules = theirs["freeze_modules"] if layers else []
    return [
        *(rf"\.(?:{numbers})\.{'' if module == 'all' else re.escape(module)}" for module in modules),
        *map(re.escape, theirs.get("freeze_extra", ())),
    ]


def _parameter_groups(theirs: Mapping[str, Any], lr: float) -> list[dict[str, Any]]:
    """Return the parameter groups of LoRA+ and of Axolotl.

    If any key on groups is set, Axolotl puts the embeddings into a group of their own, without decay.
    """
    if theirs.get("loraplus_ratio") and theirs.get("method") == "lora":
        return [{"match": ["lora_B"], "lr": theirs["loraplus_ratio"] * lr}]
    if not {"embedding_lr", "embedding_lr_scale", "lr_groups"} & theirs.keys():
        return []
    own = lr * scale if (scale := theirs.get("embedding_lr_scale")) else theirs.get("embedding_lr")
    embeddings = {"match": EMBEDDINGS, **({"lr": own} if own else {}), "weight_decay": 0.0}
    return [embeddings, *theirs.get("lr_groups", ())]


def _resolve_template(tree: dict[str, Any], theirs: Mapping[str, Any]) -> None:
    """Set the named template of their file if the tokenizer is on this machine and has none of its own."""
    data, name = tree["data"], theirs.get("template")
    tokenizer = data.get("tokenizer") or tree["model"].get("path")
    if (
        name is None
        or data.get("kind") not in ("sft", "pairs", "unpaired")
        or "chat_template" in data
        or not Path(str(tokenizer)).is_dir()
    ):
        return
    with suppress(ConfigError):  # a tokenizer that lacks the marks of the template
        if load_chat_template(str(tokenizer)).source == read_named_template(PLAIN):
            load_chat_template(str(tokenizer), name)
            data["chat_template"] = name


def _resolve_steps(tree: dict[str, Any], theirs: Mapping[str, Any], default_warmup: float) -> None:
    """Set everything that is counted in steps, some of which may be given as shares or epochs.

    What overrides have set is not changed.
    """
    train = tree["train"]
    if not train.get("steps") and not train.get("epochs"):
        most = int(theirs.get("max_steps", -1))
        train |= {"steps": most} if most > 0 else {"epochs": float(theirs["epochs"])}
    if train["schedule"] == UNWARMED:
        train["schedule"] = "constant"
    else:
        warmup = _warmup(theirs.get("warmup_steps"), theirs.get("warmup_ratio"), default_warmup, train.get("steps"))
        if train.setdefault("warmup_steps", warmup):
            train.setdefault("warmup_from_zero", True)
    if "save_every" not in tree:
        tree["save_every"] = _every("save", theirs, train)
    if "eval_every" not in tree and {"eval_path", "eval_fraction"} & tree["data"].keys():
        tree["eval_every"] = _every("eval", theirs, train)


def _warmup(warmup: float | None, ratio: float | None, default: float, steps: int | None) -> int | float:
    """Return the number of warm-up steps, or their share of all steps. `warmup` below 1 is a share, too."""
    if warmup and warmup >= 1:
        return min(int(warmup), steps or int(warmup))
    share = warmup or ratio
    if share is None and warmup is None:
        return min(int(default * steps), MAX_WARMUP_STEPS) if steps else default or 0
    return share or 0


def _every(what: str, theirs: Mapping[str, Any], train: Mapping[str, Any]) -> int | str:
    """Return the number of steps or epochs between saves or evaluations; 0 if there are none before the end."""
    strategy, number = theirs.get(f"{what}_strategy"), theirs.get(f"{what}_steps")
    if strategy == "no":
        return 0
    if times := theirs.get(f"{what}s_per_epoch"):
        return _epochs(1 / float(times))
    if strategy == "epoch" or number is None:
        return _epochs(1.0)
    if number >= 1 or not number:
        return int(number)
    return math.ceil(number * train["steps"]) if train.get("steps") else _epochs(number * train["epochs"])


def _epochs(number: float) -> str:
    return f"{number:g} epoch{'' if number == 1 else 's'}"
