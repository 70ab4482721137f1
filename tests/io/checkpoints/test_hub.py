"""Models and tokenizers by their hub id: from a server on this machine, and from the cache without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain_ray.cli import main
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.engine.discovery.discover import discover
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.checkpoints.hub import HubFolder
from megatrain_ray.io.tokens.tokenizer import load_tokenizer, tokenizer_files
from megatrain_ray.model.open_model import open_model, read_model
from tests.model.test_architecture import with_own_code
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.fake_hub import COMMIT, files_of, fill_cache, serve
from tests.support.runs import ROOT, cli, config, losses, write_config
from tests.support.tiny import build_tiny

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the hub; there is no network, as in all tests."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_tokenizer_in_the_cache_needs_no_network(tmp_path: Path, cache: Path) -> None:
    own = build(tmp_path / "own", FAMILIES["qwen2.5"])
    folder = fill_cache(cache, "owner/chat", files_of(own))
    for name in ("owner/chat", "owner/chat@main", f"owner/chat@{COMMIT}"):
        assert load_tokenizer(name).encode("the cat").tolist() == load_tokenizer(str(own)).encode("the cat").tolist()
        assert [file.parent for file in tokenizer_files(name)] == [folder] * 2
        assert load_chat_template(name).source == FAMILIES["qwen2.5"].source
    vocabulary = {"vocab.json": b'{"a": 0, "t": 1, "h": 2, "th": 3}', "merges.txt": b"#version: 0.2\nt h\n"}
    fill_cache(cache, "owner/opt", {**vocabulary, "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}'})
    assert load_tokenizer("owner/opt").encode("th").tolist() == [3]


def test_a_folder_of_that_name_comes_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_cache(cache, "owner/chat", {"tokenizer.json": b"other"})
    build(tmp_path / "owner" / "chat", FAMILIES["qwen2.5"])
    monkeypatch.chdir(tmp_path)
    assert tokenizer_files("owner/chat")[0] == Path("owner/chat/tokenizer.json")
    (tmp_path / "owner" / "chat" / "config.json").write_text('{"model_type": "llama"}')
    assert read_model(ModelConfig(path="owner/chat")).folder == tmp_path / "owner" / "chat"


@pytest.mark.parametrize("name", ["owner/absent", "absent", "owner/chat@other"])
def test_without_network_and_cache_one_message_says_so(cache: Path, name: str) -> None:
    fill_cache(cache, "owner/chat", {"tokenizer.json": b"{}"})
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name)
    assert str(caught.value) == (
        f"data.tokenizer: {name.partition('@')[0]}: no such folder (relative paths start at {Path.cwd()}), and "
        "tokenizer.json is not in the hub's cache, while the hub cannot be reached: give a local folder, or run "
        f"`hf download {name.partition('@')[0]}` with a network"
    )


def test_a_hub_that_cannot_be_reached_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    template = NOWHERE + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(ConfigError, match="while the hub cannot be reached: give a local folder"):
        load_tokenizer("models/mistyped")
    folder = HubFolder("model.path", "owner/own", fill_cache(cache, "owner/own", {"own.py": b""}))
    folder.add_code()  # it is there
    folder.add_matching(["*.json"])
    assert not waits


def test_the_command_line_exits_2_without_network_and_cache(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = config(tmp_path / "run", tmp_path, model__path="owner/absent")
    assert main(["train", str(write_config(tmp_path / "config.yaml", tree))]) == 2
    (told,) = capsys.readouterr().err.splitlines()  # nothing was begun
    assert told.startswith("error: model.path: owner/absent: no such folder")
    assert not (tmp_path / "run").exists()


def test_code_of_a_repository_needs_trust_and_runs_from_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = fill_cache(cache, "owner/own", files_of(with_own_code(tmp_path / "own")))
    with pytest.raises(ConfigError, match=r"Read that code, then set model\.trust_remote_code: true"):
        open_model(ModelConfig(path="owner/own"))
    source = open_model(ModelConfig(path="owner/own", trust_remote_code=True))
    assert source.code == source.folder == folder
    structure, _ = discover(source.factory, torch.float32, 1, 8)
    source.check_weights(structure)


def test_what_the_hub_refuses_is_named(tmp_path: Path) -> None:
    code = """
from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.errors import ConfigError
from megatrain_ray.model.open_model import open_model, read_model
from megatrain_ray.engine.discovery.discover import discover
for name in ("o/none", "o/model@dev", "o/text", "o/model", "o/pickled", "o/sharded"):
    try:
        source = open_model(ModelConfig(path=name))
        source.check_weights(discover(source.factory, source.factory(None).dtype, 1, 8)[0])
        print([path.name for path in source.weight_paths()])
    except ConfigError as error:
        print(error)
"""
    files = files_of(build_tiny(tmp_path / "model"))
    torch.save(load_file(tmp_path / "model" / "model.safetensors"), tmp_path / "weights.bin")
    weights, own = (tmp_path / "weights.bin").read_bytes(), {"config.json": files["config.json"]}
    names = dict.fromkeys(load_file(tmp_path / "model" / "model.safetensors"), "part.bin")
    index = {"pytorch_model.bin.index.json": json.dumps({"weight_map": names}).encode()}
    repositories = {
        "o/model": own, "o/text": dict[str, bytes](), "o/pickled": own | {"pytorch_model.bin": weights},
        "o/sharded": own | index | {"part.bin": weights},
    }  # fmt: skip
    with serve(repositories) as hub:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"},
        )
    told = done.stdout.splitlines()
    assert len(told) == 6, done.stderr
    assert "no such repository on the hub, or a private one" in told[0]
    assert "but not in this revision" in told[1]
    assert told[2] == "model.path: o/text: the repository on the hub has no config.json"
    assert told[3] == "model.path: o/model: the repository on the hub has no model.safetensors"
    assert told[4:] == ["['pytorch_model.bin']", "['part.bin']"]


@pytest.mark.long
def test_a_run_from_the_hub_goes_on_without_it(tmp_path: Path, ray_address: str) -> None:
    """The plan fetches no weights."""
    model = build_tiny(tmp_path / "model", vocab_size=320)
    build(model, FAMILIES["qwen2.5"])
    tree = config(tmp_path / "run", model, train__steps=1, model__path="owner/model")
    del tree["data"]["tokenizer"]
    path = str(write_config(tmp_path / "config.yaml", tree))
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": NOWHERE, "HF_HUB_OFFLINE": "0"}
    with serve({"owner/model": files_of(model)}) as hub:
        plan = cli("plan", path, **home | {"HF_ENDPOINT": hub.url})
        assert plan.returncode == 0, plan.stderr
        assert not [line for line in hub.asked if "safetensors" in line and line.startswith("GET")]
        first = cli("train", path, RAY_ADDRESS=ray_address, **home | {"HF_ENDPOINT": hub.url})
        assert first.returncode == 0, first.stderr
    again = cli("train", path, "train.steps=2", RAY_ADDRESS=ray_address, **home)
    assert again.returncode == 0, again.stderr
    assert "thrown while requesting" not in again.stderr
    assert len(losses(tmp_path / "run")) == 2
    kept = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer_config.json").read_text())
    assert kept["eos_token"]["content"] == "<|im_end|>"
