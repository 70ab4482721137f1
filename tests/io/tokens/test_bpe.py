"""A tokenizer of one's own: the same from the same texts, exact for any text, usable at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megatrain_ray.cli import main
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from megatrain_ray.io.tokens.train_bpe import special_tokens, train_bpe
from tests.support.runs import cli
from tests.support.tiny import TEXT

SPECIALS = special_tokens(["<|im_start|>", "<|im_end|>"])
SAMPLE = TEXT.read_text()[:100_000]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return train_bpe(iter([SAMPLE]), 600, SPECIALS)


@given(text=st.text())
def test_any_text_is_decoded_as_it_was(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_blanks_line_ends_and_digits(tokenizer: tokenizers.Tokenizer) -> None:
    text = "  two\r\n\r\n\tfor 1234567 é 你好 😀\u200d \ufeff…<|im_end|>\n"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<|im_end|>") == 3
    assert encoded.ids.count(3) == 1
    assert not any(len(token.strip("Ġ")) > 3 for token in encoded.tokens if token.strip("Ġ").isdigit())


def test_how_texts_are_cut_into_files_and_lines_changes_nothing_but_words() -> None:
    lines = SAMPLE[:20_000].splitlines(keepends=True)
    whole, parts = (
        train_bpe(iter(texts), 400, SPECIALS).to_str() for texts in ([*lines], ["".join(lines[:9]), *lines[9:]])
    )
    assert whole == parts


def test_the_command_writes_a_folder_that_a_run_and_transformers_use(tmp_path: Path) -> None:
    """Two processes with other numbers of threads write the same bytes."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(SAMPLE[:50_000])
    records = [{"body": SAMPLE[at : at + 1000]} for at in range(50_000, 100_000, 1000)]
    (corpus / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    written = []
    for threads in ("1", "4"):
        out = tmp_path / f"tokenizer_{threads}"
        done = cli(
            "tokenizer", "train", str(corpus), "--out", str(out), "--vocab-size", "700", "--field", "body",
            "--special", "<|im_start|>", "<|im_end|>", RAYON_NUM_THREADS=threads,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"wrote 700 ids to {out}; data.tokenizer: {out}\n"
        written.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert written[0] == written[1]
    assert sorted(written[0]) == ["tokenizer.json", "tokenizer_config.json"]
    ours = load_tokenizer(str(out))
    assert (ours.num_ids, ours.end_of_document) == (700, 0)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(out)
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (0, 0, 1)
    assert "<|im_end|>" in theirs.all_special_tokens
    ids = theirs(SAMPLE[:5000] + " ,  .")["input_ids"]
    assert ids == ours.encode(SAMPLE[:5000] + " ,  .").tolist()
    assert theirs.decode(ids) == SAMPLE[:5000] + " ,  ."


def test_a_small_corpus_gives_fewer_ids_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("ab ab")
    assert (
        main(["tokenizer", "train", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t"), "--vocab-size", "300"]) == 0
    )
    assert (
        f"wrote 260 ids to {tmp_path / 't'}: the corpus has no more pairs to merge for 300" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "no such file: none.txt"),
        (
            ["bad.jsonl"],
            "bad.jsonl, line 1: no key 'text' (--field); its keys are 'x'. Fix the record, or give --bad-records skip",
        ),
        (["a.txt", "--vocab-size", "257"], "--vocab-size: 257 is less than the 256 bytes and 2 special tokens"),
        (["a.txt", "--special", "<|pad|>"], "--special: expected texts, each once, beside <|endoftext|> and <|pad|>"),
        (["a.txt", "--out", "."], ". exists and is not an empty folder"),
    ],
)
def test_what_is_wrong_is_one_message_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.jsonl").write_text('{"x": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert main(["tokenizer", "train", "--out", "t", "--vocab-size", "300", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "bad.jsonl"]
