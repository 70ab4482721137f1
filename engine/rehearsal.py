"""Every kind of layer once, forward and backward, before the first step: what is compiled when it is first used is
compiled then, and no step and no deadline waits for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from megatrain_ray.engine.attention import Attention
from megatrain_ray.engine.forward_pass import ForwardPass
from megatrain_ray.engine.layer_call import LayerCall, Outcome
from megatrain_ray.engine.plan import Plan
from megatrain_ray.engine.skeleton import Skeleton
from megatrain_ray.engine.template import Template, Templates, positions_of


def rehearse(skeleton: Skeleton, plan: Plan, device: torch.device, saving: AbstractContextManager[None]) -> None:
    """One micro-batch of each kind for which the plan takes flex attention, which is all that is compiled.

    `saving`: the saved-tensor context of a step. Compute thread only, before any step; weights are zeros.
    """
    index = torch.arange(plan.seq_len, device=device).expand(plan.micro_batch_size, -1)
    if plan.attention is Attention.FLEX:
        skeleton.attention.set(plan.attention)
        _micro_batch(skeleton, index, None, saving)
    if plan.packed_attention is Attention.FLEX:
        skeleton.attention.set(plan.packed_attention)
        _micro_batch(skeleton, index, index % (plan.seq_len // 2 + 1), saving)  # of two documents


def _micro_batch(
    skeleton: Skeleton, index: torch.Tensor, positions: torch.Tensor | None, saving: AbstractContextManager[None]
) -> None:
    templates = Templates()
    results: dict[Template, Any] = {}  # a layer like an earlier one is not run: it returns the same
    forward_pass = ForwardPass(lambda: skeleton.forward(torch.zeros_like(index), positions))
    forward_pass.start()
    while (call := forward_pass.pending) is not None:
        module = skeleton.modules[call.path]
        template = templates.get(module, [name for name, _ in module.named_parameters()])
        if template in results:
            forward_pass.answer(results[template])
            continue
        outcome = _run(skeleton, template, call, index.device, saving)
        results[template] = outcome.result
        forward_pass.resume(outcome)
    forward_pass.free()


def _run(
    skeleton: Skeleton, template: Template, call: LayerCall, device: torch.device, saving: AbstractContextManager[None]
) -> Outcome:
    parameters = [
        torch.zeros(p.shape, dtype=p.dtype, device=device, requires_grad=True) for p in template.module.parameters()
    ]
    with template.bound(parameters, positions_of(skeleton.modules[call.path])) as module:
        outcome = call.forward(partial(skeleton.recorder.run, module), parameters, saving)
        for leaf in call.leaves:
            leaf.grad = torch.zeros_like(leaf)
        call.backward([None] * len(call.ports))
        call.free()
    return outcome
