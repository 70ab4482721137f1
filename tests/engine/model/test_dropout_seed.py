"""The dropout seed: fixed for ever, and another one for every place it is asked at."""

from __future__ import annotations

from itertools import product

import torch

from megatrain_ray.engine.model.micro_batch import dropout_seed


def test_values_are_fixed_for_ever() -> None:
    assert dropout_seed(0, 1, 0, 0, 0) == 0x7CD63719BE17878F
    assert dropout_seed(7, 100, 3, 28, 1) == 0x27E7086D9EC244B6


def test_every_place_has_its_own_seed_in_63_bits_and_in_the_32_that_the_cpu_generator_reads() -> None:
    seeds = [dropout_seed(*place) for place in product(range(3), range(1, 7), range(4), range(8), range(2))]
    assert len(set(seeds)) == len({s & 0xFFFFFFFF for s in seeds}) == 3 * 6 * 4 * 8 * 2
    assert all(0 <= s < 1 << 63 for s in seeds)


def test_a_negative_or_large_seed_is_taken_modulo_two_to_the_64() -> None:
    assert dropout_seed(-1, 1, 0, 0, 0) == dropout_seed((1 << 64) - 1, 1, 0, 0, 0)
    torch.Generator().manual_seed(dropout_seed(-1, 1, 0, 0, 0))
