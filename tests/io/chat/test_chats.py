"""Files of chats as sequences: length, what is dropped and counted, bad records, and the shipped problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_recipe import ChatRecipe
from megatrain_ray.io.chat.chat_template import ChatTemplate, load_chat_template
from megatrain_ray.io.chat.encode_chats import ChatEncoder
from megatrain_ray.io.chat.find_chats import find_chats
from megatrain_ray.io.chat.messages import Conversation
from megatrain_ray.io.records.read_records import BadRecords, RecordOutcome, RecordTally
from megatrain_ray.io.records.record_location import RecordLocation
from megatrain_ray.io.tokens.token_files import TokenBlock
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.chat_fixtures import FAMILIES, TEMPLATES, build

GSM8K = Path(__file__).parents[3] / "examples" / "gsm8k" / "train_400.jsonl"
SHORT = "{% for m in messages %}{{ m.content }}{{ '#' if m.role == 'assistant' else ':' }}{% endfor %}"  # Q:A#


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def write(folder: Path, *records: Any, name: str = "a.jsonl") -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def sequences_of(
    path: str, tally: RecordTally, tokenizer: str = "bytes", template: str | None = None, **settings: Any
) -> Iterator[TokenBlock]:
    """Yield the sequences of a recipe; max_tokens, truncation and num_processes are settings."""
    limits = {"truncation": "turn", "seq_len": settings.pop("max_tokens", 100) - 1, "bad_records": "error"}
    loaded = load_chat_template(tokenizer, template)
    recipe = ChatRecipe(find_chats(path), tokenizer, loaded, **{**limits, **settings})
    return recipe.blocks(load_tokenizer(tokenizer), tally)


def read(path: str, tally: RecordTally | None = None, *, template: str = SHORT, **settings: Any) -> list[TokenBlock]:
    source = Path(path).parent / "template.jinja"
    source.write_text(template)
    return list(sequences_of(path, tally or RecordTally(), template=str(source), **settings))


def shown(sequence: TokenBlock) -> str:
    """Return the text, with the supervised bytes in capitals."""
    letters = zip(bytes(sequence.ids.astype(np.uint8)).decode(), sequence.loss_weights, strict=True)
    return "".join(letter.upper() if learned else letter for letter, learned in letters)


def test_a_sequence_is_ids_mask_and_place(tmp_path: Path) -> None:
    (sequence,) = read(write(tmp_path, chat("q", "ab")))
    assert shown(sequence) == "q:AB#"
    assert (sequence.ids.dtype, sequence.loss_weights.dtype) == (np.uint32, np.float32)
    assert sequence.location == RecordLocation(tmp_path / "a.jsonl", "line", 1, read_bytes=0)


# --- length ---


@pytest.mark.parametrize(
    ("max_tokens", "kept", "fates"),
    [
        (12, ["q:AB#rr:CDE#", "x:Y#"], []),
        (11, ["q:AB#", "x:Y#"], [RecordOutcome.CUT_AT_TURN]),
        (5, ["q:AB#", "x:Y#"], [RecordOutcome.CUT_AT_TURN]),
        (4, ["q:AB", "x:Y#"], [RecordOutcome.CUT_INSIDE]),
        (3, ["q:A", "x:Y"], [RecordOutcome.CUT_INSIDE, RecordOutcome.CUT_INSIDE]),
    ],
)
def test_what_is_too_long_is_cut_after_an_answer_where_one_fits(
    tmp_path: Path, max_tokens: int, kept: list[str], fates: list[RecordOutcome]
) -> None:
    path, tally = write(tmp_path, chat("q", "ab", "rr", "cde"), chat("x", "y")), RecordTally()
    assert [shown(s) for s in read(path, tally, max_tokens=max_tokens)] == kept
    assert list(tally.counts.elements()) == fates
    assert (tally.num_cut, tally.num_dropped) == (len(fates), 0)


def test_a_question_that_leaves_no_room_for_an_answer_is_dropped(tmp_path: Path) -> None:
    path, tally = write(tmp_path, chat("long", "a"), chat("q", "a")), RecordTally()
    assert [shown(s) for s in read(path, tally, max_tokens=5)] == ["q:A#"]
    assert tally.counts == {RecordOutcome.TOO_LONG: 1}
    with pytest.raises(ConfigError, match=r"nothing to learn.*\n.*\n.*\ndata.seq_len=6 would hold the longest record"):
        read(path, RecordTally(), max_tokens=2)


def test_dropping_takes_only_what_fits_whole(tmp_path: Path) -> None:
    path, tally = write(tmp_path, chat("q", "ab"), chat("q", "ab", "r", "c"), chat("q", "abc")), RecordTally()
    assert [shown(s) for s in read(path, tally, max_tokens=5, truncation="drop")] == ["q:AB#"]
    assert tally.counts == {RecordOutcome.TOO_LONG: 2}
    assert (tally.num_cut, tally.num_dropped) == (0, 2)
    assert tally.lines()[1].endswith(f"2 too long, dropped ({path}, line 2; {path}, line 3)")


def test_answers_without_anything_between_them_are_two(tmp_path: Path) -> None:
    record = {"messages": [*chat("q", "ab")["messages"], {"role": "assistant", "content": "cd"}]}
    (sequence,) = read(write(tmp_path, record), max_tokens=7)
    assert shown(sequence) == "q:AB#"


@given(contents=st.lists(st.text("ab", min_size=1, max_size=9), min_size=2, max_size=8), max_tokens=st.integers(2, 60))
def test_any_cut_is_a_prefix_with_something_to_learn(
    tmp_path_factory: pytest.TempPathFactory, contents: list[str], max_tokens: int
) -> None:
    path, tally = write(tmp_path_factory.mktemp("chats"), chat(*contents), chat("q", "a")), RecordTally()
    (whole,) = (s for s in read(path) if s.location.number == 1)
    for sequence in read(path, tally, max_tokens=max(max_tokens, 3)):
        assert sequence.ids.size <= max(max_tokens, 3)
        assert sequence.loss_weights[1:].any()
        if sequence.location.number == 1:
            assert whole.ids[: sequence.ids.size].tolist() == sequence.ids.tolist()
            assert whole.loss_weights[: sequence.ids.size].tolist() == sequence.loss_weights.tolist()
            assert sequence.ids[-1] == ord("#") or tally.counts[RecordOutcome.CUT_INSIDE]


# --- counting ---


def test_what_cannot_be_learned_is_dropped_and_counted(tmp_path: Path) -> None:
    tagged = (
        "{% for m in messages %}{% if m.content == 'x' %}{% generation %}x{% endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}.{% endfor %}"
    )
    context = {"messages": [*chat("q", "x")["messages"], {"role": "assistant", "content": "x", "weight": 0}]}
    path, tally = write(tmp_path, chat("q"), chat("q", "x", "r"), chat("q", "y"), context), RecordTally()
    assert [shown(s) for s in read(path, tally, template=tagged, learn="last")] == ["q.X."]
    assert tally.lines() == [
        "4 records: 1 sequence, 4 tokens, 1 of them learned",
        f"1 without an assistant turn, dropped ({path}, line 1)",
        f"1 without a token that its template marks as the assistant's, dropped ({path}, line 3)",
        f"1 without a token to learn, dropped ({path}, line 4)",
        f"1 with turns after the last answer, which were left out ({path}, line 2)",
    ]
    assert (tally.num_cut, tally.num_dropped) == (0, 3)


def test_the_first_token_is_nobodys_target(tmp_path: Path) -> None:
    path, tally = write(tmp_path, chat("q", "x")), RecordTally("skip")
    with pytest.raises(ConfigError, match="nothing to learn"):
        read(path, tally, template="{% generation %}x{% endgeneration %}.{{ messages[0].content }}.")
    assert tally.counts == {RecordOutcome.NOTHING: 1}


def test_a_token_of_prompt_and_answer_is_learned_for_its_visible_part(tmp_path: Path) -> None:
    """Only a template in plain text makes such tokens: here ` be` begins with the space that ends the prompt."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "Ask:": 1, " be": 2, "  ": 3, "</s>": 4}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("Ask:| be|  |</s>"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}{{ m.content if m.role == 'user' else 'Ask: ' + m.content + '</s>' }}{% endfor %}"
    template = ChatTemplate("mine", source + "{% if add_generation_prompt %}Ask: {% endif %}")
    encoder = ChatEncoder(load_tokenizer(str(tmp_path)), template)
    for answer, learned in [("be", [False, False, True, True]), (" be", [False, False, False, True, True])]:
        (encoded,) = encoder.encode(Conversation(tuple(chat("  ", answer)["messages"])))
        assert encoded.loss_weights.tolist() == learned


