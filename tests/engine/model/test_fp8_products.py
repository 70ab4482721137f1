"""Products in FP8: what is rounded, how far the results are from bf16, and which modules compute so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatrain_ray.engine.model.fp8_products import LARGEST, Fp8Factory, Fp8Linear, fp8_problem, fp8_weights, quantised
from megatrain_ray.engine.model.lora import AdaptedFactory, Lora
from megatrain_ray.errors import ConfigError
from tests.support.fp8_linear import in_fp8

TOKENS, INPUTS, OUTPUTS = 40, 64, 96  # tokens that no kernel of a GPU would take, since 16 does not divide them
# e4m3 has three bits after the point, so elements are off by 2.6 % in the mean square, and sums of products by √2 times
# that.
BOUND = 0.045


def linear(inputs: int = INPUTS, outputs: int = OUTPUTS, *, bias: bool = True) -> Fp8Linear:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    made.__class__ = Fp8Linear
    assert isinstance(made, Fp8Linear)
    return made


def run(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return output, and the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = module(x)
    return [output.detach(), *torch.autograd.grad(output, (x, *module.parameters()), gradient)]


def off(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def test_gradients_are_near_those_of_autograd() -> None:
    """Rows of inputs and gradients are of very different size, as those of tokens and of outputs are."""
    module = linear()
    sizes = 10.0 ** torch.linspace(-9, 0, TOKENS)[:, None]
    x, gradient = torch.randn(2, TOKENS // 2, INPUTS), (torch.randn(TOKENS, OUTPUTS) * sizes).view(2, -1, OUTPUTS)
    given = x.bfloat16(), gradient.bfloat16()
    ours = run(module, *given)
    module.__class__ = nn.Linear
    theirs = run(module, *given)
    assert [t.dtype for t in ours] == [torch.bfloat16] * 4
    assert torch.equal(ours[3], theirs[3]), "that of the bias is no product"
    distances = [off(*pair) for pair in zip(ours[:3], theirs, strict=False)]
    assert all(0.01 < distance < BOUND for distance in distances), distances
    of_tokens = [off(*pair) for pair in zip(ours[1].flatten(0, 1), theirs[1].flatten(0, 1), strict=True)]
    assert max(of_tokens) < 2 * BOUND, "each token has a scale of its own"


def test_products_are_those_of_rounded_numbers_in_fp32() -> None:
    module, x = linear(bias=False), torch.randn(TOKENS, INPUTS).bfloat16()
    gradient = torch.randn(TOKENS, OUTPUTS).bfloat16()

    def product(a: Tensor, b: Tensor) -> Tensor:
        (a8, a_scale), (b8, b_scale) = in_fp8(a), in_fp8(b)
        return (a8.float() * a_scale) @ (b8.float() * b_scale).T

    weight = module.weight.detach()
    expected = product(x, weight), product(gradient, weight.T), product(gradient.T, x.T)
    for ours, theirs in zip(run(module, x, gradient), expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-8, atol=1e-5)  # rounded to bf16


def test_it_is_one_graph_for_the_compiler() -> None:
    module, x, gradient = linear(), torch.randn(1, 20, INPUTS).bfloat16(), torch.randn(1, 20, OUTPUTS).bfloat16()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    for ours, theirs in zip(run(compiled, x, gradient), run(module, x, gradient), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_of_zeros_tiny_rows_and_rows_that_are_not_finite() -> None:
    rows = torch.zeros(4, 16, dtype=torch.bfloat16)
    rows[1, 3], rows[2, 0], rows[3, 5] = 1e-20, float("inf"), float("nan")
    values, scales = quantised(rows)
    assert not values[0].float().any()
    assert (values[1, 3].float(), scales[1]) == (LARGEST, rows[1, 3].float() / LARGEST)
    assert values[2].float().isnan().any(), "a step whose gradient is not finite is skipped, so it must be seen"
    assert values[3].float().isnan().any()


def test_a_frozen_weight_and_an_input_without_gradient() -> None:
    module, x = linear(), torch.randn(16, INPUTS).bfloat16().requires_grad_()
    module.weight.requires_grad_(False)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        output = module(x)
    assert [t.data_ptr() for t in kept] == [module.weight.data_ptr()], "no input is kept for a weight that is frozen"
    output.sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None
    first = linear()
    first(x.detach()).sum().backward()
    assert first.weight.grad is not None


class Model(nn.Module):
    """Has a list of one layer, and what is in no list."""

    def __init__(self, sides: dict[str, tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64, dtype=dtype)
        linears = {name: nn.Linear(*both, dtype=dtype) for name, both in sides.items()}
        self.layers = nn.ModuleList(
            [nn.ModuleDict(linears | {"experts": nn.ModuleList([nn.Linear(64, 64, dtype=dtype)])})]
        )
        self.head = nn.Linear(64, 64, dtype=dtype)


def test_large_matrices_of_layers_compute_in_fp8() -> None:
    sides = {"up": (64, 176), "router": (512, 32), "odd": (64, 72)}
    factory = Fp8Factory(lambda dtype: Model(sides, dtype))
    assert list(fp8_weights(factory(torch.bfloat16))) == ["layers.0.up.weight"]
    assert not list(fp8_weights(factory(torch.float32)))
    adapted = AdaptedFactory(factory, Lora(("up$",), 16, 16.0))(torch.bfloat16)
    assert list(fp8_weights(adapted)) == ["layers.0.up.weight"], "its pair is in bf16"
    with pytest.raises(ConfigError, match="the layers of Model have no linear module whose sides are multiples of 16"):
        Fp8Factory(lambda dtype: Model({"odd": (64, 72)}, dtype))(torch.bfloat16)


def test_a_device_without_such_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_problem(torch.device("cpu")) is None

    def refuse(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no kernel\nand a page more")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert fp8_problem(torch.device("cpu")) == "no kernel"
