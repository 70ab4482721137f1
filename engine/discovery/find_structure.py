"""Finds a model's layers in its trial forward, and checks that they can be streamed one by one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from megatrain_ray.engine.discovery.block_parts import name_of, parts_of, with_departures
from megatrain_ray.engine.discovery.module_lists import VisionLayer, called_lists, calls_around, vision_layers
from megatrain_ray.engine.discovery.trial_forward import Call, Trial, storage_of, storages_of, tensors_in
from megatrain_ray.engine.layout.flat_layout import FROZEN, ParameterGroup, ParameterSpec
from megatrain_ray.engine.model.fp8_products import fp8_weights
from megatrain_ray.engine.model.images import vision_paths
from megatrain_ray.engine.model.lora import is_adapter, module_of
from megatrain_ray.engine.model.output_recorder import is_recorded
from megatrain_ray.engine.model.parameter_rules import decays
from megatrain_ray.engine.model.structure import LayerKind, LayerSpec, Mlp, ModelStructure
from megatrain_ray.errors import ConfigError

# A trial cannot show whether one token depends on another. Modules of Transformers with these names compute each token
# independently (tests/engine/layer_calls/test_chunked_mlp.py runs every family's). Modules in a model's own code may
# not.
MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
LIBRARY = "transformers."


class StructureFinder:
    """Finds the parts of a model's structure one after the other."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, trial: Trial, groups: Mapping[str, ParameterGroup],
        batch_size: int, block_parts: int, num_image_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._model = model
        self._dtype = dtype  # that it was made in
        self._trial = trial
        self._groups = groups  # of each parameter, by all of its names
        self._batch_size = batch_size  # of the trial, in sequences
        self._num_image_tokens = num_image_tokens  # that a vision tower got in the trial; 0: none runs
        self._of_images = vision_paths(model) if num_image_tokens else ()  # modules of the tower and the projector
        self._block_parts = block_parts  # largest number of parts into which a block is divided
        self._name = type(model).__name__
        self._owners: dict[int, str] = {}  # id(parameter) → its name in the first layer that has it
        self.readers: dict[str, str] = {}  # parameters that are read outside of their layers → path of the reader

    def structure(self) -> ModelStructure:
        """Return the structure. Raises ConfigError for a model that cannot be streamed, and names the cause."""
        list_path = self._list_path
        base = self._find_base(list_path)
        blocks = self._blocks(list_path)
        before, head = self._outer(list_path, blocks)
        tower = vision_layers(self._model, self._trial, self._of_images) if self._of_images else []
        # Gemma 4 projects embeddings of texts and images alike, for each of its blocks. That is part of the first one.
        late = [path for path in before if tower and self._trial.first[path].start > tower[-1].call.stop]
        before = [path for path in before if path not in late]
        in_loss = frozenset(path for path in head if self._trial.first[path].start > base.stop)
        layers = (
            self._spec("embedding", LayerKind.EMBEDDING, before),
            *self._vision_specs(tower, before, blocks),
            *(spec for i, block in enumerate(blocks) for spec in self._block_specs(i, block, base, [] if i else late)),
            self._spec("head", LayerKind.HEAD, head),
        )
        self.readers = dict(self._outside_reads(layers))
        self._check_names(layers)
        of_layers = [self._owners[id(p)] for p in self._model.parameters() if id(p) in self._owners]
        trained = tuple(name for name in of_layers if self._group(name).trained)
        if not trained:
            raise ConfigError(f"{self._name}: a text reaches no parameter that is left to train; freeze less")
        vocab_size: int = self._model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        return ModelStructure(
            layers=layers,
            parameter_order=trained,
            base=base.path,
            loss_modules=in_loss,
            vocab_size=vocab_size,
            attention_widths=tuple(map(self._attention_width, layers[1:-1])),
            looked_up=frozenset(self._trial.looked_up),
            fp8=frozenset(fp8_weights(self._model)),
            norms=frozenset(p for p in head if p not in in_loss and _is_norm(self._model, self._trial, base.path, p)),
            learned_masks=frozenset(
                path
                for layer in layers
                for path in layer.modules
                if any(f"{inner}.".startswith(f"{path}.") for inner in self._trial.learned_masks)
            ),
            is_reward=self._gives_one_score(in_loss),
            unreached=tuple(dict.fromkeys(map(self._name_of_many, self._unreached(self._model, "")))),
        )

    def _gives_one_score(self, in_loss: Collection[str]) -> bool:
        """Return whether the modules after the base make one number of each token's hidden state."""
        outputs = [self._trial.first[path].output for path in in_loss]
        return len(outputs) == 1 and isinstance(outputs[0], torch.Tensor) and outputs[0].shape[-1] == 1

    @cached_property
    def _list_path(self) -> str:
        """Return the path of the layer list: the module list with most parameters whose members are called."""
        found = called_lists(self._model, self._trial, without=self._of_images)
        if not found:
            raise ConfigError(
                f"{self._name} has no list of layers (a ModuleList whose members run one after the other): only "
                "decoder-only models that have one can be streamed"
            )
        return found[0]

    def _find_base(self, list_path: str) -> Call:
        """Return the call of the outermost module below the model that holds the list and returns the hidden state."""
        parts = list_path.split(".")
        for length in range(1, len(parts)):
            call = self._trial.first.get(".".join(parts[:length]))
            if call is not None and isinstance(getattr(call.output, "last_hidden_state", None), torch.Tensor):
                return call
        raise ConfigError(
            f"{self._name}: its layers ({list_path}) are no part of a base model that returns the last hidden state; "
            "not supported"
        )

    def _blocks(self, list_path: str) -> list[Call]:
        layer_list = self._model.get_submodule(list_path)
        members = [f"{list_path}.{name}" for name, _ in layer_list.named_children()]
        called = [call for call in self._trial.calls if call.path in members]
        paths = [call.path for call in called]
        expected = [path for path in members if path in paths]
        if paths != expected or len(layer_list) != len(members):  # type: ignore[arg-type]
            raise ConfigError(
                f"{self._name} calls its layers as {paths[:4]}…, expected each once in order "
                f"({expected[0]} … {expected[-1]}): shared or skipped layers are not supported yet"
            )
        return called

    def _outer(self, list_path: str, blocks: Sequence[Call]) -> tuple[list[str], list[str]]:
        """Return the largest modules with parameters that are called before the layer list, and after it."""
        calls = calls_around(self._model, self._trial, list_path, without=self._of_images)
        if between := [call.path for call in calls if blocks[0].start < call.start < blocks[-1].stop]:
            raise ConfigError(f"{self._name} calls {between[0]} between its layers; not supported")
        before = [call.path for call in calls if call.start < blocks[0].start]
        return before, [call.path for call in calls[len(before) :]]

    def _vision_specs(
        self, tower: Sequence[VisionLayer], before: Sequence[str], blocks: Sequence[Call]
    ) -> Iterator[LayerSpec]:
        """Yield the layers of the tower and the projector, which run between the embedding and the first block."""
        first = max((self._trial.first[path].stop for path in before), default=0)
        for name, call in tower:
            if not first < call.start < call.stop < blocks[0].start:
                raise ConfigError(
                    f"{self._name} calls {call.path} before its embedding or after its first layer: its tower cannot "
                    "be trained; set train.vision: frozen"
                )
            output = tensors_in(call.output)[0]
            rows = output.numel() / output.shape[-1] / self._num_image_tokens
            yield replace(self._spec(name, LayerKind.BLOCK, [call.path]), rows_per_token=rows)

    def _block_specs(self, index: int, block: Call, base: Call, before: Sequence[str]) -> list[LayerSpec]:
        """Return the layers of a block. `before`: modules called just before it that belong to its layer."""
        name = f"layers.{index}"
        modules = parts_of(self._model, self._trial, block, self._block_parts) if self._block_parts > 1 else []
        if len(modules) < 2:
            spec = self._spec(name, LayerKind.BLOCK, [*before, block.path])
            mlp = None if before else _find_mlp(self._model, self._trial, base.path, block.path)
            return [replace(spec, mlp=mlp)]
        parts = [
            self._spec(f"{name}.{name_of(self._model, paths, block.path)}", LayerKind.BLOCK, paths) for paths in modules
        ]
        return with_departures(self._model, self._trial, block, base, parts)

    def _attention_width(self, block: LayerSpec) -> float:
        if block.rows_per_token is not None:
            return 0.0  # patches attend, not tokens
        return sum(self._trial.first[path].attention for path in block.modules) / self._batch_size

    def _spec(self, name: str, kind: LayerKind, modules: Sequence[str]) -> LayerSpec:
        """Return the specification of a layer. A parameter that an earlier layer has is tied to that one's."""
        parameters = []
        for path in modules:
            for local, parameter in self._model.get_submodule(path).named_parameters():
                full = f"{path}.{local}"
                owner = self._owners.setdefault(id(parameter), full)
                decay, tied_to = decays(self._model, full), None if owner == full else owner
                shape, group = tuple(parameter.shape), self._group(owner)
                fp32 = parameter.dtype == torch.float32 != self._dtype
                parameters.append(ParameterSpec(full, local, shape, decay, tied_to, group, fp32=fp32))
        return LayerSpec(name, kind, tuple(modules), tuple(parameters))

    def _group(self, name: str) -> ParameterGroup:
        """Return the group of a parameter. One that no gradient reaches is frozen; torch's AdamW leaves it alone, too.

        For instance an indexer, which only chooses tokens, or experts for images.
        """
        return self._groups[name] if self._is_reached(name) else FROZEN

    def _is_reached(self, name: str) -> bool:
        """Return whether a gradient reaches the parameter. Of experts in a list the trial reads arbitrary ones."""
        first = self._first_names[id(self._model.get_parameter(name))]
        if first in self._trial.reads:
            return first in self._trial.reached
        return self._kind(first) in self._reached_kinds

    @cached_property
    def _first_names(self) -> dict[int, str]:
        """Return the first name of each parameter by identity. A trial knows parameters by these."""
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    @cached_property
    def _reached_kinds(self) -> frozenset[str]:
        return frozenset(map(self._kind, self._trial.reached))

    def _kind(self, name: str) -> str:
        """Return the name with a * for each number after that of its block."""
        block = re.match(rf"{re.escape(self._list_path)}\.\d+\.", name)
        begin = block.end() if block else 0
        return name[:begin] + re.sub(r"\b\d+\b", "*", name[begin:])

    def _name_of_many(self, path: str) -> str:
        """Return the path with a * for each number, but in a vision tower: of some only the last block is unreached."""
        return path if path.startswith(self._of_images) else re.sub(r"\b\d+\b", "*", path)

    def _unreached(self, module: nn.Module, path: str) -> Iterator[str]:
        """Yield the largest modules, and else parameters, that would be trained if a gradient reached them."""
        names = self._first_names
        of_module = [names[id(p)] for p in module.parameters()]
        idle = [name for name in of_module if self._groups[name].trained and not self._is_reached(name)]
        if path and idle == of_module:
            yield from [path] * bool(idle)
        elif idle:
            own = [names[id(p)] for p in module.parameters(recurse=False)]
            yield from (name for name in own if name in idle)
            for name, child in module.named_children():
                yield from self._unreached(child, f"{path}.{name}" if path else name)

    def _outside_reads(self, layers: Sequence[LayerSpec]) -> Iterator[tuple[str, str]]:
        """Yield each parameter that is read while no module of the schedule that holds it runs, and its reader."""
        held = {
            path: {self._first_names[id(p)] for p in self._model.get_submodule(path).parameters()}
            for layer in layers
            for path in layer.modules
        }
        for parameter, readers in self._trial.reads.items():
            for reader in readers:
                around = [path for path in held if f"{reader}.".startswith(f"{path}.")]
                if not any(parameter in held[path] for path in around):
                    yield parameter, reader

    def _check_names(self, layers: Sequence[LayerSpec]) -> None:
        """Raise ConfigError for a LoRA pair that would never compute, and for a parameter of a type of its own."""
        reads = self._trial.reads
        names = [p.name for layer in layers for p in layer.parameters]
        for name in filter(is_adapter, names):
            if name not in reads and f"{module_of(name)}.weight" in reads:
                raise ConfigError(
                    f"lora.match: the matrix of {module_of(name)} is read without a call of the module, so a pair "
                    "beside it would never compute; make the pattern narrower"
                )
        for name in names:
            if (own := self._model.get_parameter(name).dtype) not in (self._dtype, torch.float32):
                raise ConfigError(
                    f"{self._name} keeps {name} in {str(own).removeprefix('torch.')} whatever the rest is; only "
                    "float32 beside bfloat16 is supported"
                )


