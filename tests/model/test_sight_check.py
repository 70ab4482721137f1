"""Models whose tokens see what they must not are refused: tried on small copies, whatever their configuration says."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.model.attention import PACKED
from megatrain_ray.errors import ConfigError
from megatrain_ray.model import sight_check
from megatrain_ray.model.architecture import Architecture
from megatrain_ray.model.open_model import open_model
from megatrain_ray.model.sight_check import check_packing
from tests.support.model_types import settings_of


@pytest.mark.parametrize(
    ("model_type", "changes"), [("xlnet", {}), ("cpmant", {}), ("xlm", {}), ("roberta", {"is_decoder": False})]
)
def test_a_model_whose_tokens_see_later_ones_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"a {model_type} model cannot be trained: its tokens see later ones"):
        open_model(ModelConfig(config=settings_of(model_type) | changes))


@pytest.mark.parametrize("changes", [{"is_decoder": True}, {"is_decoder": True, "add_cross_attention": True}])
def test_a_decoder_of_an_encoder_family_is_let_in(changes: dict[str, Any]) -> None:
    open_model(ModelConfig(config=settings_of("bert-generation") | changes))


@pytest.mark.parametrize("model_type", ["deepseek_v4", "mamba2", "rembert"])  # by pooling, by a state, by its mask
def test_a_model_that_leaks_between_documents_cannot_pack(model_type: str) -> None:
    with pytest.raises(ConfigError, match="tokens see those of the one before; set data"):
        check_packing(Architecture(settings_of(model_type) | {"is_decoder": True}))


def test_documents_of_sparse_attention_are_kept_apart() -> None:
    check_packing(Architecture(settings_of("deepseek_v32")))


def test_random_numbers_are_not_taken_for_another_document() -> None:
    check_packing(Architecture(settings_of("mixtral") | {"router_jitter_noise": 0.1, "attention_dropout": 0.1}))


def test_masks_are_left_out_where_a_step_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 4 makes them always, and Doge is causal by its mask only."""
    seen, copy = [], Architecture(settings_of("llama")).small_copy()
    copy.register_forward_pre_hook(lambda *_: seen.append(PACKED.get()))
    monkeypatch.setattr(Architecture, "small_copy", lambda _: copy)
    check_packing(Architecture(settings_of("llama")))
    assert seen == [False, True]


def test_a_small_copy_that_does_not_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is known then: the model is let in, and documents are not joined."""
    caplog.set_level(logging.INFO)
    sight_check._sees_later_tokens.cache_clear()
    monkeypatch.setattr(Architecture, "small_copy", lambda _: 1 / 0)
    open_model(ModelConfig(config=settings_of("xlnet")))
    assert "a small copy of the model does not run: ZeroDivisionError: division by zero" in caplog.text
    with pytest.raises(ConfigError, match="on a row of two documents failed with ZeroDivisionError: division by zero"):
        check_packing(Architecture(settings_of("llama")))
    monkeypatch.undo()
    broken = Architecture(settings_of("llama")).small_copy()
    next(broken.parameters()).data.fill_(math.nan)
    monkeypatch.setattr(Architecture, "small_copy", lambda _: broken)
    with pytest.raises(ConfigError, match="on a row of two documents failed with ValueError: its logits are NaN"):
        check_packing(Architecture(settings_of("llama")))
    sight_check._sees_later_tokens.cache_clear()
