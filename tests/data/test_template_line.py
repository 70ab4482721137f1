"""What the start of a run says of its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.marks_and_template import describe_template, other_tokenizer
from megatrain_ray.io.tokens.byte_tokenizer import write_byte_tokenizer
from megatrain_ray.trainer import Trainer
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.fake_hub import files_of, fill_cache


def test_another_tokenizer_than_the_models_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, same, other = (
        str(build(tmp_path / name, FAMILIES[family]))
        for name, family in (("model", "qwen2.5"), ("same", "qwen2.5"), ("other", "gemma"))
    )

    def warning(tokenizer: str | None) -> str | None:
        tree = {"model.path": own, "data": {"path": "x", "seq_len": 8, "tokenizer": tokenizer}, "run_dir": "r"}
        return other_tokenizer(Trainer(args=tree | {"train": {"steps": 1}}).config)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fill_cache(tmp_path / "hub", "owner/same", files_of(Path(own)))
    assert warning(None) is warning(own) is warning(same) is warning("owner/same") is None
    for tokenizer in (other, "bytes"):
        assert str(warning(tokenizer)).startswith(f"warning: data.tokenizer: {tokenizer} is not the tokenizer in {own}")
    write_byte_tokenizer(Path(own), vocab_size=257)  # as an exported model of bytes has it
    assert warning("bytes") is None
    assert warning(other) is not None


def test_a_template_without_an_end_mark_is_warned_of(tmp_path: Path) -> None:
    tokenizer, file = str(build(tmp_path / "tokenizer", FAMILIES["qwen2.5"])), tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    data = {"kind": "sft", "path": "x.jsonl", "seq_len": 8}
    assert list(describe_template(DataConfig(**data), tokenizer, 999)) == [f"template  of {tokenizer}"]  # type: ignore[arg-type]
    named = DataConfig(**data, chat_template=str(file))  # type: ignore[arg-type]
    name, warning = describe_template(named, tokenizer, 999)
    assert name == f"template  {file}"
    assert warning.startswith("warning: this template writes only blanks after an answer")
    assert warning.endswith("(this tokenizer has the marks of chatml, qwen, mistral)")
    tagged = FAMILIES["generation_tags"].source
    file.write_text(tagged)
    assert list(describe_template(named, tokenizer, 999)) == [f"template  {file}"]
    file.write_text(tagged.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"))
    _, warning = describe_template(named, tokenizer, 999)
    assert warning.startswith(
        "warning: the {% generation %} tags of this template leave out <|im_end|>, which ends answers"
    )
    base = build(tmp_path / "base", FAMILIES["gemma"])
    (base / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    name, warning = describe_template(DataConfig(**data), str(base), 999)  # type: ignore[arg-type]
    assert name == "template  the plain template"
    assert warning.startswith("warning: this tokenizer begins every text with <bos>, and the template does not")
    assert warning.endswith("(this tokenizer has the marks of gemma, mistral)")
    gemma = DataConfig(**data, chat_template="gemma")  # type: ignore[arg-type]
    assert list(describe_template(gemma, str(base), 999)) == ["template  gemma"]


def test_an_answer_of_bytes_ends_with_an_id_that_the_model_has(tmp_path: Path) -> None:
    def described(vocab_size: int, **data: Any) -> list[str]:
        tree = {"kind": "sft", "path": "x.jsonl", "seq_len": 8, **data}
        return list(describe_template(DataConfig(**tree), "bytes", vocab_size))

    ordinary = (
        "warning: this template ends an answer with ordinary text, at which megatrain generate stops and other "
        "programs do not; "
    )
    assert described(257) == described(257, add_eos=True) == ["template  the plain template"]
    assert described(256)[1:] == [f"{ordinary}give the model a vocab_size of 257 or more, with an id for the end"]
    assert described(257, add_eos=False)[1:] == [
        f"{ordinary}in a new run data.add_eos: true ends answers with an id of its own"
    ]
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '.\n' }}{% endfor %}")
    assert described(257, chat_template=str(tmp_path / "own.jinja"))[1:] == [
        f"{ordinary}write {{{{ eos_token }}}} there, or leave data.chat_template out"
    ]
