"""Runs a model's forward with proxies in place of its layers, and its head on chunks of hidden states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ray.engine.layer_calls.forward_pass import LayerProxy, suspend
from megatrain_ray.engine.layer_calls.imagined_images import images_at_every_token
from megatrain_ray.engine.layer_calls.layer_call import is_floating
from megatrain_ray.engine.model.attention import (
    PACKED,
    AttentionSwitch,
    answer_packed,
    packed_arguments,
    pads_make_it_long,
    without_cache,
    without_pads,
)
from megatrain_ray.engine.model.images import GIVEN, OF_IMAGES, GivenImages, answer_features, arguments_of, uploaded
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.model.output_recorder import Recorder
from megatrain_ray.engine.model.structure import ModelStructure
from megatrain_ray.errors import ConfigError


class ProxiedModel:
    """Takes over a model on the meta device and replaces its layers with proxies."""

    def __init__(self, model: nn.Module, structure: ModelStructure, device: torch.device) -> None:
        # The layers' modules by path, to be called as templates.
        self.modules = {p: model.get_submodule(p) for layer in structure.layers for p in layer.modules}
        self.recorder = Recorder(model, structure.base, self.modules.items())
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        dtypes = (p.dtype for module in self.modules.values() for p in module.parameters())
        for path, module in self.modules.items():
            if path not in structure.loss_modules:
                model.set_submodule(path, LayerProxy(path, module, device))
        self._score = next(iter(structure.loss_modules)) if structure.is_reward else None
        self._base = model.get_submodule(structure.base)
        self._stub = _StubBaseModel(self._base)
        model.set_submodule(structure.base, self._stub)
        self._model = model
        self.attention = AttentionSwitch(model)
        answer_packed()
        self._has_tower = structure.has_tower
        answer_features(self._base, trained=self._has_tower)
        # A Transformers model reports the dtype and device of its first parameter as its own.
        anchor = torch.empty(0, dtype=next(dtypes), device=device)
        for module in {model, *self._base.modules()}:
            if hasattr(module, "base_model_prefix"):
                module._parameters = {"_anchor": nn.Parameter(anchor, requires_grad=False), **module._parameters}

    def forward_of(self, micro_batch: MicroBatch, upload: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        """Return the forward of a micro-batch, for a ForwardPass. Its token ids are uploaded to the device at once.

        What is given of images is uploaded when the forward begins.
        """
        input_ids, positions = upload(micro_batch.input_ids), micro_batch.positions
        if pads_make_it_long(self._model):
            positions = without_pads(positions, micro_batch.targets)
        packed, images = micro_batch.is_packed, micro_batch.images
        given = arguments_of(self._base, micro_batch.input_ids, positions, images) if images else {}
        positions = None if positions is None else upload(positions)

        def forward() -> Any:
            PACKED.set(packed)  # for this forward only: each greenlet has its own context
            of_images = uploaded(given, images, upload, trained=self._has_tower) if images else None
            return self.forward(input_ids, positions, of_images)

        return forward

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model and its layers into evaluation mode for the block, and restore their modes afterwards."""
        roots = (self._model, self._base, *self.modules.values())
        before = {module: module.training for root in roots for module in root.modules()}
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None = None, images: GivenImages | None = None
    ) -> Any:
        """Return the base model's output for [B, T] ids. To be run by a ForwardPass.

        positions: [B, T], by which the model keeps the documents of a row apart if it can (model/sight_check.py).
        images: has positions of its own.
        """
        GIVEN.set(images)
        arguments = images.arguments if images else packed_arguments(self._model, positions)
        output = self._base(input_ids=input_ids, **without_cache(self._base), **arguments)
        for name in OF_IMAGES if images else ():
            if name in output:
                output[name] = None
        self._stub.kind = type(output)
        return output

    def forward_of_images(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype
    ) -> Callable[[], Any]:
        """Return a forward in which every token is one of an image. Arguments: as for images_at_every_token."""
        ids = torch.full_like(input_ids, self._base.config.image_token_id)  # type: ignore[union-attr, arg-type]
        given = images_at_every_token(self._base, ids, positions, dtype, trained=self._has_tower)
        return partial(self.forward, ids, positions, given)

    def generate(self, input_ids: torch.Tensor, head: str, **arguments: Any) -> Any:
        """Run Transformers' `generate`. To be run by a ForwardPass.

        After each forward of the base model a call of `head`, a module of the head, without arguments is pending. From
        its answer on, until the next call, the modules of the loss must be bound.
        """
        from transformers import GenerationConfig

        PACKED.set(False)  # for this greenlet, which has its own context
        names = GenerationConfig().to_dict().keys() & arguments.keys()
        config = GenerationConfig(do_sample=False, **{name: arguments.pop(name) for name in names})
        with _as_it_was(self._model), _as_it_was(self._stub):
            # The model's own settings would fill in others, such as a penalty or an end.
            self._model.generation_config = config
            self._stub.then = partial(suspend, head)
            return self._model.generate(input_ids, generation_config=config, **arguments)  # type: ignore[operator]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits with the model's own bound head, after a `forward`: [B, T, D] → [B, T, V].

        A reward model has one for each token, which is its score. Its own forward would return the last one only.
        """
        if self._score is not None:
            scores: torch.Tensor = self.modules[self._score](hidden)
            return scores
        with self._stub.returning(self._stub.kind(last_hidden_state=hidden)):
            logits: torch.Tensor = self._model(inputs_embeds=hidden, **without_cache(self._model)).logits
        return logits

    def auxiliary(self, output: Any, real: torch.Tensor | None) -> torch.Tensor | None:
        """Return what the model's own forward adds to its loss for side outputs, such as a router's load balancing.

        The result is a scalar whose graph ends at those side outputs that require a gradient; None without side
        outputs, and for a reward model, which adds nothing. The head's parameters must be bound: the head runs on one
        token, whose loss is taken to be zero.

        output: the base model's output.
        real: bool [B, T], which inputs are no pads, as the load of experts leaves pads out; None: all.

        Raises ConfigError if the model computes its loss without self.loss_function.
        """
        side_outputs = [value for name, value in vars(output).items() if name != "last_hidden_state"]
        if self._score is not None or not any(map(is_floating, tree_leaves(side_outputs))):
            return None
        hidden = output.last_hidden_state[:1, :1].detach()
        one_token = copy.copy(output)
        one_token.last_hidden_state = hidden
        zeros: list[torch.Tensor] = []  # what the replaced loss over tokens has returned

        def zero_loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            zeros.append(torch.zeros((), dtype=torch.float32, device=logits.device))
            return zeros[-1]

        before = vars(self._model).get("_loss_function")
        self._model.loss_function = zero_loss  # type: ignore[assignment]
        labels = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        given: dict[str, Any] = {"inputs_embeds": hidden, "labels": labels, **without_cache(self._model)}
        if real is not None:
            given["attention_mask"] = real.long()
        try:
            with torch.enable_grad(), self._stub.returning(one_token):
                loss: torch.Tensor | None = self._model(**given).loss
        finally:
            vars(self._model).pop("_loss_function")
            if before is not None:
                self._model.loss_function = before
        if loss is not None and not zeros:
            raise ConfigError(
                f"{type(self._model).__name__} computes its loss without self.loss_function: what it adds for its side "
                "outputs cannot be told from the loss of tokens; switch them off in the model's configuration"
            )
        return loss


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Undo what the block changes of a module's own attributes. A compiled call would not fit a changed one."""
    before = dict(vars(module))
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)


class _StubBaseModel(nn.Module):
    """Replaces the base model: returns the given output when called, and forwards attribute reads to the base model."""

    kind: type = tuple  # class of the base model's own output
    _output: Any = None
    # If set, the base model itself is called, and this after each of its calls.
    then: Callable[[], object] | None = None

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__["_base"] = base  # not registered as a submodule: the model must not find it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    @contextmanager
    def returning(self, output: Any) -> Iterator[None]:
        self._output = output
        try:
            yield
        finally:
            self._output = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.then is None:
            return self._output
        output = self.__dict__["_base"](*args, **kwargs)
        for name, value in vars(output).items():
            if value == ():  # side outputs of layers, which only a training step collects
                output[name] = None
        self.then()
        return output
