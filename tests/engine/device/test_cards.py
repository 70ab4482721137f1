"""Built-in rates of GPUs: they follow the published figures, and none but the reference is taken as it was measured."""

from __future__ import annotations

import pytest

from megatrain_ray.engine.device.cards import card_for, cards, rates_of
from megatrain_ray.engine.device.hardware_profile import TYPICAL_GPU

GIB = 1 << 30


@pytest.mark.parametrize("name", cards())
def test_a_cards_products_reach_less_than_it_publishes(name: str) -> None:
    card, rates = cards()[name], rates_of(name)
    for precision, published in (("bf16", card.bf16), ("tf32", card.tf32), ("fp32", card.fp32)):
        assert 0.6 < max(point.per_s for point in rates.matmul[precision]) / 1e12 / published < 0.95
    assert 0.8 < rates.device_bytes_per_s / 1e9 / card.memory < 0.9
    assert rates.both_bytes_per_s <= rates.h2d_bytes_per_s == 55e9 / 2 ** (5 - card.pcie)
    assert rates.adamw_busy_per_s < rates.adamw_per_s
    assert card.source


def test_a_slower_card_takes_as_long_for_less_work() -> None:
    """A small product takes as long on each: it is bound by its launch."""
    share = max(point.per_s for point in rates_of("rtx3090").matmul["bf16"]) / 770e12
    flops = 2.0 * 1024**3
    typical_s = TYPICAL_GPU.matmul_s("bf16", flops)
    assert rates_of("rtx3090").matmul_s("bf16", share * flops) == pytest.approx(typical_s, rel=0.1)


@pytest.mark.parametrize(
    ("num_bytes", "name"),
    [(0, "rtx4090"), (24 * GIB, "rtx4090"), (32 * GIB, "rtx5090"), (40 * GIB, "a100_40gb"), (80 * 10**9, "h100"),
     (96 * GIB, "rtx_pro_6000"), (141 * 10**9, "h200"), (192 * 10**9, "b200"), (1 << 50, "b200")],
)  # fmt: skip
def test_a_limit_stands_for_the_smallest_card_that_has_it(num_bytes: int, name: str) -> None:
    assert card_for(num_bytes) == name
