"""A model's structure, and what its layers keep for backward, found by a trial forward: never looked up by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain_ray.engine.attention import Attention, imagined_masks, mask_bytes
from megatrain_ray.engine.compile_trial import BudgetCost, CompileTrial, try_compiling
from megatrain_ray.engine.flat_layout import ParameterSpec
from megatrain_ray.engine.lora import is_adapter, module_of
from megatrain_ray.engine.model import LayerKind, LayerSpec, ModelFactory, ModelStructure, kept_in_fp32
from megatrain_ray.engine.muon_choice import with_muon
from megatrain_ray.engine.parameter_group import ParameterGroup
from megatrain_ray.engine.parameter_rules import ALL_ALIKE, ParameterRules
from megatrain_ray.engine.private_inputs import private_inputs, storages_of
from megatrain_ray.engine.trial import Answers, Call, Trial, run_trial
from megatrain_ray.errors import ConfigError


@dataclass(frozen=True)
class ActivationBytes:
    """What one micro-batch leaves on the device, per layer: the tensors that enter it, and what a kept graph saves
    beyond them and the weights. `largest`: what a layer has at most while it runs, kept or not. `masks`: the attention
    masks that all layers share. `compiled`: of each layer what a compiled one keeps; None where that was not asked
    for. `private`: whether nothing but the layer itself reads what enters it, from its forward to its backward."""

    boundary: tuple[int, ...]
    kept: tuple[int, ...]
    largest: int
    masks: int = 0
    compiled: tuple[CompileTrial | None, ...] = ()
    private: tuple[bool, ...] = ()

    def times(self, count: int) -> ActivationBytes:
        """Of so many such micro-batches in one: as much each. What a layer has once is counted as often too."""
        boundary, kept = (tuple(count * b for b in of_layers) for of_layers in (self.boundary, self.kept))
        compiled = tuple(trial and trial.times(count) for trial in self.compiled)
        return replace(
            self,
            boundary=boundary,
            kept=kept,
            largest=count * self.largest,
            masks=count * self.masks,
            compiled=compiled,
        )

    def above(self, lowest: int, kept: tuple[int, ...]) -> ActivationBytes:
        """With other kept bytes; nothing waits for a backward below layer `lowest`."""
        zeros = (0,) * lowest
        return replace(self, boundary=zeros + self.boundary[lowest:], kept=zeros + kept[lowest:])

    def budgets_of(self, layer: int) -> tuple[BudgetCost, ...]:
        """What each activation budget costs; none of a layer that is not compiled."""
        trial = self.compiled[layer] if self.compiled else None
        return trial.budgets if trial else ()

    def has_budget(self, layer: int, activation_budget: float) -> bool:
        """Whether a compiled layer can have it; no layer where nothing is compiled."""
        return bool(self.compiled) and activation_budget in self._kept_within[layer]

    def kept_within(self, layer: int, activation_budget: float) -> int:
        """Bytes that a compiled layer keeps."""
        return self._kept_within[layer][activation_budget]

    def kept_at_most(self, layer: int) -> int:
        """The same with the largest budget."""
        return self._kept_at_most[layer]

    @cached_property
    def _kept_within(self) -> tuple[dict[float, int], ...]:
        return tuple(
            {c.activation_budget: c.kept_bytes for c in trial.budgets} if trial else {} for trial in self.compiled
        )

    @cached_property
    def _kept_at_most(self) -> tuple[int, ...]:
        return tuple(max(of_budgets.values(), default=0) for of_budgets in self._kept_within)


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
) -> tuple[ModelStructure, ActivationBytes]:
    """Runs a forward of [micro_batch_size, seq_len] ids on fake tensors; two where something is frozen. `packed`: of
    several documents in a row. `compiled`: tells of compiled layers, too.

    Raises ConfigError, naming it, for a model whose layers are not called once each in their order, or that cannot run,
    and for `rules` that do not fit the model.
    """
    with FakeTensorMode():
        with Answers():
            model = factory(dtype)
            groups = rules.assign(model)
            for parameter in model.parameters():  # all: by its graph what a layer hands on is told from a mask
                parameter.requires_grad_(parameter.is_floating_point())
            batch = micro_batch_size, seq_len
            found = _Found(model, _run_trial(model, batch, attention, packed=packed), groups, batch, attention)
            structure = with_muon(found.structure(), model) if rules.muon else found.structure()
            activations = found.activations(structure)
            if structure.has_frozen:
                model = factory(dtype)
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(groups[name].trained)
                found = _Found(model, _run_trial(model, batch, attention, packed=packed), groups, batch, attention)
                activations = activations.above(structure.lowest_trained, found.activations(structure).kept)
        if compiled:
            activations = replace(activations, compiled=try_compiling(model, structure, found.trial))
        return structure, activations


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


class _Found:
    """A model and its trial; the parts of its structure one after the other."""

    def __init__(
        self,
        model: nn.Module,
        trial: Trial,
        groups: Mapping[str, ParameterGroup],
        batch: tuple[int, int],
        attention: Attention,
    ) -> None:
        """`groups`: of each parameter, by all of its names."""
        self._model = model
        self.trial = trial
        self._groups = groups
        self._batch = batch
        self._attention = attention
        self._name = type(model).__name__

    def structure(self) -> ModelStructure:
        list_path = self._find_list()
        base = self._find_base(list_path)
        blocks = self._blocks(list_path)
        before, head, in_loss = self._sorted(self._outer(list_path), blocks, base)
        owners: dict[int, str] = {}
        layers = (
            self._spec("embedding", LayerKind.EMBEDDING, before, owners),
            *(self._spec(f"layers.{i}", LayerKind.BLOCK, [block.path], owners) for i, block in enumerate(blocks)),
            self._spec("head", LayerKind.HEAD, head, owners),
        )
        self._check_reads(layers)
        self._check_pairs(layers)
        self._check_types(layers)
        of_layers = [owners[id(p)] for p in self._model.parameters() if id(p) in owners]
        trained = tuple(name for name in of_layers if self._groups[name].trained)
        if not trained:
            raise ConfigError(f"{self._name}: a text reaches no parameter that is left to train; freeze less")
        return ModelStructure(
            layers=layers,
            parameter_order=trained,
            base=base.path,
            loss_modules=frozenset(in_loss),
            unused=tuple(name for name, p in self._model.named_parameters() if id(p) not in owners),
            vocab_size=self._vocab_size(),
            attention_widths=tuple(block.attention / self._batch[0] for block in blocks),
            looked_up=frozenset(self.trial.looked_up),
        )

    def _find_list(self) -> str:
        """Path of the layer list: of the module lists whose members run, the one with most parameters."""
        called = {call.path for call in self.trial.calls}
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
        """The outermost module below the model that runs and holds the layer list: it returns the hidden states."""
        parts = list_path.split(".")
        for length in range(1, len(parts)):
            call = self.trial.first(".".join(parts[:length]))
            if call is not None:
                return call
        raise ConfigError(f"{self._name}: its layers ({list_path}) are no part of a base model; not supported")

    def _blocks(self, list_path: str) -> list[Call]:
        members = {f"{list_path}.{name}": None for name, _ in self._model.get_submodule(list_path).named_children()}
        called = [call for call in self.trial.calls if call.path in members]
        expected = [path for path in members if any(call.path == path for call in called)]
        if [call.path for call in called] != expected or len(self._model.get_submodule(list_path)) != len(members):  # type: ignore[arg-type]
            paths = [call.path for call in called]
            raise ConfigError(
                f"{self._name} calls its layers as {paths[:4]}…, expected each once in order "
                f"({expected[0]} … {expected[-1]}): shared or skipped layers are not supported yet"
            )
        return called

    def _outer(self, list_path: str) -> list[str]:
        """The largest modules with parameters that run beside the layer list."""
        called = {call.path for call in self.trial.calls}
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
        """Outer modules that run before the first layer, after the last, and of these the ones outside the base."""
        paths = set(outer)
        calls = [call for call in self.trial.calls if call.path in paths]
        between = [call.path for call in calls if blocks[0].start < call.start < blocks[-1].stop]
        twice = [call.path for call in calls if sum(call.path == other.path for other in calls) > 1]
        if between or twice:
            where = "between its layers" if between else "twice"
            raise ConfigError(f"{self._name} calls {(between or twice)[0]} {where}; not supported")
        before = [call.path for call in calls if call.start < blocks[0].start]
        head = [call.path for call in calls if call.start > blocks[-1].stop]
        return before, head, [call.path for call in calls if call.start > base.stop]

    def _spec(self, name: str, kind: LayerKind, modules: Sequence[str], owners: dict[int, str]) -> LayerSpec:
        """`owners`: parameters seen so far, by identity; a second appearance is tied to the first."""
        parameters = []
        for path in modules:
            for local, parameter in self._model.get_submodule(path).named_parameters():
                full = f"{path}.{local}"
                owner = owners.setdefault(id(parameter), full)
                # Decoupled weight decay is for matrices: norms and biases have one dimension.
                decay, tied_to = parameter.dim() > 1, None if owner == full else owner
                shape, group = tuple(parameter.shape), self._groups[full]
                parameters.append(ParameterSpec(full, local, shape, decay, tied_to, group))
        return LayerSpec(name, kind, tuple(modules), tuple(parameters))

    def _check_reads(self, layers: Sequence[LayerSpec]) -> None:
        """Raises ConfigError unless every parameter is read while a module of the schedule that holds it runs."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        held = {
            path: {names[id(p)] for p in self._model.get_submodule(path).parameters()}
            for layer in layers
            for path in layer.modules
        }
        for parameter, readers in self.trial.reads.items():
            for reader in readers:
                around = [path for path in held if reader == path or reader.startswith(path + ".")]
                if not any(parameter in held[path] for path in around):
                    raise ConfigError(
                        f"{self._name}: parameter {parameter} belongs to no layer: it is read "
                        f"{'in ' + reader if reader else 'by the model itself'}; not supported yet"
                    )

    def _check_pairs(self, layers: Sequence[LayerSpec]) -> None:
        """Raises ConfigError for a pair of LoRA's beside a matrix that is read past its module: it would never run."""
        reads = self.trial.reads
        for name in [p.name for layer in layers for p in layer.parameters if is_adapter(p.name)]:
            if name not in reads and f"{module_of(name)}.weight" in reads:
                raise ConfigError(
                    f"lora.match: the matrix of {module_of(name)} is read without a call of the module, so a pair "
                    "beside it would never compute; make the pattern narrower"
                )

    def _check_types(self, layers: Sequence[LayerSpec]) -> None:
        """Raises ConfigError where the model would keep a trained parameter in FP32 while the rest is BF16: what
        streams is of one type."""
        dtype = next(self._model.parameters()).dtype
        for name in [p.name for layer in layers for p in layer.parameters]:
            if dtype != torch.float32 and kept_in_fp32(self._model, name):
                raise ConfigError(
                    f"{self._name} keeps {name} in FP32 whatever the rest is: set train.precision: fp32 or tf32"
                )

    def activations(self, structure: ModelStructure) -> ActivationBytes:
        weights = storages_of(self._model.parameters())
        boundary, kept, of_blocks = [], [], list[torch.Tensor]()
        for layer in structure.layers:
            calls = [call for path in layer.modules if (call := self.trial.first(path)) is not None]
            entering = [t for t in calls[0].inputs if t.requires_grad]
            boundary.append(_unique_bytes(entering, set()))
            own = [call for call in calls if call.path not in structure.loss_modules]
            kept.append(sum(self._kept(call, weights) for call in own))
            if layer.kind is LayerKind.BLOCK:
                of_blocks += calls[0].inputs
        masks = mask_bytes(self._attention, of_blocks, *self._batch)
        private = private_inputs(self._model, self.trial, structure)
        return ActivationBytes(tuple(boundary), tuple(kept), max(kept), masks, private=private)

    def _kept(self, call: Call, weights: set[int]) -> int:
        inputs = storages_of(call.inputs)
        return _unique_bytes(self.trial.saved[slice(*call.saved)], weights | inputs)

    def _vocab_size(self) -> int:
        size: int = self._model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        return size


def _unique_bytes(tensors: Sequence[torch.Tensor], without: set[int]) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(num_bytes for key, num_bytes in storages.items() if key not in without)