def test_a_template_that_rewrites_earlier_answers_gives_a_sequence_for_each(tmp_path: Path) -> None:
    path, tally = write(tmp_path, chat("q", "a", "r", "b", "s", "c")), RecordTally()
    sequences = read(path, tally, template=(TEMPLATES / "qwen3.jinja").read_text(), max_tokens=1000)
    learned = [bytes(s.ids[s.loss_weights > 0].astype(np.uint8)).decode() for s in sequences]
    assert learned == [f"<think>\n\n</think>\n\n{answer}<|im_end|>" for answer in "abc"]
    assert {s.location.number for s in sequences} == {1}
    assert tally.counts == {RecordOutcome.SPLIT: 1}


def test_nothing_to_learn_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)nothing to learn.1 record: 0 .*1 without an assistant turn, dropped"):
        read(write(tmp_path, chat("q")))
    with pytest.raises(ConfigError, match=r"(?s)nothing to learn.0 records"):
        read(write(tmp_path))


# --- bad records ---

BAD = {
    "bad JSON": ('{"messages": [', "not valid JSON"),
    "unknown role": ({"messages": [{"role": "model", "content": "a"}]}, "turn 1: unknown role 'model'"),
    "refused by the template": (chat("stop", "a"), "the chat template (.*) refuses it: no"),
    "half a character": (chat("q", "\ud83d"), "half a character "),
}


