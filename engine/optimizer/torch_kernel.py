"""Implements the portable update kernel: torch's own operations on blocks that stay in a core's cache.

Threads that each have one torch thread work on blocks. One pass goes from gradient to residual, moments and working
copy. AdamW is bit-equal to `torch.optim.AdamW(fused=True)` on whole FP32 tensors. torch rounds v differently in the
scalar tail of a vector. So blocks are cut at multiples of 64 elements from a parameter's first one, and only the
parameter's own tail is scalar.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from megatrain_ray.engine.layout.flat_layout import ElementRange
from megatrain_ray.engine.layout.split_master import join_into, split_into
from megatrain_ray.engine.optimizer.adamw import (
    BLOCK_ELEMENTS,
    AdamState,
    AdamWConstants,
    ParamCoefficients,
    ParamWeighting,
    UpdateParams,
)
from megatrain_ray.engine.optimizer.muon import Muon
from megatrain_ray.engine.optimizer.stochastic_rounding import random_bits, round_into
from megatrain_ray.engine.optimizer.undo_log import ParamSlice, Transaction, blocks_of


class Scratch:
    """Holds one thread's buffers for a block, allocated once. Threads are numbered from 0."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.gradient, self.master, self.m, self.v = torch.empty(4, BLOCK_ELEMENTS, dtype=torch.float32).unbind()
        self.bits, self.random, self.random16 = torch.empty(3, BLOCK_ELEMENTS, dtype=torch.int32).unbind()


def update_block(
    part: ParamSlice, elements: ElementRange, gradient: Tensor, directions: Tensor | None, hyper: AdamWConstants,
    params: UpdateParams, scratch: Scratch,
) -> None:  # fmt: skip
    """Update a block of a part's elements in place: with Muon if it trains the part, else with AdamW.

    gradient: of the whole layer; only read.
    directions: the same for what Muon trains.
    """
    state, first = part.state.cut(elements), part.gradient_start
    of_block = slice(first + elements.start, first + elements.stop)
    if part.by_muon and directions is not None and hyper.muon:
        move = part.coefficients(hyper, params)
        _muon_block(state, gradient[of_block], directions[of_block], hyper.muon, params.scale, move, scratch)
    else:
        counter = part.counter(hyper, params) + elements.start
        adamw_block(state, gradient[of_block], hyper, params, part.weighting, scratch, counter)


def adamw_block(
    state: AdamState, gradient: Tensor, hyper: AdamWConstants, params: UpdateParams, weighting: ParamWeighting,
    scratch: Scratch, counter: int = 0,
) -> None:  # fmt: skip
    """Update at most BLOCK_ELEMENTS elements of a parameter in place.

    gradient: of these elements, bf16 or fp32; only read.
    counter: counter of the first element's random bits (rounding_counter), if moments are bf16.

    The block must start at a multiple of 64 elements from its parameter's first one, and end at such a multiple or at
    the parameter's last element.
    """
    assert state.v is not None  # only parameters that Muon trains have none
    size = gradient.numel()
    master = _joined(state, scratch)
    is_narrow = state.m.dtype == torch.bfloat16
    m = scratch.m[:size].copy_(state.m) if is_narrow else state.m
    v = scratch.v[:size].copy_(state.v) if is_narrow else state.v
    torch._fused_adamw_(
        [master],
        [_scaled(gradient, params.scale, scratch.gradient[:size])],
        [m],
        [v],
        [],
        [torch.tensor(float(params.adam_step))],
        lr=params.lr * weighting.lr_scale,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=weighting.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
    )
    if is_narrow:
        _round_moments(state.m, state.v, counter, scratch)
    if state.residual is not None:
        split_into(master, state.working, state.residual, scratch.bits[:size])


def _muon_block(
    state: AdamState, gradient: Tensor, directions: Tensor, muon: Muon, scale: float, move: ParamCoefficients,
    scratch: Scratch,
) -> None:  # fmt: skip
    """Update a block with Muon, bit-equal to `torch.optim.Muon` on whole FP32 matrices, wherever blocks are cut."""
    size = gradient.numel()
    master = _joined(state, scratch)
    state.m.lerp_(_scaled(gradient, scale, scratch.gradient[:size]), 1 - muon.momentum)
    master.mul_(move.decay)
    master.add_(directions, alpha=move.step_size)
    if state.residual is not None:
        split_into(master, state.working, state.residual, scratch.bits[:size])


