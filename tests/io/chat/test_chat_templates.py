"""Which tokens of a chat are learned, for the templates of well-known families: by hand, and for random chats."""

from __future__ import annotations

from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatrain_ray.io.chat import mark_turns
from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.chat.conversation_formats import LAYOUTS, ChatFormat, read_conversation
from megatrain_ray.io.chat.encode_chats import ChatEncoder, EncodedChat
from megatrain_ray.io.chat.messages import Conversation, squeeze
from megatrain_ray.io.tokens.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer
from tests.support.chat_fixtures import FAMILIES, Family, build

Messages = list[dict[str, Any]]

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": " It is 4.\n"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes 😀 你好!"},
]
SYSTEM = {"role": "system", "content": "Be brief."}

# « and » enclose what is learned. Blanks after a special token of Phi-3 belong to it.
MARKED = {
    "chatml": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "« It is 4.\n<|im_end|>»\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
        "«Yes 😀 你好!<|im_end|>»\n"
    ],
    "qwen3": [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\n It is 4.\n<|im_end|>»\n",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
        " It is 4.\n<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\n\n</think>\n\nYes 😀 你好!<|im_end|>»\n",
    ],
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nKnowledge until: December 2023\n"
        "Today: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 4.<|eot_id|>»"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes 😀 你好!<|eot_id|>»"
    ],
    "mistral": ["<s>[INST] 2+2? [/INST]«  It is 4.\n</s>»[INST] Sure? [/INST]« Yes 😀 你好!</s>»"],
    "zephyr": [
        "<|system|>\nBe brief.</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n« It is 4.\n</s>»\n"
        "<|user|>\nSure?</s>\n<|assistant|>\n«Yes 😀 你好!</s>»\n"
    ],
    "gemma": [
        "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n«It is 4.<end_of_turn>»\n"
        "<start_of_turn>user\nSure?<end_of_turn>\n<start_of_turn>model\n«Yes 😀 你好!<end_of_turn>»\n"
    ],
    "deepseek": [
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>2+2?<｜Assistant｜>« It is 4.\n<｜end▁of▁sentence｜>»"
        "<｜User｜>Sure?<｜Assistant｜>«Yes 😀 你好!<｜end▁of▁sentence｜>»"
    ],
    "phi3": [
        "<|system|>\nBe brief.<|end|>\n<|user|>\n2+2?<|end|>\n<|assistant|>\n «It is 4.\n<|end|>\n»"
        "<|user|>\nSure?<|end|>\n<|assistant|>\n«Yes 😀 你好!<|end|>\n»<|endoftext|>"
    ],
    "olmo2": [
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\n2+2?\n<|assistant|>\n« It is 4.\n<|endoftext|>»\n"
        "<|user|>\nSure?\n<|assistant|>\n«Yes 😀 你好!<|endoftext|>»"
    ],
}
MARKED["generation_tags"] = MARKED["chatml"]
MARKED["qwen2.5"] = MARKED["chatml"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for family in FAMILIES.values():
        build(root / family.name, family)
    return root


def encoder_of(folder: Path) -> ChatEncoder:
    return ChatEncoder(load_tokenizer(str(folder)), load_chat_template(str(folder)))


def marked(tokenizer: Tokenizer, text: str, ids: Any, supervised: Any) -> str:
    """Return the text of these ids with « and » around every run of supervised tokens."""
    placed = tokenizer.encode_placed(text)
    assert ids.tolist() == placed.ids.tolist()
    learned = np.zeros(len(text) + 2, np.bool_)
    for start, end in zip(placed.starts[supervised], placed.ends[supervised], strict=True):
        learned[start + 1 : end + 1] = True
    for start, end in zip(placed.starts[~supervised], placed.ends[~supervised], strict=True):
        assert not learned[start + 1 : end + 1].any(), "a character of both a supervised and another token"
    changes = learned[1:] != learned[:-1]
    return "".join(("»" if learned[i] else "«") * int(changes[i]) + (text + " ")[i] for i in range(len(text) + 1))[:-1]


@pytest.mark.parametrize("name", MARKED)
def test_answers_and_their_end_marks_are_learned_token_by_token(folders: Path, name: str) -> None:
    messages = [SYSTEM, *CHAT] if FAMILIES[name].system else CHAT
    tokenizer = load_tokenizer(str(folders / name))
    chats = encoder_of(folders / name).encode(Conversation(tuple(messages)))
    plain = [text.translate({ord("«"): None, ord("»"): None}) for text in MARKED[name]]
    got = [marked(tokenizer, text, c.ids, c.loss_weights > 0) for text, c in zip(plain, chats, strict=True)]
    assert got == MARKED[name]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES.values() if family.bos])
