"""Reading safetensors folders: exact values, only the bytes asked for, and every broken folder named."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import INDEX_NAME, SINGLE_NAME, WeightFolder
from megatrain_ray.io.checkpoints.weight_map import CheckpointTensor, MappedWeights


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(17, 5, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "proj": torch.randn(3, 4, 5, generator=generator).half(),
        "scalar": torch.tensor(3.5),
        "ids": torch.arange(6),
    }


def write_sharded(folder: Path, weights: dict[str, Tensor]) -> Path:
    """Write the weights as two files and an index."""
    names = {name: f"model-0000{1 + k % 2}-of-00002.safetensors" for k, name in enumerate(weights)}
    for file in set(names.values()):
        safetensors.torch.save_file({n: w for n, w in weights.items() if names[n] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


@pytest.fixture(params=["single", "sharded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "sharded":
        return write_sharded(tmp_path, random_weights())
    safetensors.torch.save_file(random_weights(), tmp_path / SINGLE_NAME, {"format": "pt"})
    return tmp_path


def test_every_range_of_every_parameter_is_exact(folder: Path) -> None:
    weights, opened = random_weights(), WeightFolder.open(folder)
    assert opened.names == set(weights)
    for name in ("embed", "norm", "proj", "scalar"):
        flat = weights[name].flatten().float()
        assert opened.shape(name) == tuple(weights[name].shape)
        for start in range(0, flat.numel(), 3):
            for stop in range(start, flat.numel() + 1, 4):
                got = opened.read(name, start, stop)
                assert (got.dtype, got.shape) == (torch.float32, (stop - start,))
                assert torch.equal(got, flat[start:stop])
    opened.check({name: tuple(weights[name].shape) for name in ("embed", "norm", "proj")})


def test_every_range_of_a_parameter_of_interleaved_tensors_is_exact(tmp_path: Path) -> None:
    experts = torch.arange(24.0).view(2, 6, 2)  # of each of 2 experts, 3 rows are stored apart from 3 others
    safetensors.torch.save_file({"gate": experts[:, :3].clone(), "up": experts[:, 3:].clone()}, tmp_path / SINGLE_NAME)
    pieces = [CheckpointTensor(name, (2, 3, 2), offset, (12, 2, 1)) for name, offset in (("gate", 0), ("up", 6))]
    weights = MappedWeights(WeightFolder.open(tmp_path), {"experts": pieces})
    for start in range(24):
        for stop in range(start + 1, 25):
            assert weights.read("experts", start, stop).tolist() == list(range(start, stop))


def test_only_the_bytes_that_were_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors.torch.save_file({"big": torch.arange(1 << 20, dtype=torch.float32)}, tmp_path / SINGLE_NAME)
    opened, reads = WeightFolder.open(tmp_path), list[int]()
    real_preadv = os.preadv

    def note(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(len(buffers[0]))
        return real_preadv(fd, [buffers[0][:1000]], offset)  # a short read, as large ones are

    monkeypatch.setattr(os, "preadv", note)
    assert torch.equal(opened.read("big", 500_000, 500_512), torch.arange(500_000, 500_512, dtype=torch.float32))
    assert reads == [2048, 1048, 48]


def test_what_is_not_there_is_named(folder: Path) -> None:
    opened = WeightFolder.open(folder)
    for name, start, stop, message in (
        ("head", 0, 1, f"{folder} holds 5 parameters, but no head"),
        ("norm", 0, 8, f"{folder}/model.*safetensors: norm has 7 elements, expected 0 to 8"),
        ("norm", 3, 2, "norm has 7 elements, expected 3 to 2"),
        ("ids", 0, 1, f"{folder}/model.*safetensors: ids is of type I64, expected one of F32, BF16, F16"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened.read(name, start, stop)
    with pytest.raises(ConfigError, match=r"model.*safetensors: embed has shape \(17, 5\), the model's has \(5, 17\)"):
        opened.check({"norm": (7,), "embed": (5, 17)})
    with pytest.raises(ConfigError, match="no head"):
        opened.check({"head": (1,)})
    with pytest.raises(ConfigError, match="ids is of type I64"):
        opened.check({"ids": (6,)})


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none is no folder"):
        WeightFolder.open(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"{tmp_path} holds neither {SINGLE_NAME} nor {INDEX_NAME}: is it a model"):
        WeightFolder.open(str(tmp_path))


class Runs:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (None, {}, "is damaged, or not of torch.save"),
        ({"x": Runs()}, {}, "is damaged, or not of torch.save since torch 1.6: Weights only load failed"),
        ({"x": torch.ones(2)}, {"_use_new_zipfile_serialization": False}, "is damaged, or not of torch.save"),
        ({"x": torch.ones(2, 3).t()}, {}, "holds not only tensors that lie in it as they are; load it with Transf"),
        ({"x": torch._neg_view(torch.ones(2))}, {}, "holds not only tensors"),
        ({"x": torch.ones(2, device="meta")}, {}, "holds not only tensors"),
        ({"x": {"y": torch.ones(2)}}, {}, "holds not only tensors"),
        (torch.ones(2), {}, "holds not only tensors"),
        ({"x": torch.ones(2, dtype=torch.int64)}, {}, "x is of type I64, expected one of"),
    ],
)
def test_pickled_weights_that_cannot_be_read_in_parts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, options: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin", **options)
    if content is None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=expected):
        WeightFolder.open(tmp_path).check({"x": (2,)})
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("compression", "changed"),
    [
        (zipfile.ZIP_DEFLATED, {}),
        (zipfile.ZIP_STORED, {"byteorder": b"big"}),
        (zipfile.ZIP_STORED, {"data/0": b"four"}),  # fewer bytes than the tensor has
    ],
)
def test_pickled_weights_of_which_torch_would_change_bytes_are_refused(
    tmp_path: Path, compression: int, changed: dict[str, bytes]
) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"x": torch.arange(4.0)}, file)
    with zipfile.ZipFile(file) as records:
        held = {record.filename: records.read(record) for record in records.infolist()}
    with zipfile.ZipFile(file, "w", compression) as records:
        for name, data in held.items():
            records.writestr(name, changed.get(name.partition("/")[2], data))
    with pytest.raises(ConfigError, match="holds not only tensors that lie in it as they are"):
        WeightFolder.open(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=f"{file} is damaged or no safetensors file"):
        WeightFolder.open(folder)


def test_a_corrupt_header_is_refused(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    data = file.read_bytes()
    for broken in (
        data[:8] + b"x" + data[9:],
        b"\xff" * 8 + data[8:],
        data.replace(b"[17,5]", b"[17,6]"),
        data.replace(b'"F32"', b'"F99"', 1),
    ):
        file.write_bytes(broken)
        with pytest.raises(ConfigError, match=f"{file} is damaged or no safetensors file"):
            WeightFolder.open(folder)


def test_a_broken_index_is_refused(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, random_weights()) / INDEX_NAME
    good = json.loads(index.read_text())["weight_map"]
    for text, message in (
        ("{", "is no index of weights"),
        ("[]", "is no index of weights"),
        ('{"weight_map": []}', "is no index of weights"),
        (json.dumps({"weight_map": good | {"new": good["embed"]}}), "holds no new, though"),
        (json.dumps({"weight_map": good | {"new": "gone.safetensors"}}), "names gone.safetensors, which is not in"),
        (json.dumps({"weight_map": good | {"new": "../secret.safetensors"}}), "names ../secret.safetensors, which is"),
    ):
        (tmp_path.parent / "secret.safetensors").touch()
        index.write_text(text)
        with pytest.raises(ConfigError, match=f"{tmp_path}/.*{message}"):
            WeightFolder.open(tmp_path)


def test_a_file_that_shrinks_or_goes_while_it_is_open(folder: Path) -> None:
    opened = WeightFolder.open(folder)
    for file in folder.glob("*.safetensors"):
        os.truncate(file, 8)
    with pytest.raises(ConfigError, match=r"safetensors became shorter while it was read: \d+ bytes are missing"):
        for name in ("embed", "proj", "norm"):
            opened.read(name, 0, 7)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*safetensors: No such file"):
        opened.read("embed", 0, 1)
