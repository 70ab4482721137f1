"""A run on an object store as a stream: bit-equal to the reference, resumed, and ended when files are gone."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.make_portion import make_portion
from megatrain_ray.data.open_streams import open_streams
from megatrain_ray.data.stream_folder import PortionId, StreamFolder
from tests.support.in_process import Train
from tests.support.object_server import Bucket
from tests.support.runs import config, losses, reference_of, rows, write_config
from tests.support.tiny import TEXT, VOCAB_SIZE, as_tensors, build_tiny

STEPS = 24  # of 4 windows, of which a portion has 36


GET = r"^GET .*\.jsonl"


def fetched(objects: Bucket) -> Counter[str]:
    names = [request.rpartition("/")[2] for request in objects.server.requests if request.startswith("GET")]
    return Counter(name for name in names if name.endswith(".jsonl"))


def test_a_run_on_a_stream_resumes_and_saves_before_it_ends(tmp_path: Path, train: Train, objects: Bucket) -> None:
    texts = [TEXT.read_text()[at : at + 300] for at in range(0, 6000, 300)]
    contents = {
        f"texts/{number}.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts[4 * number :][:4]).encode()
        for number in range(5)
    }
    objects.put(**contents)
    run = tmp_path / "run"
    tree = config(run, build_tiny(tmp_path / "model"), train__steps=STEPS, save_every=12, save_keep=9)
    tree["data"] |= {"path": f"{objects.url}/texts", "stream": 20_000, "stream_portion": 1}
    path = write_config(tmp_path / "config.yaml", tree)

    first = train(str(path))
    assert first.returncode == 0, first.stderr
    assert "stream    5 files (6.3" in first.stderr
    assert sum(fetched(objects).values()) == len(fetched(objects)) <= 4, "each once, and no more than are needed"
    assert not (run / "stream").exists(), "it is over"
    whole = losses(run)
    assert rows(run)[-1]["epoch"] == pytest.approx(4 * STEPS / 180, rel=0.02), "estimated from the first portion"
    assert all(row["exposed_s"]["data"] >= 0 for row in rows(run))

    data = DataConfig(**tree["data"])
    spec = open_streams(data, "bytes", VOCAB_SIZE, tmp_path / "whole", None).spec
    folder = StreamFolder(spec)
    for number in range(5):
        if not folder.is_there(portion := PortionId(0, number)):
            make_portion(folder, portion, print)
    ours = DataWorker(data, (), VOCAB_SIZE, 4, 0, None, streamed=spec)
    assert whole == reference_of(run, tree, [as_tensors(ours.batch(step)) for step in range(1, STEPS + 1)]).losses

    shutil.rmtree(run / "saves" / f"step_{STEPS}")
    objects.server.requests.clear()
    second = train(str(path))
    assert second.returncode == 0, second.stderr
    assert losses(run) == whole
    assert sum(fetched(objects).values()) <= 3, "the current portion and those after it"

    def delete_all() -> None:
        for name in contents:
            objects.delete(name)

    # The current portion is fetched at the start, and the next one while training goes on.
    objects.server.calls[GET] = lambda: objects.server.calls.update({GET: delete_all})
    ended = train(str(path), "train.steps=60")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    gone = r"/texts/\d\.jsonl has changed since .*, it is gone now.*; saved at step (\d+)"
    assert (match := re.search(gone, said)), said
    assert STEPS < int(match[1]) < 60
    assert (run / "saves" / f"step_{match[1]}").is_dir()
