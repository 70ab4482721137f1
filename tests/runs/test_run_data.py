"""A run on several sources of several formats, through the command line and real actors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatrain_ray.config.yaml_file import read_settings
from tests.support.fake_hub import COMMIT, fill_cache
from tests.support.in_process import Train
from tests.support.object_server import CREDENTIALS, Bucket
from tests.support.runs import config, losses, rows, write_config
from tests.support.tiny import TEXT, build_tiny

PIECES = [TEXT.read_text()[at : at + 150] for at in range(0, 30_000, 150)]


def write_sources(folder: Path) -> list[dict[str, Any]]:
    (folder / "plain").mkdir(parents=True)
    (folder / "plain" / "a.txt").write_text("".join(PIECES[:60]))
    (folder / "plain" / "b.txt").write_text("".join(PIECES[60:90]))
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in PIECES[90:150]))
    pyarrow.parquet.write_table(pyarrow.table({"text": PIECES[150:]}), folder / "rows.parquet")
    shares = {"plain": 5, "*.jsonl": 2, "rows.parquet": 1.5}
    return [{"path": str(folder / name), "weight": weight} for name, weight in shares.items()]


def test_a_run_on_weighted_sources_goes_on_where_it_was_saved(
    tmp_path: Path, train: Train, objects: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is a data set of the hub, whose main branch moves on in between, and one is in an object store."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    rows_of_hub = {"train.jsonl": b'{"text": "the same text, of two rows: ' + b"ab" * 40 + b'"}\n'}
    fill_cache(tmp_path / "hub", "owner/texts", rows_of_hub, kind="datasets")
    tree = config(tmp_path / "run", build_tiny(tmp_path / "model"), train__steps=6, save_every=3, save_keep=9)
    sources = [*write_sources(tmp_path / "data"), {"hub": "owner/texts", "weight": 3}]
    sources[0]["path"] = f"{objects.url}/plain"
    objects.put(**{f"plain/{file.name}": file.read_bytes() for file in (tmp_path / "data" / "plain").iterdir()})
    tree["data"] |= {"path": sources, "packing": False}
    path = write_config(tmp_path / "config.yaml", tree)
    first = train(str(path))
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("\ntokenized ") + first.stderr.startswith("tokenized ") == 4
    assert f"owner/texts, train: commit {COMMIT} on the hub" in first.stderr
    assert first.stderr.count(f"fetching 2 files (13.18 KiB) of {objects.url}/plain into ") == 1
    assert read_settings(tmp_path / "run" / "config.yaml")["data"]["path"][3]["commit"] == COMMIT
    fill_cache(tmp_path / "hub", "owner/texts", {"train.jsonl": b'{"text": "another"}\n'}, "f" * 40, "datasets")
    whole = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "saves" / "step_6")
    second = train(str(path))
    assert second.returncode == 0, second.stderr
    assert "tokenized" not in second.stderr
    assert "fetching" not in second.stderr
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() in text for text in written)
    phases = [line.partition(" s  ")[2] for line in second.stderr.splitlines() if " s  " in line]
    assert phases[:2] == ["reading data", "starting Ray and importing Transformers"]
    assert phases[-3].startswith("restoring ")
    assert phases[-1].startswith("step ")
    assert losses(tmp_path / "run") == whole
    assert [row["tokens"] for row in rows(tmp_path / "run")] == [4 * 32] * 6

    (tmp_path / "data" / "lines.jsonl").write_text('{"text": "something else"}\n')
    refused = train(str(path), "train.steps=7")
    assert refused.returncode == 2
    assert "starting Ray" not in refused.stderr
    assert f"saved with other data than data.path[1], {tmp_path / 'data' / '*.jsonl'} holds now: " in refused.stderr
