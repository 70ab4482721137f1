"""Parity with the reference for a tiny model of each type that Transformers has; the table of them in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.engine.plan.plan import ActivationPolicy
from tests.support.family_models import family_batches
from tests.support.model_types import all_types, settings_of
from tests.support.reference import Recipe
from tests.support.run_engine import Mode
from tests.support.type_sweep import build, compare, judge
from tests.support.type_table import PAGE, table

# What each shows is in the comment. Those that the installed Transformers lacks are left out.
SHORT = (
    "camembert",  # one parameter with two names in a module, and a tied head that is registered before the embedding
    "deepseek_v32",  # sparse attention: an indexer that no gradient reaches, masks that must exist
    "deepseek_v4",  # types converted while the model is built, compressors
    "nemotron_h",  # biases of routers under another name
    "gemma4",  # an embedding that is read outside of its layer
    "jetmoe",  # sizes of a split that depend on values
    "qwen3_5",  # a class for the text, and one for the whole model
    "lfm2", "mamba2", "glm4_moe",
)  # fmt: skip


@pytest.mark.parametrize("model_type", sorted({*SHORT} & {*all_types()}))
def test_a_type_is_bit_equal(tmp_path: Path, model_type: str) -> None:
    build(settings_of(model_type), tmp_path)
    assert compare(tmp_path, family_batches(2), Recipe(2, micro_batch_size=2, seed=3), Mode()) == "equal"


@pytest.mark.skipif("doge" not in all_types(), reason="an older Transformers")
def test_a_learned_mask_takes_the_same_kernel_where_a_layer_is_recomputed(tmp_path: Path) -> None:
    build(settings_of("doge"), tmp_path)
    recipe = Recipe(1, micro_batch_size=4, precision="bf16")
    assert compare(tmp_path, family_batches(1), recipe, Mode(activations=ActivationPolicy.RECOMPUTE)) == "equal"


@pytest.mark.long
@pytest.mark.parametrize("model_type", all_types())
def test_every_type_is_bit_equal_or_refused(tmp_path: Path, model_type: str) -> None:
    verdict = judge(model_type, settings_of(model_type), tmp_path)
    results = {verdict.fp32, verdict.bf16, verdict.packed}
    assert [result for result in results if result != "equal" and not result.startswith("refused: ")] == []


def test_the_table_in_docs_is_current() -> None:
    assert table() in PAGE.read_text(), "run: python -m tests.support.type_table"
