"""What the start of a run says of its chat template."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.config.groups import DataConfig
from megatrain_ray.data.tokenize_data import describe_template
from tests.support.chat_fixtures import FAMILIES, build


def test_a_template_without_an_end_mark_is_warned_of(tmp_path: Path) -> None:
    tokenizer, file = str(build(tmp_path / "tokenizer", FAMILIES["qwen2.5"])), tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    data = {"kind": "sft", "path": "x.jsonl", "seq_len": 8}
    assert list(describe_template(DataConfig(**data), tokenizer)) == [f"template  of {tokenizer}"]  # type: ignore[arg-type]
    named = DataConfig(**data, chat_template=str(file))  # type: ignore[arg-type]
    name, warning = describe_template(named, tokenizer)
    assert name == f"template  {file}"
    assert warning.startswith("warning: this template ends an answer with ordinary text")
    assert len(list(describe_template(named, "bytes"))) == 1
