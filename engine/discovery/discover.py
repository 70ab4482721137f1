"""Discovers a model's structure with a trial forward, never by looking up names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_ray.engine.discovery.activation_bytes import ActivationBytes, activation_bytes_of
from megatrain_ray.engine.discovery.block_parts import name_of, parts_of, with_departures
from megatrain_ray.engine.discovery.chunkable import find_mlp, find_norms
from megatrain_ray.engine.discovery.compile_trial import try_compiling
from megatrain_ray.engine.discovery.structure_checks import check_parameters
from megatrain_ray.engine.discovery.trial_forward import Answers, Call, Trial, run_trial
from megatrain_ray.engine.layout.flat_layout import ParameterGroup, ParameterSpec
from megatrain_ray.engine.model.attention import Attention, imagined_masks
from megatrain_ray.engine.model.muon_choice import with_muon
from megatrain_ray.engine.model.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.model.structure import LayerKind, LayerSpec, ModelFactory, ModelStructure
from megatrain_ray.errors import ConfigError


class Tried(NamedTuple):
    """Holds a model on fake tensors and its trial forward.

    mode: the FakeTensorMode that created the tensors.
    groups: the group of each parameter, by name. They are assigned before all parameters are set to require a gradient,
        so what the model itself freezes stays frozen.
    """

    mode: FakeTensorMode
    model: nn.Module
    groups: Mapping[str, ParameterGroup]
    trial: Trial


Trials = dict[Hashable, Tried]  # keyed by everything that a trial forward depends on


def discover(
    factory: ModelFactory,
    dtype: torch.dtype,
    micro_batch_size: int,
    seq_len: int,
    rules: ParameterRules = ALL_ALIKE,
    *,
    attention: Attention = Attention.SDPA,
    packed: bool = False,
    compiled: bool = False,
    chunked: bool = False,
    block_parts: int = 1,
    trials: Trials | None = None,
) -> tuple[ModelStructure, ActivationBytes]:
    """Discover a model's structure and the bytes of its activations.

    Runs a forward of [micro_batch_size, seq_len] ids on fake tensors; two forwards if something is frozen.

    packed: whether a row holds several documents.
    compiled: whether to measure compiled layers, too.
    chunked: whether to measure layers whose MLPs are computed in chunks, too.
    block_parts: largest number of parts into which a block is divided. Parts are neither compiled nor chunked.
    trials: earlier trial forwards of this model and these rules; what runs now is added.

    Raises ConfigError for a model whose layers are not each called once in order, or that cannot run, and names the
    cause. Raises ConfigError for `rules` or `block_parts` that do not fit the model.
    """
    trials, batch = {} if trials is None else trials, (micro_batch_size, seq_len)
    run = partial(_tried, trials, factory, dtype, rules, batch, attention, packed)
    with (tried := run(all_trained=True)).mode, Answers():
        model, trial = tried.model, tried.trial
        structure = _Finder(model, trial, tried.groups, micro_batch_size, block_parts).structure()
        structure = with_muon(structure, model) if rules.muon else structure
        activations = activation_bytes_of(model, trial, structure, attention, batch)
    if structure.has_frozen:
        tried = run(all_trained=False)
        with tried.mode, Answers():
            less = activation_bytes_of(tried.model, tried.trial, structure, attention, batch)
        activations = activations.above(structure.lowest_trained, less)
    if structure.is_divided:
        return structure, replace(activations, chunked=None)
    with tried.mode:
        return structure, _with_compiled(activations, structure, tried, compiled=compiled, chunked=chunked)


def _tried(
    trials: Trials,
    factory: ModelFactory,
    dtype: torch.dtype,
    rules: ParameterRules,
    batch: tuple[int, int],
    attention: Attention,
    packed: bool,
    *,
    all_trained: bool,
) -> Tried:
    key = dtype, batch, attention, packed, all_trained
    if key in trials:
        return trials[key]
    with FakeTensorMode() as mode, Answers():
        model = factory(dtype)
        groups = rules.assign(model)
        for name, parameter in model.named_parameters():
            # all_trained: then every output of a layer has a graph, which distinguishes it from a mask.
            trained = parameter.is_floating_point() if all_trained else groups[name].trained
            parameter.requires_grad_(trained)
        trials[key] = Tried(mode, model, groups, _run_trial(model, batch, attention, packed=packed))
    return trials[key]


def _with_compiled(
    activations: ActivationBytes, structure: ModelStructure, tried: Tried, *, compiled: bool, chunked: bool
) -> ActivationBytes:
    """Return `activations` with those of compiled layers and of layers with chunked MLPs, as far as asked for."""
    if compiled:
        of_layers = try_compiling(tried.model, structure, tried.trial)
        activations = replace(activations, compiled=of_layers)
    if not chunked:
        return replace(activations, chunked=None)
    return _with_chunks(activations, tried.model, structure, tried.trial) if compiled else activations


def _with_chunks(
    activations: ActivationBytes, model: nn.Module, structure: ModelStructure, trial: Trial
) -> ActivationBytes:
    """Return `activations` with what compiled layers keep whose MLPs are computed in chunks.

    A layer that cannot be compiled with its MLP whole is not compiled in chunks, either.
    """
    if activations.chunked is None:
        return activations
    whole = activations.compiled
    pairs = zip(whole, try_compiling(model, structure, trial, chunked=True), strict=True)
    compiled = tuple(chunks if of_whole and of_whole.budgets else of_whole for of_whole, chunks in pairs)
    return replace(activations, chunked=replace(activations.chunked, compiled=compiled))


def _run_trial(model: nn.Module, batch: tuple[int, int], attention: Attention, *, packed: bool) -> Trial:
    model.train()
    ids = torch.zeros(batch, dtype=torch.int64)
    try:
        with imagined_masks(model, attention, packed=packed):
            return run_trial(model, ids, torch.zeros_like(ids) if packed else None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        hint = "; with data.packing: false it is given no positions" if packed else ""
        raise ConfigError(
            f"{type(model).__name__} cannot be traced: its forward on ids failed with {reason}{hint}"
        ) from error


class _Finder:
    """Finds the parts of a model's structure one after the other."""

    def __init__(
        self,
        model: nn.Module,
        trial: Trial,
        groups: Mapping[str, ParameterGroup],
        micro_batch_size: int,
        block_parts: int,
    ) -> None:
        """Prepare the search.

        trial: trial forward of `micro_batch_size` sequences.
        groups: the group of each parameter, by all of its names.
        """
        self._model = model
        self._trial = trial
        self._groups = groups
        self._micro_batch_size = micro_batch_size
        self._block_parts = block_parts
        self._name = type(model).__name__

    def structure(self) -> ModelStructure:
        list_path = self._find_list()
        base = self._find_base(list_path)
        blocks = self._blocks(list_path)
        before, head, in_loss = self._sorted(self._outer(list_path), blocks, base)
        owners: dict[int, str] = {}
        layers = (
            self._spec("embedding", LayerKind.EMBEDDING, before, owners),
            *(spec for i, block in enumerate(blocks) for spec in self._block_specs(i, block, base, owners)),
            self._spec("head", LayerKind.HEAD, head, owners),
        )
        check_parameters(self._model, self._trial, layers)
        of_layers = [owners[id(p)] for p in self._model.parameters() if id(p) in owners]
        trained = tuple(name for name in of_layers if self._groups[name].trained)
        if not trained:
            raise ConfigError(f"{self._name}: a text reaches no parameter that is left to train; freeze less")
        return ModelStructure(
            layers=layers,
            parameter_order=trained,
            base=base.path,
            loss_modules=frozenset(in_loss),
            vocab_size=self._vocab_size(),
            attention_widths=tuple(map(self._attention_width, layers[1:-1])),
            looked_up=frozenset(self._trial.looked_up),
            norms=find_norms(self._model, self._trial, base.path, set(head) - set(in_loss)),
        )

    def _find_list(self) -> str:
        """Return the path of the layer list: the module list with most parameters among those whose members are called.

        Raises ConfigError if there is none.
        """
        called = {call.path for call in self._trial.calls}
        sizes = {
            path: sum(p.numel() for p in module.parameters())
            for path, module in self._model.named_modules()
            if isinstance(module, nn.ModuleList)
            and any(f"{path}.{name}" in called for name, _ in module.named_children())
        }
        if not sizes:
            raise ConfigError(
                f"{self._name} has no list of layers (a ModuleList whose members run one after the other): only "
                "decoder-only models that have one can be streamed"
            )
        largest: str = max(sizes, key=lambda path: (sizes[path], -len(path)))
        return largest

    def _find_base(self, list_path: str) -> Call:
        """Return the call of the outermost module below the model that is called and holds the layer list.

        It returns the hidden states. Raises ConfigError if there is no such module.
        """
        parts = list_path.split(".")
        for length in range(1, len(parts)):
            call = self._trial.first(".".join(parts[:length]))
            if call is not None:
                return call
        raise ConfigError(f"{self._name}: its layers ({list_path}) are no part of a base model; not supported")

    def _blocks(self, list_path: str) -> list[Call]:
        members = {f"{list_path}.{name}": None for name, _ in self._model.get_submodule(list_path).named_children()}
        called = [call for call in self._trial.calls if call.path in members]
        expected = [path for path in members if any(call.path == path for call in called)]
        if [call.path for call in called] != expected or len(self._model.get_submodule(list_path)) != len(members):  # type: ignore[arg-type]
            paths = [call.path for call in called]
            raise ConfigError(
                f"{self._name} calls its layers as {paths[:4]}…, expected each once in order "
                f"({expected[0]} … {expected[-1]}): shared or skipped layers are not supported yet"
            )
        return called

    def _outer(self, list_path: str) -> list[str]:
        """Return the paths of the largest modules with parameters that are called and are not in the layer list."""
        called = {call.path for call in self._trial.calls}
        found: list[str] = []

        def descend(module: nn.Module, path: str) -> None:
            for name, child in module.named_children():
                child_path = f"{path}.{name}" if path else name
                if child_path == list_path or not any(True for _ in child.parameters()):
                    continue
                if child_path in called and not list_path.startswith(child_path + "."):
                    found.append(child_path)
                else:
                    descend(child, child_path)

        descend(self._model, "")
        return found

    def _sorted(
        self, outer: Iterable[str], blocks: Sequence[Call], base: Call
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the outer modules called before the first layer, those called after the last, and the loss modules.

        The loss modules are those of the second list that are called outside the base model. Raises ConfigError if an
        outer module is called between layers, or twice.
        """
        paths = set(outer)
        calls = [call for call in self._trial.calls if call.path in paths]
        between = [call.path for call in calls if blocks[0].start < call.start < blocks[-1].stop]
        twice = [call.path for call in calls if sum(call.path == other.path for other in calls) > 1]
        if between or twice:
            where = "between its layers" if between else "twice"
            raise ConfigError(f"{self._name} calls {(between or twice)[0]} {where}; not supported")
        before = [call.path for call in calls if call.start < blocks[0].start]
        head = [call.path for call in calls if call.start > blocks[-1].stop]
        return before, head, [call.path for call in calls if call.start > base.stop]

    def _block_specs(self, index: int, block: Call, base: Call, owners: dict[int, str]) -> list[LayerSpec]:
        name = f"layers.{index}"
        modules = parts_of(self._model, self._trial, block, self._block_parts) if self._block_parts > 1 else []
        if len(modules) < 2:
            spec = self._spec(name, LayerKind.BLOCK, [block.path], owners)
            return [replace(spec, mlp=find_mlp(self._model, self._trial, base.path, block.path))]
        parts = [
            self._spec(f"{name}.{name_of(self._model, paths, block.path)}", LayerKind.BLOCK, paths, owners)
            for paths in modules
        ]
        return with_departures(self._model, self._trial, block, base, parts)

    def _attention_width(self, block: LayerSpec) -> float:
        """Return the attention width of a block, or of a part of one: 0 if it does not attend."""
        calls = (self._trial.first(path) for path in block.modules)
        return sum(call.attention for call in calls if call) / self._micro_batch_size

    def _spec(self, name: str, kind: LayerKind, modules: Sequence[str], owners: dict[int, str]) -> LayerSpec:
        """Return the specification of a layer made of `modules`.

        owners: names of the parameters seen so far, by identity; it is extended. A second appearance of a parameter is
            tied to the first.
        """
        parameters = []
        for path in modules:
            for local, parameter in self._model.get_submodule(path).named_parameters():
                full = f"{path}.{local}"
                owner = owners.setdefault(id(parameter), full)
                # Decoupled weight decay applies to matrices only: norms and biases have one dimension.
                decay, tied_to = parameter.dim() > 1, None if owner == full else owner
                shape, group = tuple(parameter.shape), self._groups[full]
                parameters.append(ParameterSpec(full, local, shape, decay, tied_to, group))
        return LayerSpec(name, kind, tuple(modules), tuple(parameters))

    def _vocab_size(self) -> int:
        size: int = self._model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        return size
