"""Evaluates on the compute thread: runs only the forward of a step, and scores its targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.gradients.interfaces import LayerSource
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.model.chunked_loss import OfChunk, Targets, score_chunks
from megatrain_ray.engine.model.micro_batch import MicroBatch
from megatrain_ray.engine.plan.schedule import Phase, Visit
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.virtual_clock import Op


class Evaluator:
    """Runs forwards in evaluation mode, keeping nothing for a backward. Compute thread only."""

    def __init__(self, device: Device, model: BoundModel, streamer: LayerSource, chunk_tokens: int) -> None:
        self._device = device
        self._model = model
        self._streamer = streamer
        self._chunk_tokens = chunk_tokens
        self.current_phase = ""  # empty while nothing is evaluated; read by other threads

    def run(
        self, micro_batches: Sequence[MicroBatch], visits: Sequence[Visit], of_chunk: OfChunk,
        weights: LayerSource | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return what `of_chunk` makes of the scores of every chunk, joined in the order of tokens, on the device.

        weights: provides the weights of the visits; None: those that are trained.
        """
        source = weights or self._streamer
        passes = self._model.forward_passes(micro_batches)
        targets = [micro_batch.uploaded_targets(self._device.upload) for micro_batch in micro_batches]
        found: dict[int, torch.Tensor] = {}  # by micro-batch
        with self._model.proxied.evaluating(), torch.no_grad():
            for visit in visits:
                self.current_phase = (
                    f"evaluation, {visit.phase.value} of {self._model.structure.layers[visit.layer].name}"
                )
                with source.layer(visit.index) as regions, self._model.weights.bound(regions):
                    for j in visit.micro_batches:
                        if visit.layer == 0:
                            passes[j].start()
                        self._forward(visit.layer, j, passes[j])
                        if visit.phase is Phase.HEAD:
                            found[j] = self._score(j, passes[j], targets[j], of_chunk)
        self.current_phase = ""
        return torch.cat([found[j] for j in sorted(found)])

    def _forward(self, layer: int, j: int, forward_pass: ForwardPass) -> None:
        while (call := forward_pass.pending) is not None and self._model.structure.layer_of[call.path] == layer:
            op = Op("evaluate", layer, j)
            with self._model.bound(call.path) as (function, _), self._device.compute(op):
                result = call.infer(function)
            forward_pass.answer(result)

    def _score(self, j: int, forward_pass: ForwardPass, targets: Targets, of_chunk: OfChunk) -> torch.Tensor:
        hidden = forward_pass.final_hidden
        forward_pass.free()
        op = Op("evaluate loss", len(self._model.structure.layers) - 1, j)
        with self._model.bound_loss(), self._device.compute(op):
            logits = self._model.proxied.logits
            return score_chunks(logits, hidden, targets, of_chunk, chunk_tokens=self._chunk_tokens)
