"""Gives a model's class and configuration in Transformers, and the names of the tensors in its checkpoints.

Which tensors Transformers writes to a checkpoint is found by running its conversion on the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatrain_ray.engine.model.routed_experts import use_routed_experts
from megatrain_ray.engine.model.structure import kept_in_fp32
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, MappedWeights, WeightMap, is_covered
from megatrain_ray.model.conversion_trace import ConversionTrace
from megatrain_ray.model.small_copy import shrink
from megatrain_ray.read_file import check_folder

REWARD_CLASS = "ForSequenceClassification"  # end of the names of classes whose head gives scores
REWARD_HEAD = "score.weight"


@dataclass(frozen=True)
class Architecture:
    """Builds the model with random weights: a ModelFactory.

    settings: the model's configuration.
    code: folder of the model's own code, which is then run; None: Transformers' code.
    weights: folder with the values of persistent buffers; these are no parameters, so they are not trained (for example
        the biases of DeepSeek's routers).
    """

    settings: dict[str, Any]
    code: Path | None = None
    weights: Path | None = None

    def __call__(self, dtype: torch.dtype) -> Any:
        trust = self.code is not None
        build = partial(self.auto_class.from_config, self.config, **_attention_of(self.config), trust_remote_code=trust)
        model = _without_values(partial(build, dtype=dtype))
        _keep_in_fp32(model)
        use_routed_experts(model)
        if dtype is not torch.float32:
            _compute_buffers(model, partial(build, dtype=torch.float32))
        if self.weights is not None:
            _load_buffers(model, self.weights)
        if self.is_reward and model.config.get_text_config().pad_token_id is None:
            # Its own forward refuses several rows without one. Set before, it would freeze a row of the embedding.
            model.config = copy.deepcopy(model.config)
            model.config.get_text_config().pad_token_id = 0
        return model

    @cached_property
    def config(self) -> Any:
        """Return the transformers PretrainedConfig."""
        from transformers import AutoConfig  # takes seconds to import: cheaper checks have run before

        if self.code is not None:
            return AutoConfig.from_pretrained(self.code, trust_remote_code=True)
        values = {k: _decoded(v) for k, v in self.settings.items() if k != "model_type"}
        return AutoConfig.for_model(self.settings["model_type"], **values)

    def small_copy(self) -> Any:
        """Return a small model of the same kind with random weights; of a reward model, one that has logits."""
        if self.is_reward:
            return replace(self, settings={**self.settings, "architectures": None}).small_copy()
        config = type(self.config).from_dict(shrink(self.config.to_dict()))
        trust = self.code is not None
        return self.auto_class.from_config(
            config, **_attention_of(config), trust_remote_code=trust, dtype=torch.float32
        )

    def load(self, folder: Path, **options: Any) -> Any:
        """Return the model with the weights of a Hugging Face folder, in their own type. `options`: more arguments."""
        check_folder(folder)
        return self.auto_class.from_pretrained(folder, dtype="auto", local_files_only=True, **options)

    def refusal(self) -> str | None:
        """Return why the configuration alone rules out training such a model; None if it does not."""
        if getattr(self.config, "is_encoder_decoder", False):
            return "it is an encoder-decoder, whose decoder reads a second sequence; only decoders are trained"
        if self.code is None and self._mapping is None:
            return "Transformers has no causal language model of this type"
        if self.is_reward:
            return self._reward_refusal()
        return None

    @property
    def is_reward(self) -> bool:
        """Return whether the configuration is that of a reward model: one score in place of logits."""
        return is_reward_model(self.settings)

    def as_reward_model(self) -> Architecture:
        """Return the reward model with this body, as Transformers makes it. Raises ConfigError if it has none."""
        if self.is_reward:
            return self
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as MAPPING

        kind = type(self.config)
        if self.code is not None or kind not in MAPPING:
            raise ConfigError(
                f"train.objective: reward: Transformers has no {REWARD_CLASS} class for a model of type "
                f"{self.settings.get('model_type')}; begin with a model of another type"
            )
        labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        settings = {key: value for key, value in self.settings.items() if key != "num_labels"}
        return replace(self, settings={**settings, "architectures": [MAPPING[kind].__name__], **labels})

    def _reward_refusal(self) -> str | None:
        """Return why a configuration with a class for scores makes no reward model; None if it does."""
        if self.code is not None:
            return "a reward model with code of its own is not supported"
        with torch.device("meta"):
            model = _without_values(partial(self.auto_class.from_config, self.config))
        head, name = getattr(model, "score", None), type(model).__name__
        if not isinstance(head, nn.Linear) or head.bias is not None or not hasattr(model, model.base_model_prefix):
            return f"{name} has more than a linear score after the body"
        if head.out_features != 1:
            return f"{name} has {head.out_features} labels, and a reward model has one"
        return None

    @property
    def auto_class(self) -> Any:
        """Return the class of Transformers whose from_pretrained loads an exported model."""
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForSequenceClassification,
        )

        if self.is_reward:
            return AutoModelForSequenceClassification
        if self.code is not None or self._mapping == "causal":
            return AutoModelForCausalLM
        return AutoModelForImageTextToText

    @property
    def _mapping(self) -> str | None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        kind = type(self.config)
        if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return "causal" if kind in MODEL_FOR_CAUSAL_LM_MAPPING else None
        # Qwen3.5 has a class for its text alone, too. The folder of the whole model names the other.
        whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind].__name__ in (self.settings.get("architectures") or ())
        return "causal" if kind in MODEL_FOR_CAUSAL_LM_MAPPING and not whole else "image and text"


def _attention_of(config: Any) -> dict[str, str]:
    """Return arguments that select eager attention for a model with capped attention scores, else none.

    For capped scores some releases of Transformers take SDPA (5.17 does, 5.23 does not), which silently omits the cap.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return {} if capped is None else {"attn_implementation": "eager"}


def _without_values(build: Callable[[], Any]) -> Any:
    """Return the model that `build` makes, without drawing random weights.

    Transformers 4 draws them even on a device without memory, which some of its models cannot do. They would not be
    used.
    """
    from transformers import modeling_utils

    skipping = getattr(modeling_utils, "no_init_weights", None)
    if skipping is None:
        return build()
    with skipping():
        model = build()
    model.tie_weights()  # skipped together with drawing the weights
    return model


def is_reward_model(settings: Mapping[str, Any]) -> bool:
    """Return whether a model's configuration names a class whose head gives scores."""
    return any(str(name).endswith(REWARD_CLASS) for name in settings.get("architectures") or ())


def is_known(model_type: object) -> bool:
    """Return whether Transformers has such a model without code from elsewhere."""
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _decoded(value: Any) -> Any:
    """Decode numbers that JSON lacks, which Transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _keep_in_fp32(model: nn.Module) -> None:
    """Convert parameters and buffers to FP32 that the model wants in FP32 whatever its type.

    from_pretrained does so, from_config does not.
    """
    converted: dict[int, nn.Parameter] = {}  # by the identity of a parameter, which several modules may share
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and kept_in_fp32(model, f"{path}.{name}".lstrip(".")):
                module._buffers[name] = buffer.float()
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype == torch.float32:
                continue
            if id(parameter) not in converted and kept_in_fp32(model, f"{path}.{name}".lstrip(".")):
                converted[id(parameter)] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            module._parameters[name] = converted.get(id(parameter), parameter)


def _compute_buffers(model: nn.Module, exact: Callable[[], Any]) -> None:
    """Replace the values of computed, non-persistent buffers by those of an FP32 model, which `exact` builds.

    from_config computes them in the model's type; from_pretrained of Transformers 5 does not. In bf16 the angles of
    GPT-J and CodeGen, with 64 rotary dimensions, would be up to 0.9 radians off at position 2047.
    """
    computed = {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point() and _is_loaded(buffer)
    }
    if not computed or find_spec("transformers.initialization") is None:  # Transformers 4 lacks this module
        return
    with init_empty_weights(include_buffers=False):
        buffers = dict(_without_values(exact).named_buffers(remove_duplicate=False))
    for name, buffer in computed.items():
        buffer.copy_(buffers[name])


def _load_buffers(model: nn.Module, weights: Path) -> None:
    """Load the persistent buffers from a folder of weights.

    If there is nothing to load, no file is opened: a plan needs no weights. Raises ConfigError for a buffer of another
    shape.
    """
    wanted = {name: buffer for name, buffer in persistent_buffers(model).items() if _is_loaded(buffer)}
    if not wanted:
        return
    folder = MappedWeights(WeightFolder.open(weights, base_prefix(model)), _stored_as(model, wanted))
    for name, buffer in wanted.items():
        if (stored := folder.whole(name, tuple(buffer.shape))) is None:
            continue
        if stored.shape != buffer.shape:
            raise ConfigError(f"{weights}: {name} has shape {tuple(stored.shape)}, the model's {tuple(buffer.shape)}")
        buffer.copy_(stored)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint of the model holds, by name."""
    return {
        (f"{path}.{name}" if path else name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def known_names(model: nn.Module, names: WeightMap) -> set[str]:
    """Return all names of the model's parameters and buffers: its own, and those of checkpoints (`names`)."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return own | {tensor.name for pieces in names.values() for tensor in pieces}


def base_prefix(model: nn.Module) -> str:
    """Return the name of the base model within the model; checkpoints may leave it out of their tensors' names."""
    return str(getattr(model, "base_model_prefix", ""))


def _is_loaded(buffer: torch.Tensor) -> bool:
    return not buffer.is_meta and not isinstance(buffer, FakeTensor)


def checkpoint_names(model: nn.Module) -> WeightMap:
    """Return the checkpoint tensors of parameters and buffers that a checkpoint holds under other names or in pieces.

    model: a transformers PreTrainedModel on the meta device.

    Those whose conversion does more than moving elements have no tensors: a folder must hold them as they are.
    """
    parameters = {name: model.get_parameter(name).detach() for name in owned_parameters(model)}
    return _stored_as(model, parameters | persistent_buffers(model))


def _stored_as(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> WeightMap:
    """Return `checkpoint_names` for some tensors of the model, by name."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return _renamed(model, tensors)
    empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    found: dict[str, list[CheckpointTensor]] = {}
    with ConversionTrace() as trace:
        written = revert_weight_conversion(model, dict(empty))
    for name, tensor in written.items():
        for owner, piece in trace.pieces(name, tensor, owners):
            found.setdefault(owner, []).append(piece)
    converted = {owner: pieces for owner, pieces in found.items() if [t.name for t in pieces] != [owner]}
    readable = {o: p if is_covered(tensors[o].numel(), p) else () for o, p in converted.items()}
    return readable | dict.fromkeys(tensors.keys() - found.keys(), ())


def _renamed(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> WeightMap:
    """Return the renamed tensors of a vision-language model in Transformers 4, which converts nothing else."""
    from transformers.modeling_utils import VLMS

    lineage = [base.__name__.lower() for base in type(model).__mro__]
    if not any(family in name for name in lineage for family in VLMS):
        return {}
    renames: Mapping[str, str] = model._checkpoint_conversion_mapping  # type: ignore[assignment]  # stored → own
    found: dict[str, list[CheckpointTensor]] = {}
    for name, tensor in tensors.items():
        stored = next((new for kept, own in renames.items() if (new := re.sub(own, _plain(kept), name)) != name), name)
        if stored != name:
            found[name] = [CheckpointTensor.whole(stored, tuple(tensor.shape))]
    return found


def _plain(pattern: str) -> str:
    """Return the text that a pattern of names stands for, without its anchor and conditions."""
    return re.sub(r"\(.*\)", "", pattern.removeprefix("^"))


def owned_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters, tied ones once.

    They are compared by storage, because on the meta device a tied parameter may be several objects.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.untyped_storage()._cdata, name)
    return list(first.values())