def test_no_first_token_is_doubled(folders: Path, name: str) -> None:
    """The tokenizers here would add one of their own, as Llama's does."""
    (first,) = load_tokenizer(str(folders / name)).encode(FAMILIES[name].bos or "")
    (chat,) = encoder_of(folders / name).encode(Conversation(tuple(CHAT[:2])))
    assert first not in chat.ids[1:2]


# --- random chats ---

TEXTS = st.text("ab 1.\n你😀é<|>", min_size=1, max_size=12).filter(lambda text: text.strip() != "")
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4)


def as_messages(system: str | None, pairs: list[tuple[str, str]]) -> Messages:
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    return [*([{"role": "system", "content": system}] if system else []), *(turn for pair in turns for turn in pair)]


Written = tuple[dict[str, Any], list[float]]  # a record, and how much each answer of it is learned


def _turns(pairs: list[tuple[str, str]], roles: tuple[str, str], keys: tuple[str, str]) -> Messages:
    return [dict(zip(keys, turn, strict=True)) for pair in pairs for turn in zip(roles, pair, strict=True)]


def _messages(system: str | None, pairs: list[tuple[str, str]], weights: list[float]) -> Written:
    turns = _turns(pairs, ("user", "assistant"), ("role", "content"))
    for turn, weight in zip(turns[1::2], weights, strict=False):
        turn |= {"tool_calls": [], "name": None} | ({"weight": weight} if weight else {"train": False})
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}, weights


def _sharegpt(system: str | None, pairs: list[tuple[str, str]], weights: list[float]) -> Written:
    turns = _turns(pairs, ("human", "gpt"), ("from", "value"))
    for turn, weight in zip(turns[1::2], weights, strict=False):
        turn["train"] = bool(weight)
    return {"system": system, "conversations": turns}, [float(bool(weight)) for weight in weights]


def _alpaca(system: str | None, pairs: list[tuple[str, str]], weights: list[float]) -> Written:
    *history, (question, answer) = pairs
    return {"system": system, "history": history, "instruction": question, "output": answer}, [1.0] * len(pairs)


def _prompt_completion(system: str | None, pairs: list[tuple[str, str]], weights: list[float]) -> Written:
    *prompt, completion = _turns(pairs, ("user", "assistant"), ("role", "content"))
    learned = [0.0] * (len(pairs) - 1) + [1.0]
    if len(prompt) == 1:
        return {"system": system, "prompt": prompt[0]["content"], "completion": completion["content"]}, learned
    return {"system": system, "prompt": prompt, "completion": [completion]}, learned


RECORDS = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}


@cache
def hugging_face(folder: Path, family: Family) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        chat_template=family.source,
        bos_token=family.bos,
        eos_token=family.eos,
    )


def rendered(reference: PreTrainedTokenizerFast, messages: Messages, tokenize: bool) -> Any:
    options: dict[str, Any] = {"date_string": "26 Jul 2024", "tokenize": tokenize}
    result = reference.apply_chat_template(messages, **options, **({"return_dict": True} if tokenize else {}))
    return result["input_ids"] if tokenize else result


@pytest.mark.parametrize("name", FAMILIES)
@given(
    system=st.none() | TEXTS,
    pairs=PAIRS,
    chat_format=st.sampled_from([*RECORDS]),
    weights=st.lists(st.sampled_from([1.0, 0.0, 0.5]), min_size=4, max_size=4),
    only_last=st.booleans(),
)
def test_random_chats(
    folders: Path, name: str, system: str | None, pairs: list[tuple[str, str]], chat_format: ChatFormat,
    weights: list[float], only_last: bool,
) -> None:  # fmt: skip
    """What is learned of a record is the answers with their end marks, each by its weight.

    Ids are those that Transformers makes of the chat.
    """
    family, folder = FAMILIES[name], folders / name
    record, own = RECORDS[chat_format](system if family.system else None, pairs, weights)
    conversation = read_conversation(record, LAYOUTS["auto"])
    assert conversation == read_conversation(record, LAYOUTS[chat_format])
    conversation = conversation.with_last_only() if only_last else conversation
    chats = cached_encoder(folder).encode(conversation)
    with patch.object(mark_turns, "MANY_ANSWERS", 1):  # as of long conversations
        assert as_lists(cached_encoder(folder).encode(conversation)) == as_lists(chats)
    messages = as_messages(system if family.system else None, pairs)
    ends = [i for i, message in enumerate(messages, 1) if message["role"] == "assistant"]
    answers = list(zip(ends, [answer for _, answer in pairs], own[: len(pairs)], strict=True))
    expected = [turn for turn in (answers[-1:] if only_last else answers) if turn[2]]
    upto = [end for end, *_ in expected]
    upto = upto if family.one_turn_each else upto[-1:]
    reference, tokenizer = hugging_face(folder, family), load_tokenizer(str(folder))
    parts: list[str] = []
    found: list[float] = []
    for chat, n in zip(chats, upto, strict=True):
        assert chat.ids.tolist() == rendered(reference, messages[:n], tokenize=True)
        text = rendered(reference, messages[:n], tokenize=False)
        parts += learned_parts(tokenizer, text, chat.ids, chat.loss_weights > 0)
        found += weights_of_parts(chat.loss_weights)
    assert found == [weight for *_, weight in expected]
    for part, (_, answer, _) in zip(parts, expected, strict=True):
        # Blanks at the start of an answer may be in one token with the line end of the prompt.
        whole = family.answer(answer)
        assert part == whole or (answer[0].isspace() and part.lstrip() == whole.lstrip())


