"""Samples completions on the compute thread: Transformers' own `generate`, with weights streamed for every token.

`generate` runs in a ForwardPass, suspended at every layer, as the forward of a step does. So a model samples with the
cache, positions and masks that Transformers gives it, and weights are wherever the plan puts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.layer_calls.forward_pass import ForwardPass
from megatrain_ray.engine.plan.schedule import Visit
from megatrain_ray.engine.weights_stream.bound_model import BoundModel
from megatrain_ray.engine.weights_stream.layer_streamer import LayerStreamer
from megatrain_ray.virtual_clock import Op

MOST_ROWS = 512  # that a rank samples together; more are halved less often than a GPU has room for them
DRAWN_ROWS = 64  # whose probabilities exist in FP64 at the same time


@dataclass(frozen=True)
class SamplingParams:
    """Says how tokens are drawn.

    temperature: divides the logits; 0: the likeliest token is taken.
    top_p: tokens are drawn from the likeliest ones that have this probability together.
    ends: tokens after which a completion is over.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    ends: tuple[int, ...] = ()


class Prompt(NamedTuple):
    """Holds the token ids that a completion follows, and the seed of its random numbers."""

    ids: Sequence[int]
    seed: int


class Completion(NamedTuple):
    """Holds sampled tokens.

    logprobs: of each token by the model itself, whatever temperature and top_p it was drawn with.
    ended: whether its last token is one of `SamplingParams.ends`.
    """

    ids: list[int]
    logprobs: list[float]
    ended: bool


class SamplingProgress(Enum):
    """Says where a rank stands in a sampling. The largest value of all ranks is that of the sampling."""

    OVER = 0
    GOES_ON = 1
    NO_ROOM = 2  # in device memory