def _joined(state: AdamState, scratch: Scratch) -> Tensor:
    if state.residual is None:
        return state.working
    master = scratch.master[: state.working.numel()]
    join_into(state.working, state.residual, master)
    return master


def _round_moments(m: Tensor, v: Tensor, counter: int, scratch: Scratch) -> None:
    size = m.numel()
    bits, random, random16 = scratch.bits[:size], scratch.random[:size], scratch.random16[:size]
    random_bits(counter, random, bits)
    round_into(scratch.m[:size], torch.bitwise_right_shift(random, 16, out=random16).bitwise_and_(0xFFFF), m, bits)
    round_into(scratch.v[:size], random.bitwise_and_(0xFFFF), v, bits)


def _scaled(gradient: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return the gradient as FP32, times an FP32 `scale`: in `out`, or itself if nothing changes."""
    if gradient.dtype == torch.float32:
        return gradient if scale == 1.0 else torch.mul(gradient, scale, out=out)
    # Multiplying the bf16 tensor itself would round the product to bf16.
    out.copy_(gradient)
    return out if scale == 1.0 else out.mul_(scale)


COPY_ELEMENTS = 1 << 20
Job = Callable[[Scratch], None]


class BlockPool:
    """Runs `num_threads` threads that take jobs from one queue.

    A job's result must not depend on which thread runs it.
    """

    def __init__(self, num_threads: int) -> None:
        self._scratch = [Scratch(thread) for thread in range(num_threads)]
        self._pool = _single_threaded_pool(num_threads)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs and return when they are done.

        After a job has raised, no other begins. Its error is raised here once all threads have stopped working.
        """
        queue = deque(jobs)

        def work(scratch: Scratch) -> None:
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                try:
                    job(scratch)
                except BaseException:
                    queue.clear()
                    raise

        futures = [self._pool.submit(work, scratch) for scratch in self._scratch[: len(queue)]]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()


def _single_threaded_pool(num_threads: int) -> ThreadPoolExecutor:
    """Start a pool of threads that each use one torch thread.

    A thread takes torch's number of threads from the process's last setting when it first needs it. So all threads
    start here, each with the setting 1. Then the setting is restored for threads that others start later.
    """
    setting = torch.get_num_threads()
    started = threading.Barrier(num_threads)

    def initialize() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # from here on later settings of other threads do not reach this one

    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="adamw", initializer=initialize)
    for future in [pool.submit(started.wait) for _ in range(num_threads)]:
        future.result()
    torch.set_num_threads(setting)
    return pool


class TorchBlocks:
    """Is an UpdateKernel for every machine on which torch runs."""

    name = "torch blocks"

    def __init__(self, num_threads: int, hyper: AdamWConstants) -> None:
        self._hyper = hyper
        self._pool = BlockPool(num_threads)

    def update(
        self, parts: Sequence[ParamSlice], gradient: Tensor, params: UpdateParams, transaction: Transaction | None,
        directions: Tensor | None = None,
    ) -> None:  # fmt: skip
        def job(part: ParamSlice, units: ElementRange, scratch: Scratch) -> None:
            # Cut here, by the thread that works on the block: if only the caller cut, the others would wait for it.
            elements = part.elements(units)
            if transaction:
                transaction.journal.save(scratch.thread, units, part.state.cut(elements), transaction.serial)
            update_block(part, elements, gradient, directions, self._hyper, params, scratch)
            if transaction:
                transaction.journal.mark(units, transaction.serial)

        def blocks(part: ParamSlice) -> Iterator[ElementRange]:
            return (
                transaction.journal.unmarked_blocks(part, transaction.serial) if transaction else blocks_of(part.units)
            )

        self._pool.run(partial(job, part, units) for part in parts for units in blocks(part))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        def job(to: Tensor, source: Tensor, _: Scratch) -> None:
            to.copy_(source)

        chunks = (
            zip(torch.split(to, COPY_ELEMENTS), torch.split(source, COPY_ELEMENTS), strict=True) for to, source in pairs
        )
        self._pool.run(partial(job, *chunk) for of_pair in chunks for chunk in of_pair)

    def close(self) -> None:
        self._pool.close()