@pytest.mark.parametrize("bad_records", ["error", "skip"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_ends_the_reading_or_is_counted(tmp_path: Path, name: str, bad_records: BadRecords) -> None:
    record, problem = BAD[name]
    path, tally = write(tmp_path, chat("q", "a"), record, chat("q", "b")), RecordTally(bad_records)
    template = "{% if messages[0].content == 'stop' %}{{ raise_exception('no') }}{% endif %}" + SHORT
    if bad_records == "error":
        with pytest.raises(
            ConfigError, match=rf"data.path: .*a.jsonl, line 2: .*{problem}.*set data.bad_records: skip"
        ):
            read(path, tally, template=template)
    else:
        assert [s.location.number for s in read(path, tally, template=template)] == [1, 3]
        assert tally.counts == {RecordOutcome.BAD: 1}
        assert "line 2: " in tally.lines()[1]


def test_half_a_character_is_found_with_every_tokenizer(tmp_path: Path) -> None:
    folder = build(tmp_path / "tokenizer", FAMILIES["chatml"])
    path = write(tmp_path, chat("q", "\ud83d"))
    with pytest.raises(ConfigError, match="half a character"):
        list(sequences_of(path, RecordTally(), str(folder), max_tokens=9))


def test_only_the_first_places_are_told(tmp_path: Path) -> None:
    tally = RecordTally("skip")
    read(write(tmp_path, chat("q", "a"), *["[]"] * 9), tally)
    assert tally.counts[RecordOutcome.BAD] == 9
    assert tally.lines()[1].count("line") == 3
    assert tally.lines()[1].endswith("; …)")


# --- several processes ---


def test_a_table_gives_no_key_a_null_that_the_record_does_not_have(tmp_path: Path) -> None:
    """Arrow gives all mappings of a column the same keys: here both properties, and both arguments."""
    records = []
    for key in ("city", "day"):
        call = {"type": "function", "function": {"name": "f", "arguments": {key: "x"}}}
        tool = {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        records.append({"messages": turns, "tools": [tool]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    template = "{{ tools }}" + SHORT.replace("m.content", "m.content or m.tool_calls")
    expected = [shown(s) for s in read(write(tmp_path, *records), template=template, max_tokens=999)]
    assert [shown(s) for s in read(str(tmp_path / "a.parquet"), template=template, max_tokens=999)] == expected
    assert "None" not in expected[0]


def test_any_number_of_processes_gives_the_same(tmp_path: Path) -> None:
    """More than one process gets alone; a question without an answer, a bad record and a long one among others."""
    folder = build(tmp_path / "tokenizer", FAMILIES["qwen3"])
    long = [chat(f"{number} the cat 你好 " * 900, "It is 4. " * number, "r", "sat") for number in range(150)]
    alpaca = {"instruction": "Sure?", "output": "Yes."}
    write(tmp_path, *long, alpaca, name="a.jsonl")
    write(tmp_path, chat("q"), "{", chat("q", "no " * 2000), *long[:20], chat("q", "a"), name="b.jsonl")
    results = []
    for num_processes in (1, 2):
        tally = RecordTally("skip")
        limits = {"max_tokens": 15000, "num_processes": num_processes}
        sequences = sequences_of(str(tmp_path / "*.jsonl"), tally, str(folder), **limits)
        results.append(([(s.ids.tolist(), s.loss_weights.tolist(), s.location) for s in sequences], tally.lines()))
    assert results[0] == results[1]
    assert len(results[0][0]) > 300
    place = f"{tmp_path / 'b.jsonl'}, line 2: "
    assert place + "expected a whole record on a line, got '{' alone" in "\n".join(results[1][1])


def test_a_bad_record_in_another_process_is_named(tmp_path: Path) -> None:
    write(tmp_path, *[chat("q " * 9000, "a")] * 150, chat("q", "\ud83d"))
    sequences = sequences_of(str(tmp_path), RecordTally(), max_tokens=20000, num_processes=2)
    with pytest.raises(ConfigError, match=r"a.jsonl, line 151: the conversation holds half a character"):
        list(sequences)


# --- files ---


def test_files_folders_globs_and_lists_in_the_order_given(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json", "note.md", "sub"):
        (tmp_path / name).mkdir() if name == "sub" else write(tmp_path, chat("q", "a"), name=name)
    write(tmp_path / "sub", chat("q", "a"), name="d.jsonl")
    (tmp_path / ".cache" / "x.json").mkdir(parents=True)
    write(tmp_path / ".cache", "{}", name="y.json")
    names = [source.file.name for source in find_chats([str(tmp_path / "c.json"), str(tmp_path / "*.jsonl")])]
    assert names == ["c.json", "a.jsonl", "b.jsonl"]
    assert [s.file.name for s in find_chats(str(tmp_path))] == ["a.jsonl", "b.jsonl", "c.json", "d.jsonl"]
    assert [s.file.name for s in find_chats(str(tmp_path / "s*"))] == ["d.jsonl"]
    for path, message in (
        ("absent.jsonl", "no such file: "),
        ("*.parquet", "no file matches "),
        ("*.md", "note.md is of no"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_chats(str(tmp_path / path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no file of a known format: .json, "):
        find_chats(str(tmp_path / "empty"))


def test_the_shipped_problems_are_learned_from_answer_to_end(tmp_path: Path) -> None:
    folder, tally = build(tmp_path / "tokenizer", FAMILIES["llama3"]), RecordTally()
    tokenizer = load_tokenizer(str(folder))
    sequences = list(sequences_of(str(GSM8K), tally, str(folder), max_tokens=4096))
    records = [json.loads(line)["messages"] for line in GSM8K.read_text().splitlines()]
    assert len(sequences) == len(records) == tally.num_records == 400
    assert not tally.counts
    for sequence, (_, answer) in zip(sequences, records, strict=True):
        expected = tokenizer.encode(answer["content"] + "<|eot_id|>")
        assert sequence.ids[sequence.loss_weights > 0].tolist() == expected.tolist()
        assert sequence.loss_weights[-expected.size :].all()
