"""Exports: exact values in either type, readable by others, and a folder that is complete or not there."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from megatrain_ray.engine.layout.split_master import split, to_working
from megatrain_ray.engine.weights import saved_values as export_module
from megatrain_ray.engine.weights.export_save import export_save
from megatrain_ray.errors import CapacityError, ConfigError, MegatrainError
from megatrain_ray.io.checkpoints import write_checkpoint as folder_module
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype, ExportTensor, write_model_folder
from megatrain_ray.io.saves.manifest import LayerEntry, Manifest, ParameterEntry, PartManifest
from megatrain_ray.io.saves.save_folder import commit_save, prepare_save, save_folder, write_part
from megatrain_ray.io.saves.save_reader import SaveReader
from megatrain_ray.io.saves.save_writer import Piece
from tests.support.partial_folders import killed_while_writing

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def random_masters() -> dict[str, Tensor]:
    """Return the model's parameters by name, in order; some values are ties, where torch's cast and ours differ."""
    values = {k: v for k, v in CONFIG.items() if k not in ("model_type", "torch_dtype")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**values))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters["model.norm.weight"].view(torch.int32)[:4] = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F807FFF])
    return masters


def layers_of(masters: Mapping[str, Tensor]) -> tuple[LayerEntry, ...]:
    """Embedding, blocks, head; the head's weight is tied to the embedding's."""
    groups = itertools.groupby(masters, lambda name: ".".join(name.split(".")[:3]))
    layers = []
    for layer, names in groups:
        entries, start = list[ParameterEntry](), 0
        for name in names:
            entries.append(ParameterEntry(name, tuple(masters[name].shape), start))
            start += masters[name].numel()
        layers.append(LayerEntry(layer, start, tuple(entries)))
    tied = ParameterEntry("lm_head.weight", (48, 16), 0, tied_to="model.embed_tokens.weight")
    return (*layers[:-1], LayerEntry(layers[-1].name, layers[-1].logical_size, (*layers[-1].parameters, tied)))


def kinds_of(flat: Tensor, precision: str) -> dict[str, Tensor]:
    if precision == "fp32":
        return {"master": flat}
    working, residual = split(flat)
    return {"working": working, "residual": residual}


def write_save(saves: Path, masters: Mapping[str, Tensor], precision: str, num_shards: int = 2) -> Manifest:
    layers = layers_of(masters)
    folder = prepare_save(saves, 7)

    def pieces(shard: int) -> Iterator[Piece]:
        for layer in layers:
            flat = torch.cat([masters[p.name].flatten() for p in layer.parameters if not p.tied_to])
            start, stop = flat.numel() * shard // num_shards, flat.numel() * (shard + 1) // num_shards
            for kind, values in kinds_of(flat, precision).items():
                yield Piece(layer.name, kind, start, stop, [values[start:stop].view(torch.uint8).numpy().data])

    async def parts() -> tuple[PartManifest, ...]:
        return tuple([await write_part(folder, k, pieces(k)) for k in range(num_shards)])

    itemsize = {kind: values.itemsize for kind, values in kinds_of(torch.zeros(1), precision).items()}
    manifest = Manifest(1, 7, 7, 0, precision, itemsize, layers, {}, CONFIG, {}, asyncio.run(parts()), {"top_k": 5})
    commit_save(saves, 7, manifest)
    return manifest


def exported(out_dir: Path) -> dict[str, Tensor]:
    """Read by the safetensors library."""
    return {k: v for f in out_dir.glob("*.safetensors") for k, v in safetensors.torch.load_file(f).items()}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("dtype", [None, *ExportDtype])
@pytest.mark.parametrize("small", [False, True])
def test_exported_values_are_exact(
    tmp_path: Path, precision: str, dtype: ExportDtype | None, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small:
        monkeypatch.setattr(export_module, "READ_ELEMENTS", 100)
    masters = random_masters()
    manifest = write_save(tmp_path, masters, precision)
    out = tmp_path / "new" / "out"
    export_save(save_folder(tmp_path, 7), manifest, out, dtype)
    as_bf16 = (dtype or ExportDtype(precision)) is ExportDtype.BF16
    expected = {name: to_working(master) if as_bf16 else master for name, master in masters.items()}
    got = exported(out)
    assert list(got) == list(expected), "in order, and without the tied head"
    for name, want in expected.items():
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
        assert torch.equal(got[name].view(torch.uint8), want.view(torch.uint8)), name
    config = json.loads((out / "config.json").read_text())
    described = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    assert config == described | {"dtype": "bfloat16" if as_bf16 else "float32"}
    assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 5}


@pytest.mark.parametrize("file_bytes", [10**9, 3000])
def test_transformers_and_we_can_load_the_folder(tmp_path: Path, file_bytes: int) -> None:
    masters, out = random_masters(), tmp_path / "out"
    manifest = write_save(tmp_path, masters, "bf16")
    export_save(save_folder(tmp_path, 7), manifest, out, ExportDtype.FP32, file_bytes)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, masters[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.top_k == GenerationConfig(top_k=5).top_k
    assert model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
    weights = WeightFolder.open(out)
    weights.check({name: tuple(master.shape) for name, master in masters.items()})
    assert torch.equal(weights.read("model.norm.weight", 1, 9), masters["model.norm.weight"][1:9])


def test_files_are_filled_in_order_and_indexed(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 10, "c": 5, "huge": 100, "d": 1, "empty": 0}
    tensors = [ExportTensor(k, (n,), partial(zeros, 4 * n), torch.float32) for k, n in sizes.items()]
    write_model_folder(tmp_path / "out", tensors, ExportDtype.FP32, {}, file_bytes=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = [f"model-{k:05}-of-00003.safetensors" for k in (1, 2, 3)]
    assert index["metadata"] == {"total_size": 4 * sum(sizes.values())}
    assert [index["weight_map"][k] for k in sizes] == [*3 * [files[0]], files[1], files[2], files[2]]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", *files, index_name(tmp_path)]
    assert {k: v.numel() for k, v in exported(tmp_path / "out").items()} == sizes


def zeros(nbytes: int) -> list[memoryview]:
    return [memoryview(bytes(nbytes))]


def index_name(tmp_path: Path) -> str:
    return next(p.name for p in (tmp_path / "out").glob("*.index.json"))


def test_one_part_of_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "READ_ELEMENTS", 64)
    lengths, real = list[int](), SaveReader.read

    async def note(self: SaveReader, wanted: list[Piece]) -> None:
        lengths.extend(piece.stop - piece.start for piece in wanted)
        await real(self, wanted)

    monkeypatch.setattr(SaveReader, "read", note)
    masters = random_masters()
    manifest = write_save(tmp_path, masters, "fp32")
    export_save(save_folder(tmp_path, 7), manifest, tmp_path / "out")
    assert max(lengths) == 64
    assert sum(lengths) == sum(math.prod(m.shape) for m in masters.values())


def test_what_is_written_does_not_pile_up_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the disk every FLUSH_BYTES, be tensors small or large."""
    monkeypatch.setattr(folder_module, "FLUSH_BYTES", 1000)
    sizes, real = list[int](), os.fdatasync

    def note(file: int) -> None:
        real(file)
        sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", note)
    tensors = [
        ExportTensor(f"t{k}", (n,), partial(zeros_in_parts, 4 * n), torch.float32)
        for k, n in enumerate([10] * 60 + [1000])
    ]
    write_model_folder(tmp_path / "out", tensors, ExportDtype.FP32, {})
    steps = [after - before for before, after in itertools.pairwise(sizes)]
    assert len(sizes) == 6
    assert max(steps) < 2000