def _find_mlp(model: nn.Module, trial: Trial, base: str, block: str) -> Mlp | None:
    """Return the MLP of a block, which may be computed for a chunk of tokens at a time; None if there is none.

    It is a module of Transformers with one of MLP_NAMES. It contains no convolution.
    """
    for path in (f"{block}.{name}" for name in MLP_NAMES):
        if path not in trial.first or not _is_per_token(model, trial, base, path):
            continue
        module = model.get_submodule(path)
        is_known = type(module).__module__.startswith(LIBRARY)
        if is_known and not any(isinstance(part, _ConvNd) for part in module.modules()):
            return Mlp(path.removeprefix(f"{block}."), _width(module, trial, trial.first[path]))
    return None


def _is_norm(model: nn.Module, trial: Trial, base: str, path: str) -> bool:
    """Return whether the module is a norm of Transformers or torch that may be computed in chunks, as an MLP may."""
    kind = type(model.get_submodule(path))
    is_named = "Norm" in kind.__name__ and kind.__module__.startswith((LIBRARY, "torch."))
    return is_named and _is_per_token(model, trial, base, path)


def _is_per_token(model: nn.Module, trial: Trial, base: str, path: str) -> bool:
    """Return whether the module is called once, turns a hidden state into another, and may do so token by token.

    In chunks it would draw other random numbers, and the model could not return anything from inside of it.
    """
    (call, *others) = [call for call in trial.calls if call.path == path]
    if others or call.draws or call.attention or list(call.contents) != [0] or is_recorded(model, base, path):
        return False
    given, returned = call.contents[0], call.output
    both = isinstance(given, torch.Tensor) and isinstance(returned, torch.Tensor)
    return both and given.dim() == 3 and given.shape == returned.shape and given.dtype == returned.dtype


def _width(module: nn.Module, trial: Trial, call: Call) -> int:
    """Return the elements per token of the largest tensor that the module saves for its backward, or returns."""
    weights = storages_of(module.parameters())
    saved = (t for t in trial.saved[slice(*call.saved)] if storage_of(t) not in weights)
    num_tokens = call.output.numel() // call.output.shape[-1]
    return int(-(-max(t.numel() for t in (*saved, call.output)) // num_tokens))
