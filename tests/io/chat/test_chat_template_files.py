"""Where a chat template is found, with which variables it is rendered, and that it renders the same every day."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import load_chat_template
from tests.support.chat_fixtures import TEMPLATES

ASK = [{"role": "user", "content": "Q"}]


def write(folder: Path, config: dict[str, Any], **files: str) -> str:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path = path.with_suffix(".json" if name == "special_tokens_map" else ".jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return str(folder)


def test_a_file_comes_before_the_settings_and_what_is_stated_before_both(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    assert load_chat_template(write(tmp_path, config)).render(ASK) == "config"
    folder = write(tmp_path, config, chat_template="file")
    assert load_chat_template(folder).render(ASK) == "file"
    (tmp_path / "mine.txt").write_text("mine")
    assert load_chat_template(folder, str(tmp_path / "mine.txt")).render(ASK) == "mine"


@pytest.mark.parametrize("in_files", [True, False])
def test_conversations_with_tools_get_the_template_for_them(tmp_path: Path, in_files: bool) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools: {{ tools|length }}"}]
    if in_files:
        folder = write(tmp_path, {}, chat_template="plain", additional_chat_templates__tool_use=named[1]["template"])
    else:
        folder = write(tmp_path, {"chat_template": named})
    template = load_chat_template(folder)
    assert template.render(ASK) == "plain"
    assert template.render(ASK, [{"type": "function"}]) == "tools: 1"


def test_special_tokens_are_known_to_the_template_and_unset_ones_are_empty(tmp_path: Path) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ thinking }}"
    config = {"chat_template": source, "eos_token": {"content": "</s>"}, "pad_token": None}
    folder = write(tmp_path, config, special_tokens_map=json.dumps({"bos_token": "<s>", "eos_token": "old"}))
    assert load_chat_template(folder).render(ASK) == "<s>|</s>||"
    assert load_chat_template(folder, arguments={"thinking": "yes"}).render(ASK) == "<s>|</s>||yes"


def test_without_a_template_there_is_the_plain_one(tmp_path: Path) -> None:
    for name in ("bytes", str(tmp_path), write(tmp_path, {})):
        template = load_chat_template(name)
        assert template.render(ASK, prompt=True) == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_of_a_processor_stands_in_for_one_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    template = load_chat_template(write(tmp_path, {}))
    assert template.render(ASK) == "processor"
    assert (
        not template.is_own
    )  # AutoTokenizer does not read it, so a run and its export write it as a file that it reads
    assert load_chat_template(write(tmp_path, {"chat_template": "config"})).render(ASK) == "config"


@pytest.mark.parametrize(
    ("source", "in_parts"),
    [
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}no text{% endfor %}", False),
        ("{{ raise_exception('no chat') }}", False),
    ],
)
def test_a_template_of_a_model_with_images_gets_texts_in_the_form_that_it_writes(
    tmp_path: Path, source: str, in_parts: bool
) -> None:
    folder = write(tmp_path, {"chat_template": source})
    assert not load_chat_template(folder).in_parts
    (tmp_path / "preprocessor_config.json").write_text("{}")
    template = load_chat_template(folder)
    assert template.in_parts == in_parts
    if in_parts:
        assert template.render([{"role": "user", "content": "Hello"}]) == "Hello"


def test_an_additional_template_is_used_by_its_name(tmp_path: Path) -> None:
    folder = write(tmp_path, {"chat_template": "config"}, chat_template="own", additional_chat_templates__rag="rag")
    assert load_chat_template(folder).render(ASK) == "own"
    assert load_chat_template(folder, "rag").render(ASK) == "rag"


@pytest.mark.parametrize("lead", ["", "\n", "  {% if true %}x{% endif %}"])
def test_the_date_is_the_same_every_day_and_nothing_else_changes(tmp_path: Path, lead: str) -> None:
    source = lead + "{% if strftime_now is defined %}\n  {{ strftime_now('%d %b %Y|%Y-%m-%d|%A, %B') }}\n{% endif %}"
    own = load_chat_template(write(tmp_path, {"chat_template": source})).render(ASK)
    written = source.replace("strftime_now('%d %b %Y|%Y-%m-%d|%A, %B')", "'26 Jul 2024|2024-07-26|Friday, July'")
    written = written.replace("strftime_now is defined", "true")
    assert own == load_chat_template(write(tmp_path, {"chat_template": written})).render(ASK)
    codes = ("%d %b %Y", "%Y-%m-%d", "%A, %B")
    assert own.endswith("|".join(date(2024, 7, 26).strftime(code) for code in codes) + "\n")


def test_the_date_of_a_template_is_a_variable(tmp_path: Path) -> None:
    path = str(TEMPLATES / "llama3.jinja")
    assert "Today: 26 Jul 2024" in load_chat_template("bytes", path).render(ASK)
    assert "Today: 1 May 2026" in load_chat_template("bytes", path, {"date_string": "1 May 2026"}).render(ASK)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "data.tokenizer: cannot read .*tokenizer_config.json: "),
        ("[]", "tokenizer_config.json: expected a mapping"),
        ('{"chat_template": 3}', "expected a text, or a list of name and template"),
        ('{"chat_template": [{"name": "x"}]}', "expected a text, or a list of name and template"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', "holds rag but no default"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        load_chat_template(str(tmp_path))


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file: .*absent.jinja .* or one of chatml, qwen, "):
        load_chat_template("bytes", str(tmp_path / "absent.jinja"))


def test_a_template_gets_lists_as_transformers_gives_them(tmp_path: Path) -> None:
    template = load_chat_template(write(tmp_path, {"chat_template": "{{ (messages + [1])|length }}{{ tools + [1] }}"}))
    assert template.render(tuple(ASK), ({"type": "function"},)) == "2[{'type': 'function'}, 1]"
