"""Documents, windows and batches: what is cut, what is refused, and that a position means the same for ever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.batches import BatchStream, permutation
from megatrain_ray.io.documents import find_documents
from megatrain_ray.io.splitmix import splitmix64, splitmix64_chain
from megatrain_ray.io.windows import TokenWindows, cut, load_windows


def write(folder: Path, **texts: str | bytes) -> str:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / "*.txt")


def load(path: str | list[str], seq_len: int = 4, packing: bool = False, vocab_size: int = 257) -> TokenWindows:
    return load_windows(path, "bytes", seq_len=seq_len, packing=packing, vocab_size=vocab_size)


def stream(windows: TokenWindows, batch_size: int = 2, shuffle: bool = True, seed: int = 0) -> BatchStream:
    return BatchStream(windows, batch_size=batch_size, shuffle=shuffle, seed=seed)


def numbered(num_windows: int, seq_len: int = 1) -> TokenWindows:
    """Window i starts with token i * (seq_len + 1)."""
    return cut([np.arange(num_windows * (seq_len + 1), dtype=np.uint32)], seq_len)


def drawn(stream: BatchStream, batches: int) -> list[int]:
    return [int(row[0]) // 2 for _ in range(batches) for row in stream.next_batch().input_ids]


# --- documents ---


def test_paths_globs_and_lists_give_files_in_a_stable_order(tmp_path: Path) -> None:
    pattern = write(tmp_path, b="b", a="a", c="c")
    names = [f.name for f in find_documents([str(tmp_path / "c.txt"), pattern])]
    assert names == ["c.txt", "a.txt", "b.txt", "c.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    write(tmp_path, **{"part[1]": "x"})
    assert find_documents(str(tmp_path / "part[1].txt")) == (tmp_path / "part[1].txt",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.txt", "no such file: .*nothing.txt"),
        ("no*.txt", "no file matches .*no\\*.txt"),
        ("data.jsonl", "data.jsonl is no .txt file.*later version"),
        ("data.parquet", "data.parquet is no .txt file.*later version"),
        (".", "is a folder; folders come with a later version"),
        ("bad.txt", "bad.txt is not UTF-8: byte 0xff at offset 2"),
        ("empty.txt", "nothing to learn in .*empty.txt: a window needs 2 tokens, got 0"),
        ("one.txt", "nothing to learn in .*one.txt: a window needs 2 tokens, got 1"),
    ],
)
def test_input_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path, bad=b"ab\xffcd", empty="", one="x")
    for other in ("data.jsonl", "data.parquet"):
        (tmp_path / other).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        load(str(tmp_path / name))


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least one"):
        find_documents([])


def test_an_id_outside_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, doc="aaz")
    with pytest.raises(ConfigError, match=r"doc\.txt has token id 122, but the model's vocab_size is 122"):
        load(path, vocab_size=122)
    assert load(path, vocab_size=123).num_tokens == 3


def test_several_documents_with_packing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set data\.packing: false"):
        load(write(tmp_path, a="abcdef", b="abcdef"), packing=True)


def test_line_ends_and_every_utf8_byte_arrive_as_written(tmp_path: Path) -> None:
    text = "a\r\nb\rcé€\U0001f600\0"
    assert (
        load(write(tmp_path, doc=text)).tokens.tobytes()
        == np.frombuffer(text.encode(), np.uint8).astype("u2").tobytes()
    )


# --- windows ---


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=6), st.integers(1, 7))
def test_windows_are_the_whole_strides_of_each_document(sizes: list[int], seq_len: int) -> None:
    documents = [np.arange(size, dtype=np.uint16) + 100 * i for i, size in enumerate(sizes)]
    windows = cut(documents, seq_len)
    expected = []
    for document in documents:
        parts = [document[i : i + seq_len + 1].tolist() for i in range(0, document.size, seq_len + 1)]
        whole = [p for p in parts if len(p) == seq_len + 1]
        expected += whole or [p for p in parts[:1] if len(p) > 1]
    got = [windows.tokens[s : s + n].tolist() for s, n in zip(windows.starts, windows.lengths, strict=True)]
    assert got == expected


def test_a_short_window_is_padded_and_its_pads_never_count(tmp_path: Path) -> None:
    windows = load(write(tmp_path, a="abcdeFGH", b="xyz"))
    batch = stream(windows, shuffle=False).next_batch()
    a, b, c, d, e, x, y, z = b"abcdexyz"
    assert batch.input_ids.tolist() == [[a, b, c, d], [x, y, z, 0]]
    assert batch.targets.tolist() == [[b, c, d, e], [y, z, -100, -100]]
    assert (batch.num_supervised, batch.num_tokens) == (6, 7)
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64


def test_tokens_are_kept_in_two_bytes_where_the_vocabulary_allows_it(tmp_path: Path) -> None:
    path = write(tmp_path, doc="abcdef")
    assert load(path, vocab_size=65536).tokens.itemsize == 2
    assert load(path, vocab_size=65537).tokens.itemsize == 4


# --- order and position ---


def test_the_hash_and_the_order_are_fixed_for_ever() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output of the generator seeded with 0
    assert splitmix64(np.arange(9, dtype=np.uint64)).tolist() == [splitmix64(i) for i in range(9)]
    assert permutation(10, 0, 0).tolist() == [0, 9, 1, 6, 3, 5, 4, 2, 8, 7]
    assert permutation(10, 7, 3).tolist() == [2, 9, 1, 7, 6, 3, 8, 4, 0, 5]


def test_an_epoch_holds_every_window_once_and_epochs_and_seeds_differ() -> None:
    orders = [tuple(permutation(1000, seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(set(orders)) == 4
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert splitmix64_chain(0, 1) != splitmix64_chain(1, 0)


def test_a_batch_may_span_epochs() -> None:
    order = [*permutation(3, 5, 0), *permutation(3, 5, 1), *permutation(3, 5, 2)]
    whole = stream(numbered(3), batch_size=8, seed=5)
    assert drawn(whole, 1) == order[:8]
    assert (whole.position["epoch"], whole.position["cursor"]) == (2, 2)
    assert drawn(stream(numbered(3), batch_size=2, seed=5), 4) == order[:8]


def test_without_shuffle_windows_come_as_they_lie() -> None:
    assert drawn(stream(numbered(3), batch_size=4, shuffle=False), 2) == [0, 1, 2, 0, 1, 2, 0, 1]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 12), st.integers(1, 5))
def test_a_position_survives_json_and_continues_exactly(before: int, batch_size: int) -> None:
    first = stream(numbered(7), batch_size, seed=3)
    drawn(first, before)
    second = stream(numbered(7), batch_size, seed=3)
    second.seek(json.loads(json.dumps(first.position)))
    assert second.position == first.position
    assert drawn(second, 4) == drawn(first, 4)


def test_going_back_to_an_earlier_position_repeats_the_batches() -> None:
    it = stream(numbered(7), seed=3)
    start = it.position
    first = drawn(it, 9)
    it.seek(start)
    assert drawn(it, 9) == first


@pytest.mark.parametrize("other", [("abcdefghij", "abcdeX"), ("abcdefgh", "ijabcdef"), ("abcdefghijabcdef",)])
def test_a_position_of_other_data_is_refused_naming_both(tmp_path: Path, other: tuple[str, ...]) -> None:
    """Other text; the same text cut into documents elsewhere; the same text as one document."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, texts in [(here, ("abcdefghij", "abcdef")), (there, other)]:
        folder.mkdir()
        write(folder, **{str(i): text for i, text in enumerate(texts)})
    saved = stream(load(str(there / "*.txt"))).position
    now = stream(load(str(here / "*.txt")))
    with pytest.raises(ConfigError, match=f"16 tokens with checksum {saved['crc32']:08x}.*data.path holds 16") as e:
        now.seek(saved)
    assert f"{now.position['crc32']:08x}" in str(e.value)


def test_a_position_outside_of_the_epoch_is_refused() -> None:
    it = stream(numbered(7))
    with pytest.raises(ConfigError, match=r"cursor 7.* outside of the 7 windows"):
        it.seek(it.position | {"cursor": 7})
