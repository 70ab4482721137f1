"""What a model's folder holds beyond the model is in an export as it was, or is said to be missing."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain_ray.io.checkpoints.leftovers import Leftovers, checksum, find_leftovers, leads_away, leftover_files
from megatrain_ray.io.checkpoints.safetensors_folder import SINGLE_NAME, WeightFolder
from tests.support.family_models import build_family
from tests.support.in_process import Train
from tests.support.quantised import as_fp8
from tests.support.reference import load_model
from tests.support.runs import cli_here, config, write_config

FILES = {
    "LICENSE": "of the model", "modeling_extra.py": "x = 1\n", "preprocessor_config.json": "{}", "vocab.txt": "a\n",
    "README.md": "the page", "model.safetensors.index.json": "{}", "trainer_state.json": "{}", "weights.bin": "x",
}  # fmt: skip
KEPT = {"LICENSE", "modeling_extra.py", "preprocessor_config.json"}  # the run is on bytes: vocab.txt is not its own
LEFT = {"model.layers.3.eh_proj.weight", "scale", "mtp.ids", "mtp.norm.weight"}
F4 = {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}  # torch has no such type
GROUPS = "4 tensors (model.layers.3.*, mtp.*, scale)"


def write_source(folder: Path) -> None:
    """Write an FP8 folder with a layer more than the model has, as DeepSeek-V3 is published, and other parts."""
    build_family("Llama", folder, vocab_size=257)
    held = load_file(folder / SINGLE_NAME)
    held |= {"model.layers.3.eh_proj.weight": torch.randn(32, 64), "scale": torch.tensor(2.5)}
    held |= {"mtp.ids": torch.arange(5), "mtp.norm.weight": torch.ones(32).bfloat16()}
    save_file(held, folder / SINGLE_NAME, {"format": "pt"})
    as_fp8(folder)
    for name, text in FILES.items():
        (folder / name).write_text(text)


def test_an_fp8_folder_is_trained_and_its_other_parts_are_exported(tmp_path: Path, train: Train) -> None:
    source, run_dir, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    write_source(source)
    (source / "secret.json").symlink_to("/etc/passwd")
    path = write_config(tmp_path / "config.yaml", config(run_dir, source, train__steps=1, train__schedule="constant"))
    done = train(str(path))
    assert done.returncode == 0, done.stderr
    assert f"\nkept      in exports as they were, since the model has no such part: {GROUPS}" in done.stderr

    done = cli_here("export", str(run_dir), str(out))
    assert done.returncode == 0, done.stderr
    assert f"kept as they were in {source}: {GROUPS}" in done.stderr
    assert {file.name for file in out.iterdir()} & FILES.keys() == KEPT
    assert all((out / name).read_text() == FILES[name] for name in KEPT)
    assert f"note: links that lead out of {source} are not exported: secret.json; copy" in done.stderr
    assert not (out / "secret.json").exists()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    before, after = WeightFolder.open(source), load_file(out / SINGLE_NAME)
    assert not [name for name in after if name.endswith("_scale_inv")]
    for name in LEFT:
        assert torch.equal(after[name], before.whole(name)), name
    loaded = load_model(out, torch.float32)
    for name, parameter in loaded.named_parameters():
        assert parameter.isfinite().all(), name

    done = cli_here("export", str(run_dir), str(tmp_path / "without"), "--no-extras")
    assert done.returncode == 0, done.stderr
    assert after.keys() - load_file(tmp_path / "without" / SINGLE_NAME).keys() == LEFT
    assert not KEPT & {file.name for file in (tmp_path / "without").iterdir()}

    recorded = json.loads((run_dir / "model.json").read_text())  # as if Transformers had known one of them then
    folder, tensors = WeightFolder.open(source), sorted(LEFT - {"scale"})
    recorded["leftovers"] |= {"tensors": tensors, "crc32": checksum(folder, tensors)}
    (run_dir / "model.json").write_text(json.dumps(recorded))
    done = cli_here("export", str(run_dir), str(tmp_path / "newer"))
    assert done.returncode == 0, done.stderr
    assert load_file(tmp_path / "newer" / SINGLE_NAME).keys() >= LEFT
    recorded["leftovers"] |= {"tensors": sorted(LEFT), "crc32": checksum(folder, sorted(LEFT))}
    (run_dir / "model.json").write_text(json.dumps(recorded))

    held = load_file(source / SINGLE_NAME)
    save_file(held | {"scale": torch.tensor(3.0)}, source / SINGLE_NAME, {"format": "pt"})
    done = cli_here("export", str(run_dir), str(tmp_path / "changed"))
    assert (done.returncode, (tmp_path / "changed").exists()) == (2, False)
    assert f"error: model.path: {source} held {GROUPS}, " in done.stderr
    assert "or export without them: --no-extras" in done.stderr
    shutil.rmtree(source)
    done = cli_here("export", str(run_dir), str(tmp_path / "gone"))
    assert (done.returncode, (tmp_path / "gone").exists()) == (2, False)
    assert "which an export keeps as they were, and cannot be read now" in done.stderr


def test_what_is_kept_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    for name in (*FILES, "config.json", "generation_config.json", ".hidden.json", "optimizer.pt"):
        (tmp_path / name).write_text("")
    (tmp_path / "link.json").symlink_to(tmp_path / "nothing")
    assert {file.name for file in leftover_files(tmp_path)} == {*KEPT, "vocab.txt"}


def test_links_lead_away_unless_they_stay_in_the_folder_or_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    own, snapshot = tmp_path / "own", tmp_path / "elsewhere" / "models--a" / "snapshots" / "1f"
    for folder in (own, snapshot, tmp_path / "hub" / "blobs", snapshot.parents[1] / "blobs"):
        folder.mkdir(parents=True)
        (folder / "blob").touch()
    links = {
        "inside": "blob", "in_the_cache": "../hub/blobs/blob", "secret": "/etc/passwd", "beside": "../hub/../elsewhere",
    }  # fmt: skip
    for name, target in links.items():
        (own / name).symlink_to(target)
    (snapshot / "of_the_repository").symlink_to("../../blobs/blob")
    assert {link.name for link in own.iterdir() if leads_away(link, own)} == {"secret", "beside"}
    assert not leads_away(snapshot / "of_the_repository", snapshot)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (["mtp.a.b", "mtp.c"], ["mtp.*"]),
        (["layers.1.x", "layers.2.x", "lone"], ["layers.2.*", "lone"]),
        (["model.layers.1.x"], []),  # the prefix of the base model
    ],
)
def test_leftovers_are_named_by_where_their_names_part_from_the_models(
    tmp_path: Path, names: list[str], groups: list[str]
) -> None:
    save_file({name: torch.zeros(1) for name in names}, tmp_path / SINGLE_NAME)
    header = json.dumps({"layers.0.x": F4, "mtp.packed": {**F4, "data_offsets": [1, 2]}}).encode()
    (tmp_path / "f4.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    assert find_leftovers(WeightFolder.of_file(tmp_path / "f4.safetensors"), ["layers.0.x"]) == Leftovers(
        [], [], left_out=["mtp.packed"]
    )
    known = ["layers.0.x", "layers.1.x", "layers.1.y", "head"]
    assert list(find_leftovers(WeightFolder.open(tmp_path, "model"), known).groups) == groups
