"""Measures how fast a device computes matrix products and attention, by their size.

Products are measured as a step needs them, by a device that is under load for seconds. In its first second a card may
compute faster than its power lets it later on: an H100 multiplied at 730 TFLOPS, and then at 570 to 730, as its clock
went up and down every 0.7 s (rates under load in benchmarks/README.md).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch
import torch.nn.functional as F

from megatrain_ray.engine.device.device import Device
from megatrain_ray.engine.device.hardware_profile import RatePoint
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.measure.timing import Effort, median_s, repeated, times_s
from megatrain_ray.engine.model.fp8_products import fp8_problem, multiply_quantised, quantised

log = logging.getLogger(__name__)

ATTENDED = 8192  # tokens of all sequences in one call of attention together
HEADS, HEAD_DIM = 16, 128
EXPERTS, MODEL_DIM, EXPERT_DIM = 32, 2048, 1536  # of a grouped product; rates of other shapes are within 10 % of its
SUSTAINED_WIDTH = 2048  # narrower products take less power than a card has
SHORT_S = 0.02  # long enough for many copies or small products in a row, of which each hides the next one's launch
COPIED_SHARE = 0.15  # of the time under load, as in a layer: between products memory is read and written
COMPUTED = "bf16", "fp32", "tf32"
FP8 = "fp8"  # also measured where the device has such products, which is on GPUs

MakeDevice = Callable[[Precision], Device]


def matmul_rates(make_device: MakeDevice, name: str, effort: Effort) -> Iterator[RatePoint]:
    """Yield the rates of products of square matrices of growing width, until one is slow.

    name: precision, or FP8. Yields nothing for FP8 on the CPU device, and where torch or the GPU has no FP8.
    """
    is_first = name == COMPUTED[0]
    precision = Precision.BF16 if name == FP8 else Precision(name)
    with closing(make_device(precision)) as device, device.activate():
        if name == FP8 and (device.kind == "cpu" or fp8_problem(device.torch_device)):
            return
        traffic = _Traffic(device, effort.device_bytes)
        if is_first and device.torch_device.type == "cuda":  # on a CPU one such product may take minutes
            traffic.seconds_among_copies(_product(effort.widths[-1], name, device), effort.warm_s)
        for width in effort.widths:
            product = _product(width, name, device)
            if width < SUSTAINED_WIDTH:
                seconds = median_s(repeated(product, device), effort.budget_s)
            else:
                seconds = traffic.seconds_among_copies(product, effort.sustained_s / (1 if is_first else 2))
            yield RatePoint(2.0 * width**3, 2.0 * width**3 / seconds)
            if seconds > effort.slow_s:
                return


def attention_rates(device: Device, effort: Effort) -> Iterator[RatePoint]:
    """Yield the rates of causal attention in bf16, forward and backward, of growing length, until one is slow."""
    for length in effort.lengths:
        batch = max(1, ATTENDED // length)
        shape = batch, HEADS, length, HEAD_DIM
        query = torch.randn(shape, dtype=torch.bfloat16, device=device.torch_device, requires_grad=True)
        seconds = median_s(repeated(partial(_attend, query), device), effort.sustained_s / 2)
        yield RatePoint(float(length), 6.0 * HEADS * HEAD_DIM * batch * length**2 / seconds)
        if seconds > effort.slow_s:
            return


def grouped_rates(device: Device, effort: Effort) -> Iterator[RatePoint]:
    """Yield the rates of grouped products in bf16, forward and backward, by the rows of each expert.

    Yields nothing on the CPU device, and where torch or the GPU has no grouped products.
    """
    if device.kind == "cpu":
        return
    make = partial(torch.randn, dtype=torch.bfloat16, device=device.torch_device)
    weights = make(EXPERTS, MODEL_DIM, EXPERT_DIM).requires_grad_()
    for rows in effort.rows:
        tokens, gradient = make(EXPERTS * rows, MODEL_DIM).requires_grad_(), make(EXPERTS * rows, EXPERT_DIM)
        ends = rows * torch.arange(1, EXPERTS + 1, device=device.torch_device, dtype=torch.int32)
        work = partial(_multiply_grouped, tokens, weights, ends, gradient)
        try:
            seconds = median_s(repeated(work, device), effort.sustained_s / 2)
        except (AttributeError, RuntimeError) as error:
            log.info("grouped products are not measured: %s", error)
            return
        yield RatePoint(float(rows), 6.0 * EXPERTS * rows * MODEL_DIM * EXPERT_DIM / seconds)


class _Traffic:
    """Keeps device memory busy between products, as the other operations of a layer do."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        source, target = (device.allocate(num_bytes).zero_() for _ in range(2))
        self._copy = partial(target.copy_, source)
        self._copy_s = median_s(repeated(self._copy, device), SHORT_S)

    def seconds_among_copies(self, product: Callable[[], object], budget_s: float) -> float:
        """Return the mean seconds of the product in a mixture with copies, over `budget_s` seconds."""
        once_s = median_s(repeated(product, self._device), SHORT_S)
        count = max(1, round((1 / COPIED_SHARE - 1) * self._copy_s / once_s))

        def mixture() -> None:
            for _ in range(count):
                product()
            self._copy()

        mixed_s = statistics.fmean(times_s(repeated(mixture, self._device), budget_s))
        return max(mixed_s - self._copy_s, mixed_s / 2) / count


def _attend(query: torch.Tensor) -> None:
    made = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.autograd.grad(made, query, torch.ones_like(made))


def _product(width: int, name: str, device: Device) -> Callable[[], object]:
    # Not zeros: a GPU multiplies those at a higher clock than other numbers.
    dtype = torch.bfloat16 if name == FP8 else Precision(name).working_dtype
    a = torch.randn(width, width, dtype=dtype, device=device.torch_device)
    if name == FP8:
        return partial(multiply_quantised, quantised(a), quantised(a))
    return partial(torch.mm, a, a)


def _multiply_grouped(tokens: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, gradient: torch.Tensor) -> None:
    made = torch._grouped_mm(tokens, weights, offs=ends)
    torch.autograd.grad(made, (tokens, weights), gradient)