def zeros_in_parts(nbytes: int) -> Iterator[memoryview]:
    for start in range(0, nbytes, 900):
        yield memoryview(bytes(min(900, nbytes - start)))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for name in ("file", "full/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    for name in ("file", "full"):
        with pytest.raises(ConfigError, match=f"{name} exists and is not an empty folder"):
            write_model_folder(tmp_path / name, [], ExportDtype.BF16, {})
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "file").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    write_model_folder(tmp_path / "empty", [], ExportDtype.BF16, {})
    assert exported(tmp_path / "empty") == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file", "full"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    manifest = write_save(tmp_path, random_masters(), "bf16")
    blob = save_folder(tmp_path, 7) / "part_1.residual"
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    killed_while_writing(tmp_path / "out")
    with pytest.raises(MegatrainError, match=r"part_1.residual is damaged"):
        export_save(save_folder(tmp_path, 7), manifest, tmp_path / "out", ExportDtype.FP32)
    assert [p.name for p in tmp_path.iterdir()] == ["step_7"]
    export_save(save_folder(tmp_path, 7), manifest, tmp_path / "out")  # the working copy is whole
    with pytest.raises(MegatrainError, match="a: expected 8 bytes to export, got 6"):
        write_model_folder(
            tmp_path / "short",
            [ExportTensor("a", (2, 2), partial(zeros, 6), torch.bfloat16)],
            ExportDtype.BF16,
            {},
        )
    with pytest.raises(MegatrainError, match=r"cannot write .*file/.*: Not a directory"):
        write_model_folder(blob / "file" / "out", [], ExportDtype.BF16, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "step_7"]


def test_no_room_for_an_export_is_told_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: type(stats)((*stats[:4], 1, *stats[5:])))
    tensor = ExportTensor("a", (1 << 28,), partial(zeros, 4 << 28), torch.float32)
    with pytest.raises(
        CapacityError, match=r"no room for the exported model in .* up to 1.03 GiB needed, 4.00 KiB free"
    ):
        write_model_folder(tmp_path / "out", [tensor], ExportDtype.FP32, {})
    assert list(tmp_path.iterdir()) == []