class Sampler:
    """Runs one `generate` at a time, a few tokens in each call of `run`. Compute thread only."""

    def __init__(self, device: Device, model: BoundModel, streamer: LayerStreamer) -> None:
        self._device = device
        self._model = model
        self._streamer = streamer
        self._pass: ForwardPass | None = None
        self._draw = _Draw((), SamplingParams(0), torch.device("cpu"))
        self.current_phase = ""  # empty while nothing is sampled; read by other threads

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        """Prepare to sample a completion of each prompt. They are computed together, padded on the left.

        Without prompts nothing is computed.
        """
        self.abandon()  # one that was cut short by an error
        self._draw = _Draw(prompts, sampling, self._device.torch_device)
        if not prompts:
            return
        longest = max(len(prompt.ids) for prompt in prompts)
        pad = sampling.ends[0] if sampling.ends else 0
        pads = [longest - len(prompt.ids) for prompt in prompts]
        ids = torch.tensor([[pad] * n + list(prompt.ids) for n, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
        arguments: dict[str, Any] = {
            "attention_mask": self._device.upload(mask), "max_new_tokens": sampling.max_new_tokens,
            "pad_token_id": pad, "eos_token_id": list(sampling.ends) or None, "logits_processor": [self._draw],
        }  # fmt: skip
        self._pass = ForwardPass(self._model.generating(self._device.upload(ids), arguments))

    def run(self, visits: Sequence[Visit]) -> SamplingProgress:
        """Make the visits, those of one forward or more.

        Once all completions are over, or there is no room for them, the remaining visits compute nothing.
        """
        has_room = True
        with self._model.proxied.evaluating(), torch.no_grad():
            for visit in visits:
                with self._streamer.layer(visit.index) as regions, self._model.weights.bound(regions):
                    if self._pass is None:
                        continue
                    try:
                        self._visit(visit.layer, self._pass)
                    except torch.OutOfMemoryError:
                        has_room = False
                        self.abandon()
        self.current_phase = ""
        if not has_room:
            return SamplingProgress.NO_ROOM
        return SamplingProgress.OVER if self._pass is None else SamplingProgress.GOES_ON

    def abandon(self) -> None:
        """Sample no further. Idempotent."""
        if self._pass is not None:
            self._pass.abandon()
        self._pass = None

    def completions(self) -> list[Completion]:
        """Return the completions, in the order of their prompts, once all of them are over; none without prompts."""
        return self._draw.completions() if self._draw.count else []

    def _visit(self, layer: int, forward_pass: ForwardPass) -> None:
        self.current_phase = f"sampling, token {self._draw.count + 1}, {self._model.structure.layers[layer].name}"
        if layer == 0 and forward_pass.pending is None:
            forward_pass.start()
        while (call := forward_pass.pending) is not None and self._model.structure.layer_of[call.path] == layer:
            op = Op("sample", layer)
            if call.path in self._model.structure.loss_modules:  # bound until the next forward calls its first layer
                with self._device.compute(op), self._model.bound_loss():
                    forward_pass.answer(None)
            else:
                with self._device.compute(op), self._model.bound(call.path):
                    result = call.infer(self._model.eager(call.path))
                forward_pass.answer(result)
        if forward_pass.pending is None:
            self._pass = None


def packed(completions: Sequence[Completion], num_rows: int, max_new_tokens: int) -> torch.Tensor:
    """Return completions as numbers, FP64 1-D, which hold ids and log-probabilities exactly. Rows of 0 fill them up."""
    rows = torch.zeros(num_rows, 2 + 2 * max_new_tokens, dtype=torch.float64)
    for row, (ids, logprobs, ended) in zip(rows, completions, strict=False):
        row[:2] = torch.tensor([len(ids), ended])
        row[2 : 2 + len(ids)] = torch.tensor(ids)
        row[2 + max_new_tokens :][: len(ids)] = torch.tensor(logprobs, dtype=torch.float64)
    return rows.flatten()


def unpacked(values: torch.Tensor, num_ranks: int, max_new_tokens: int) -> list[Completion]:
    """Return the completions in what all ranks have `packed`: the first of each rank, then the second of each."""
    rows = values.view(num_ranks, -1, 2 + 2 * max_new_tokens).transpose(0, 1).flatten(0, 1)
    found = []
    for row in rows:
        length, ended = row[:2].long().tolist()
        ids, logprobs = (part[:length] for part in row[2:].split(max_new_tokens))
        found.append(Completion(ids.long().tolist(), logprobs.tolist(), bool(ended)))
    return found


class _Draw:
    """Is a logits processor that draws a token for each row and leaves no other token a chance.

    A row draws its tokens by numbers of its own, so they do not depend on the rows beside it.
    """

    def __init__(self, prompts: Sequence[Prompt], sampling: SamplingParams, device: torch.device) -> None:
        self._sampling = sampling
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []  # by token: ids and log-probabilities of all rows
        size = sampling.max_new_tokens, len(prompts)
        self._uniform = torch.empty(size, dtype=torch.float64)
        for row, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(prompt.seed)
            self._uniform[:, row] = torch.rand(size[0], generator=generator, dtype=torch.float64)
        self._uniform = self._uniform.to(device)

    @property
    def count(self) -> int:
        """Return how many tokens each row has drawn."""
        return len(self._drawn)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores, [B, V], that are 0 for the drawn token of each row and -inf for all others."""
        parts = zip(torch.split(scores, DRAWN_ROWS), torch.split(self._uniform[self.count], DRAWN_ROWS), strict=True)
        ids = torch.cat([self._drawn_from(*part) for part in parts])
        logprobs = scores.gather(-1, ids).float() - scores.float().logsumexp(-1, keepdim=True)
        self._drawn.append((ids[:, 0], logprobs[:, 0]))
        return torch.full_like(scores, -torch.inf).scatter_(-1, ids, 0.0)

    def _drawn_from(self, scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Return the first token of each row whose cumulated probability exceeds the row's number, [B, 1]."""
        if self._sampling.temperature == 0:
            return scores.argmax(-1, keepdim=True)
        order = None
        probabilities = torch.softmax(scores.double() / self._sampling.temperature, -1)
        if self._sampling.top_p < 1:
            probabilities, order = probabilities.sort(stable=True, dim=-1, descending=True)
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self._sampling.top_p, 0.0)
        cumulated = probabilities.cumsum(-1)
        threshold = uniform[:, None] * cumulated[:, -1:]
        places = torch.searchsorted(cumulated, threshold, right=True).clamp_(max=cumulated.shape[-1] - 1)
        return places if order is None else order.gather(-1, places)

    def completions(self) -> list[Completion]:
        ids, logprobs = (torch.stack(values, 1).tolist() for values in zip(*self._drawn, strict=True))
        found = []
        for row_ids, row_logprobs in zip(ids, logprobs, strict=True):
            end = next((k for k, token in enumerate(row_ids) if token in self._sampling.ends), None)
            length = len(row_ids) if end is None else end + 1
            found.append(Completion(row_ids[:length], row_logprobs[:length], end is not None))
        return found
