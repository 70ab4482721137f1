"""What the chunks of a loss leave behind."""

from __future__ import annotations

import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from megatrain_ray.engine.model import chunked_loss as loss
from megatrain_ray.engine.model.chunked_loss import (
    Objective,
    OpenSum,
    Targets,
    chunk_sums,
    chunked_loss,
    cross_entropy_sum,
    logprobs_and_entropies,
    score_chunks,
    target_logprobs,
)
from tests.support.live_bytes import Live


@pytest.mark.parametrize("is_open", [True, False], ids=["into a sum", "into one of its own"])
def test_a_chunk_has_the_only_gradient_of_the_head(monkeypatch: pytest.MonkeyPatch, is_open: bool) -> None:
    """The head is the largest matrix: two gradients of it would be 2 GB of a small device's memory."""
    weight = torch.randn(11, 4, dtype=torch.bfloat16, requires_grad=True)
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    take = loss.gradients_of

    def taken(*args: Any) -> list[torch.Tensor | None]:
        alive.append(sum(gradient() is not None for gradient in seen))
        found = take(*args)
        assert found[1] is not None
        seen.append(weakref.ref(found[1]))
        return found

    monkeypatch.setattr(loss, "gradients_of", taken)
    sums = partial(chunk_sums, lambda hidden: (hidden @ weight.T).float(), Objective())
    into = [OpenSum(torch.empty(11, 4), True)] if is_open else []
    hidden, targets = torch.randn(1, 12, 4, dtype=torch.bfloat16, requires_grad=True), torch.arange(12)[None] % 11
    result = chunked_loss(sums, hidden, Targets(targets), [weight], chunk_tokens=4, total_weight=12, into=into)
    assert alive == [0, 0, 0]
    total = into[0].total if is_open else result.parameters[0]
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T)[0].float(), targets[0])
    assert total is not None
    assert torch.allclose(total.float(), torch.autograd.grad(expected, weight)[0].float(), atol=5e-3)


def test_an_impossible_token_adds_nothing_to_the_entropy() -> None:
    scores, targets = torch.zeros(1, 3, 8), torch.tensor([0, 1, -100])
    scores[0, :, 4:] = -torch.inf
    scores[0, 1] = torch.tensor([-torch.inf, 0.0, *[-torch.inf] * 6])
    found = logprobs_and_entropies(scores, Targets(targets))
    assert found.flatten().tolist() == pytest.approx([-math.log(4), math.log(4), 0, 0, 0, 0])


def test_scores_take_no_more_memory_than_the_loss_that_follows() -> None:
    """So a preference or a policy needs none beyond that of chats.

    Not compiled, logits and their gradient take 12 bytes each; compiled 4, and then scores are of half as many tokens.
    """
    num_tokens, vocab_size = 64, 8192
    weight = torch.nn.Parameter(torch.randn(vocab_size, 8, dtype=torch.bfloat16))
    hidden, targets = torch.randn(1, num_tokens, 8, dtype=torch.bfloat16), Targets(torch.zeros(1, num_tokens).long())
    for of_chunk in (target_logprobs, logprobs_and_entropies, cross_entropy_sum):
        with Live(weight, hidden) as live:
            before = live.most
            score_chunks(lambda chunk: chunk @ weight.T, hidden, targets, of_chunk, chunk_tokens=num_tokens)
        assert live.most - before == pytest.approx(num_tokens * vocab_size * 2 * 4, rel=0.01), of_chunk
