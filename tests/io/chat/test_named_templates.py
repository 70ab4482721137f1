"""The named templates: what they write, what of it is learned, and which tokenizers they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat import mark_turns
from megatrain_ray.io.chat.chat_template import MARKS, ChatTemplate, load_chat_template, read_named_template
from megatrain_ray.io.chat.encode_chats import ChatEncoder
from megatrain_ray.io.chat.mark_turns import TurnMarker
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.chat.template_ending import last_mark, text_after_answer
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, load_tokenizer
from tests.io.chat.test_chat_templates import CHAT, SYSTEM, marked
from tests.support.chat_fixtures import FAMILIES, build

FAMILY = {"qwen": "qwen2.5"}  # by the names of templates, where the two differ
TOOLS: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
AGENT: list[dict[str, Any]] = [
    SYSTEM,
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]
MISTRAL = "<s>[INST] Be brief.\n\n2+2?[/INST]« It is 4.</s>»[INST] Sure?[/INST]« Yes 😀 你好!</s>»"
GEMMA = (
    "<bos><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n«It is 4.<end_of_turn>»\n"
    "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n«Yes 😀 你好!<end_of_turn>»\n"
)
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«It is 4.<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes 😀 你好!<|eot_id|>»"
)
CHATML = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    "« It is 4.\n<|im_end|>»\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n«Yes 😀 你好!<|im_end|>»\n"
)
MARKED = {"chatml": CHATML, "qwen": CHATML, "llama3": LLAMA, "gemma": GEMMA, "mistral": MISTRAL}


@pytest.mark.parametrize("name", MARKS)
def test_answers_are_learned_with_a_mark_that_ends_them(tmp_path: Path, name: str) -> None:
    family = FAMILIES[FAMILY.get(name, name)]
    folder = str(build(tmp_path, family))
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder, name)
    (chat,) = ChatEncoder(tokenizer, template).encode(Conversation((SYSTEM, *CHAT)))
    text = MARKED[name].translate({ord("«"): None, ord("»"): None})
    assert marked(tokenizer, text, chat.ids, chat.loss_weights > 0) == MARKED[name]
    assert isinstance(tokenizer, FolderTokenizer)
    assert last_mark(tokenizer, text_after_answer(template)) == tokenizer.id_of(family.ending)
    if name != "mistral":  # what its maker published writes other blanks around an answer, in each version
        turns = [*CHAT[:1], {"role": "assistant", "content": "Yes"}]
        published = load_chat_template(folder).render(turns).rpartition("2+2?")[2]
        assert template.render(turns).rpartition("2+2?")[2] == published


def learned(name: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    template = without_tokenizer(name)
    (text,) = TurnMarker(template).mark(Conversation(tuple(messages), TOOLS))
    return text.text, [text.text[start:end] for start, end, _ in text.spans]


@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_the_work_for_a_long_conversation_grows_with_its_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many questions, and of many calls after one question. What is learned is what each answer alone has."""
    rendered: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **kwargs: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, *args, **kwargs)

    turns = [*AGENT, *AGENT[1:4] * 20, *AGENT[2:4] * 30, AGENT[4]]
    monkeypatch.setattr(ChatTemplate, "render", counted)
    in_windows, num_turns = learned(name, turns), sum(rendered)
    monkeypatch.setattr(mark_turns, "MANY_ANSWERS", 1000)
    rendered.clear()
    assert learned(name, turns) == in_windows
    assert len(in_windows[1]) == 53
    assert num_turns < 20 * len(turns) < sum(rendered) / 2


def without_tokenizer(name: str) -> ChatTemplate:
    return ChatTemplate(name, read_named_template(name), variables={"bos_token": "<s>", "eos_token": "</s>"})


def test_tools_calls_and_their_results_are_written_as_published() -> None:
    text, answers = learned("qwen", AGENT)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert answers == [call, "Four.<|im_end|>"]
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist")
    assert '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools>\n\nFor each' in text
    assert text.count("<|im_start|>system") == 1
    assert "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\nFour." in text
    text, answers = learned("llama3", AGENT)
    assert answers == ['{"name": "add", "parameters": {"a": 2}}<|eot_id|>', "Four.<|eot_id|>"]
    assert "user<|end_header_id|>\n\nGiven the following functions, please respond with a JSON" in text
    assert '"parameters": {}\n    }\n}\n\n2+2?<|eot_id|>' in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>" in text


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral"])
def test_a_template_without_tools_refuses_them(name: str) -> None:
    with pytest.raises(RecordError, match=rf"{name} has no tools"):
        learned(name, AGENT)


def test_marks_that_a_tokenizer_lacks_are_named_with_what_would_do(tmp_path: Path) -> None:
    gemma = str(build(tmp_path / "gemma", FAMILIES["gemma"]))
    with pytest.raises(ConfigError) as caught:
        load_chat_template(gemma, "chatml")
    assert str(caught.value) == (
        f"data.chat_template: chatml writes <|im_start|>, <|im_end|>, which {gemma} does not have as one token; set "
        "data.chat_template to gemma or mistral, or add the tokens to tokenizer and model with Transformers "
        "(add_special_tokens, resize_token_embeddings)"
    )
    with pytest.raises(ConfigError, match=r"mistral writes eos_token, which the tokenizer bytes .*; leave "):
        load_chat_template("bytes", "mistral")
