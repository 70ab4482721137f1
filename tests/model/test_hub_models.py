"""What is trained of popular models' folders is what Transformers makes of them: token ids, losses, exports.

The configurations are those that the models' makers publish (tests/support/hub_models.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.hub_models import HUB, TEXTS, build_hub_model

MARKED = "a<|im_end|>b </s>c<s> d<|user|> e"


@pytest.mark.spread(8)
@pytest.mark.parametrize("name", HUB)
def test_token_ids(tmp_path: Path, name: str) -> None:
    build_hub_model(tmp_path, name)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False), load_tokenizer(str(tmp_path))
    for text in (*TEXTS, MARKED, " leading", "IT'S é"):
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.adds_bos == (theirs("a")["input_ids"][:1] == [theirs.bos_token_id])
    assert ours.end_of_document == theirs.eos_token_id