def as_lists(chats: list[EncodedChat]) -> Any:
    return [[part.tolist() if isinstance(part, np.ndarray) else part for part in chat] for chat in chats]


def weights_of_parts(loss_weights: Any) -> list[float]:
    """Return the loss weight of each run of supervised tokens, which is one number."""
    runs = [list(run) for learned, run in groupby(loss_weights.tolist(), bool) if learned]
    assert all(len(set(run)) == 1 for run in runs)
    return [run[0] for run in runs]


@pytest.mark.parametrize("name", FAMILIES)
@given(pairs=PAIRS, thoughts=st.lists(st.text("hm .\n", min_size=1, max_size=9), min_size=4, max_size=4))
def test_thoughts_are_learned_or_only_read(
    folders: Path, name: str, pairs: list[tuple[str, str]], thoughts: list[str]
) -> None:
    """Of answers with thoughts in their text, what is learned without them is the answers and their end marks."""
    family, folder = FAMILIES[name], folders / name
    written = [(q, f"<think>\n{t}\n</think>\n\n{a}") for (q, a), t in zip(pairs, thoughts, strict=False)]
    conversation = Conversation(tuple(as_messages(None, written)))
    tokenizer = load_tokenizer(str(folder))
    both = [cached_encoder(folder, learns).encode(conversation) for learns in (True, False)]
    learned = ["".join(decoded(tokenizer, c.ids[c.loss_weights > 0]) for c in chats) for chats in both]
    for own, answers in zip(learned, (written, pairs), strict=True):
        assert squeeze(own) == squeeze("".join(answer + family.ending for _, answer in answers))
    assert [c.ids.tolist() for c in both[0]] == [c.ids.tolist() for c in both[1]]


def decoded(tokenizer: Tokenizer, ids: Any) -> str:
    assert isinstance(tokenizer, FolderTokenizer)
    return tokenizer._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def learned_parts(tokenizer: Tokenizer, text: str, ids: Any, supervised: Any) -> list[str]:
    """Return the supervised parts of a text, which must have no « » of its own."""
    return [part.split("»")[0] for part in marked(tokenizer, text, ids, supervised).split("«")[1:]]


@cache
def cached_encoder(folder: Path, learn_reasoning: bool = True) -> ChatEncoder:
    template = load_chat_template(str(folder))
    return ChatEncoder(load_tokenizer(str(folder)), template, learn_reasoning=learn_reasoning)


@given(system=st.none() | TEXTS, pairs=PAIRS)
def test_random_chats_as_bytes(system: str | None, pairs: list[tuple[str, str]]) -> None:
    tokenizer, conversation = load_tokenizer("bytes"), Conversation(tuple(as_messages(system, pairs)))
    (marked,) = ChatEncoder(tokenizer, load_chat_template("bytes", ends_bytes=True)).encode(conversation)
    learned = marked.ids[marked.loss_weights > 0].tolist()
    assert learned == [token for _, answer in pairs for token in (*answer.encode(), 256)]
    (chat,) = ChatEncoder(tokenizer, load_chat_template("bytes")).encode(conversation)
    learned = bytes(chat.ids[chat.loss_weights > 0].astype(np.uint8)).decode()
    assert learned == "".join(answer + "<|im_end|>" for _, answer in pairs)
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    text = head + "".join(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{a}<|im_end|>\n" for q, a in pairs)
    assert bytes(chat.ids.astype(np.uint8)).decode() == text
