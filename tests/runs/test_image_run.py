"""A run on chats with images through the command line: shown, trained, resumed, evaluated and exported."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatrain_ray.escapes import escaped
from megatrain_ray.io.images.image_processor import ImageProcessor
from tests.support.gpu_runs import held_out
from tests.support.in_process import Train
from tests.support.pictured_models import build_pictured
from tests.support.pictures import chats, encoded, picture, plain_answers, preferences
from tests.support.reference import load_model
from tests.support.runs import assert_same_masters, cli_here, config, losses, write_config


def test_a_run_trains_the_projector_and_keeps_the_tower(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, run_dir, data = build_pictured("Qwen2.5-VL", tmp_path / "model"), tmp_path / "run", tmp_path / "chats.jsonl"
    records = [*chats(tmp_path), {"prompt": "Q", "completion": "A", "images": ["none.png"]}]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = config(run_dir, folder, train__steps=3, save_every=1, eval_every=3, train__vision="projector")
    tree["train"] |= {"batch_size": 2, "accumulate": 2, "clip": None}
    tree["data"] = {"kind": "sft", "path": str(data), "images": True, "seq_len": 100, "eval_path": str(data)}
    path = str(write_config(tmp_path / "run.yaml", tree))

    stopped = cli_here("train", path)
    assert stopped.returncode == 2
    assert f"{data}, line 9: it lists 1 images, and its turns have places for 0" in stopped.stderr
    skipping = ("data.bad_records=skip", "hardware.cuda_graphs=auto")
    shown = cli_here("data", path, *skipping)
    assert "<|vision_start|><|image_pad|> × 4<|vision_end|>Question 0?" in shown.stdout
    assert "3 images" in shown.stdout and "1 bad, skipped" in shown.stdout

    done = train(path, *skipping)
    assert done.returncode == 0, done.stderr
    assert "pixels of 3 images: 11 tokens in " in done.stderr
    before = shutil.copytree(run_dir, tmp_path / "one_gpu")
    shutil.rmtree(run_dir / "saves" / "step_3")
    # Two ranks go on from the save of step 2. In step 3 one has no image.
    again = train(path, *skipping, "hardware.num_gpus=2", "train.accumulate=1")
    assert again.returncode == 0 and "pixels of 3" not in again.stderr
    assert "step 2/3" not in again.stdout and "step 3/3" in again.stdout
    assert (losses(run_dir), held_out(run_dir)) == (losses(before), held_out(before))
    assert_same_masters(run_dir, before)
    with train.actors():
        alone = cli_here("eval", str(run_dir))
        share = ("data.eval_path=null", "data.eval_fraction=0.35")
        other = cli_here("eval", str(folder), "--config", path, *skipping, *share)
    assert alone.returncode == 0 and "pixels of 3" not in alone.stderr, alone.stderr  # an export needs no new ones
    assert other.returncode == 0 and re.findall("pixels of .*:", other.stderr) == ["pixels of 1 image:"], other.stderr

    data.write_text("".join(json.dumps(record) + "\n" for record in preferences(tmp_path)))
    pairs = ("data.kind=pairs", "data.seq_len=220", "train.objective=dpo", f"run_dir={tmp_path}/dpo", "eval_every=0")
    shown = cli_here("data", path, *pairs)
    assert "<|image_pad|> × 4" in shown.stdout
    assert train(path, *pairs, "train.steps=1").returncode == 0
    assert losses(tmp_path / "dpo") == [pytest.approx(math.log(2), rel=1e-6)]  # the reference sees the same images

    exported = cli_here("export", str(run_dir), str(tmp_path / "out"))
    assert exported.returncode == 0
    assert f'AutoModelForImageTextToText.from_pretrained("{tmp_path}/out") in Transf' in exported.stdout
    assert "AutoProcessor as well" in exported.stdout and "with --chat (and --image FILE) if" in exported.stdout
    ours, theirs = (dict(load_model(place, torch.float32).named_parameters()) for place in (folder, tmp_path / "out"))
    same = {name for name, parameter in ours.items() if torch.equal(parameter, theirs[name])}
    assert {name for name in ours if name.startswith("model.visual.") and "merger" not in name} == same
    processor = ImageProcessor(tmp_path / "out")
    assert processor.text_of(encoded(picture(56, 56, 0))) == "<|image_pad|>" * 4

    asked = ("Question 0?", "--chat", "--image", f"{tmp_path}/0.png", "--temperature", "0", "--max-new-tokens", "12")
    answers = [cli_here("generate", str(place), *asked).stdout for place in (run_dir, tmp_path / "out")]
    [plain] = plain_answers(tmp_path / "out", chats(tmp_path)[:1], tmp_path, 12)
    assert answers == [escaped(plain, keep="\n") + "\n"] * 2


def test_models_and_settings_without_images_are_refused(tmp_path: Path) -> None:
    folder = build_pictured("Qwen2.5-VL", tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(json.dumps(chats(tmp_path)[0]) + "\n")
    tree = config(tmp_path / "run", folder, data__images=True, data__kind="sft")
    tree["data"] |= {"path": str(tmp_path / "chats.jsonl"), "tokenizer": str(folder)}
    path = str(write_config(tmp_path / "run.yaml", tree))
    no_images = ("data.images=false", "train.vision=all")
    assert "train.vision: all goes with data.images: true" in cli_here("plan", path, *no_images).stderr
    nothing = cli_here(
        "plan", path, "train.vision=projector", "train.trainable=[language_model]", "train.steps=null", "train.epochs=1"
    )
    assert nothing.returncode == 2 and "all of the vision tower and the projector is frozen" in nothing.stderr
    other = cli_here("plan", path, "data.kind=pretrain")
    assert "data.images: goes with data.kind: sft or pairs or unpaired, and" in other.stderr
    assert "no token for images" in cli_here("plan", path, "data.tokenizer=bytes").stderr
    for objective in ("data.kind=pairs", "train.objective=reward"), ("train.objective=distill",):
        other = cli_here("plan", path, *objective, "train.distillation={}")
        name = objective[-1].partition("=")[2]
        assert f"data.images: true does not go with train.objective: {name} so far; leave one out" in other.stderr
    settings = json.loads((folder / "config.json").read_text())["text_config"] | {"model_type": "llama"}
    (tmp_path / "llama.json").write_text(json.dumps(settings))
    other = cli_here("plan", path, "model.path=null", f"model.config={tmp_path / 'llama.json'}")
    assert other.returncode == 2
    assert "data.images: a llama model is not trained with images so far; those of gemma3, gemma4" in other.stderr
