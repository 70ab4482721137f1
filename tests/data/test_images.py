"""Chats with images: what the model's own processor and tower make of them, and steps that equal plain Transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import masking_utils

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.startup import Startup
from megatrain_ray.data import image_features
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.image_features import find_features
from megatrain_ray.data.tokenize_data import tokenize
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.model.images import TRAINED_TOWERS, VISION_FAMILIES
from megatrain_ray.engine.plan.plan import ActivationPolicy
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.errors import ConfigError
from megatrain_ray.export.evaluation_config import identity_of
from megatrain_ray.io.batching.batch import Batch
from megatrain_ray.io.images.feature_files import FEATURES_NAME, FeatureReader
from megatrain_ray.io.tokens.image_files import read_images
from megatrain_ray.io.tokens.token_files import read_meta
from megatrain_ray.model.open_model import open_model
from megatrain_ray.workers.gpu_steps import with_images
from tests.support.pair_losses import Preference
from tests.support.pictured_models import NUM_IDS, PICTURED, build_pictured, provide_processor
from tests.support.pictures import PlainChats, answered, chats, one_by_one, preferences, write_picture
from tests.support.reference import Recipe, Result, train_reference
from tests.support.run_engine import EngineResult, Mode, train_engine
from tests.support.runs import config
from tests.support.type_sweep import LAYERS

RECIPE = Recipe(steps=10, micro_batch_size=1)
TOWERS = (
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.embed_vision.",
    "model.image_newline",
)


def test_each_family_is_compared() -> None:
    assert {family.model["model_type"] for family in PICTURED.values()} == set(VISION_FAMILIES)


class Data:
    """Makes the batches of a run on chats with images."""

    def __init__(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Use the model in `folder`, and a cache of its own. The tower runs in this process, which has torch."""
        self.num_passes = 0
        monkeypatch.setattr(image_features, "in_own_process", self._in_this_process)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self._file, self._folder = tmp_path / "chats.jsonl", folder
        self.write(chats(tmp_path))

    def write(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self._file.write_text("".join(json.dumps(record) + "\n" for record in records))

    def _in_this_process(self, _: str, function: Any, *args: Any) -> Any:
        self.num_passes += 1
        return function(*args)

    def features(
        self, vision: str = "frozen", **settings_of_data: Any
    ) -> tuple[TrainConfig, tuple[Path, ...], dict[Path, Path]]:
        tree = config(self._file.parent / "run", self._folder, train__vision=vision)
        tree["data"] |= {"kind": "sft", "path": str(self._file)}
        tree["data"] |= {"seq_len": 100, "tokenizer": str(self._folder), "images": True, **settings_of_data}
        tree["train"]["objective"] = {"pairs": "simpo", "unpaired": "kto"}.get(tree["data"]["kind"], "sft")
        settings = TrainConfig.model_validate(tree)
        tokens = tokenize(settings.data, settings.tokenizer, NUM_IDS, self._file.parent, reports=False)
        source, identity = open_model(ModelConfig(path=str(self._folder))), identity_of(None, settings)
        found = find_features(settings, source, identity, tokens, "cpu", self._file.parent, Startup())
        return settings, tokens, found

    def batches(self, num_steps: int, vision: str = "frozen", **settings_of_data: Any) -> list[Batch]:
        settings, tokens, features = self.features(vision, **settings_of_data)
        worker, reader = DataWorker(settings.data, tokens, NUM_IDS, 4, 0, None), FeatureReader(list(features.values()))
        batches = (worker.batch(step) for step in range(1, num_steps + 1))
        return [with_images(batch, reader, 0, 1) for batch in batches]


# Only in make test-all: these towers resemble those of the others.
LONG = ("Qwen2-VL", "Qwen3-VL-MoE", "Qwen3.5-MoE")


def cases(names: Iterable[str], *more: str) -> list[Any]:
    return [pytest.param(n, marks=[pytest.mark.long] if n in (*LONG, *more) else []) for n in names]


@pytest.mark.parametrize("name", cases(PICTURED))
def test_steps_with_images_equal_plain_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows hold several chats without, with one and with several images of several sizes. Ids are the processor's."""
    provide_processor(name, monkeypatch)
    data = Data(build_pictured(name, tmp_path / "model"), tmp_path, monkeypatch)
    family = PICTURED[name]
    batches = data.batches(family.steps, packing=family.packs, seq_len=family.seq_len)
    plain = PlainChats.of(tmp_path / "model", data.records, tmp_path)
    alone = plain.separate_loss(batches[0])
    apart = one_by_one(plain.model.model, family.num_crops)
    monkeypatch.setattr(type(plain.model.model), "get_image_features", apart)
    given = [SimpleNamespace(**tensors(batch), pictured=plain.arguments(batch)) for batch in batches]
    assert any(len(arguments["position_ids"].flatten().unique()) > 1 for arguments in given[0].pictured)
    with monkeypatch.context() as patch:
        # Transformers 5.24 by itself lets tokens of a packed row see later ones (engine/model/images.py).
        patch.setattr(masking_utils, "remap_positions_for_packed_sequence", lambda mask, _: mask, raising=False)
        theirs = train_reference(tmp_path / "model", given, RECIPE, frozen=TOWERS)
    ours = train_engine(tmp_path / "model", batches, RECIPE, LAYERS if [*PICTURED].index(name) % 2 else Mode())
    assert_same(ours, theirs)
    assert ours.losses[0] == pytest.approx(alone, rel=1e-6)  # documents of a row stay apart


def assert_same(ours: EngineResult, theirs: Result) -> None:
    assert ours.losses == theirs.losses
    for key, master in theirs.masters.items():
        assert torch.equal(ours.masters[key].flatten(), master.flatten()), key


# What a trained tower has that no gradient reaches: LLaVA takes the outputs of its last block but one.
UNREACHED = (
    "model.vision_tower.encoder.layers.3.", "model.vision_tower.post_layernorm.", "model.vision_tower.head."
)  # fmt: skip
RECOMPUTING = Mode(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE)
# Of each family: how steps run that train the tower, too, and those that train the projector only.
TRAINED = {
    "Qwen2-VL": (Mode(sums=Tier.HOST), Mode(LoopOrder.LAYERS_OUTER)),
    "Qwen2.5-VL": (LAYERS, Mode()),
    "Qwen3-VL": (replace(RECOMPUTING, boundaries=Tier.HOST), Mode(kept=Tier.HOST)),
    "Qwen3-VL-MoE": (Mode(), LAYERS),
    "Qwen3.5": (LAYERS, Mode()),
    "Qwen3.5-MoE": (Mode(), LAYERS),
    "LLaVA": (Mode(), LAYERS),
    "Gemma 3, vision-language": (replace(RECOMPUTING, segment=2), Mode(activations=ActivationPolicy.RECOMPUTE)),
    "Mistral 3": (LAYERS, Mode()),
    "Gemma 4": (Mode(kept=Tier.HOST), RECOMPUTING),
    "Gemma 4, embeddings for each layer": (replace(RECOMPUTING, boundaries=Tier.HOST, segment=2), LAYERS),
    "GLM-4.1V": (Mode(), LAYERS),
    "InternVL": (LAYERS, Mode()),
}


def test_each_tower_that_is_trained_is_compared() -> None:
    assert {PICTURED[name].model["model_type"] for name in TRAINED} == set(TRAINED_TOWERS)


@pytest.mark.parametrize("name", cases(TRAINED, "Qwen3.5", "Mistral 3", "Gemma 4", "GLM-4.1V", "InternVL"))
def test_a_trained_tower_equals_plain_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some micro-batches hold no image, and a whole step holds none. The model gets the images of a row together."""
    provide_processor(name, monkeypatch)
    data, family = Data(build_pictured(name, tmp_path / "model"), tmp_path, monkeypatch), PICTURED[name]
    is_wide = family.seq_len > 100  # such a row of several chats always has an image
    num_steps, packing = 2 if is_wide else family.steps - 1, family.packs and not is_wide
    batches = data.batches(num_steps, "all", packing=packing, seq_len=family.seq_len)
    plain = PlainChats.of(tmp_path / "model", data.records, tmp_path)
    batches.insert(1, without_images(batches[1]))
    given = [SimpleNamespace(**tensors(batch), pictured=plain.arguments(batch)) for batch in batches]
    pictured = [{"pixel_values" in arguments for arguments in batch.pictured} for batch in given]
    assert pictured[1] == {False} and {True, False} in pictured
    recipe = replace(RECIPE, steps=len(batches))
    names = [name for name, _ in plain.model.named_parameters()]
    of_tower = [n for n in names if n.startswith(TOWERS) and not re.search("merger|projector|embed_vision", n)]
    unreached = UNREACHED[:2] if name == "LLaVA" else UNREACHED[2:]
    modes = TRAINED[name]
    runs = [("all", modes[0], unreached, ()), ("projector", modes[1], tuple(of_tower), ())]
    if name == "LLaVA":  # its first stage: then a text gives no gradient at all
        runs.append(("projector", RECOMPUTING, tuple(of_tower), ("language_model", "lm_head")))
    for vision, mode, frozen, freeze in runs:
        recipe = replace(recipe, freeze=freeze)
        with monkeypatch.context() as patch:
            # Transformers 5.24 by itself lets tokens of a packed row see later ones (engine/model/images.py).
            patch.setattr(masking_utils, "remap_positions_for_packed_sequence", lambda mask, _: mask, raising=False)
            theirs = train_reference(tmp_path / "model", given, recipe, frozen=frozen)
        ours = train_engine(tmp_path / "model", batches, recipe, replace(mode, vision=vision))
        assert (ours.losses, ours.grad_norms) == (theirs.losses, theirs.grad_norms)
        if vision == "projector":
            assert uploads_of_frozen_layers(ours) == {1}, "for its forward only"
            assert sum(r.op.name == "load" for r in ours.records[0]) == ours.plan.slots.num_uploads
        assert ours.masters.keys() == theirs.masters.keys()
        for key, master in theirs.masters.items():
            assert torch.equal(ours.masters[key].flatten(), master.flatten()), (vision, key)


def uploads_of_frozen_layers(result: EngineResult) -> set[float]:
    """Return how often a sweep of the first step uploads a frozen layer of the tower."""
    counts = Counter(r.op.layer for r in result.records[0] if r.op.name == "load")
    return {
        counts[i] / len(result.layout.layers[i].fragments) / result.plan.step.num_sweeps
        for i, layer in enumerate(result.plan.layers)
        if layer.name.startswith("vision.") and not layer.num_trained
    }


def test_pairs_in_a_tower_equal_those_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from tests.support.adapters import build_adapter

    folder = build_pictured("Qwen2.5-VL", tmp_path / "model")
    data = Data(folder, tmp_path, monkeypatch)
    batches, plain = data.batches(2, "all"), PlainChats.of(folder, data.records, tmp_path)
    adapter = build_adapter(tmp_path / "adapter", folder, ["qkv", "gate_proj", "q_proj"])
    given = [SimpleNamespace(**tensors(batch), pictured=plain.arguments(batch)) for batch in batches]
    recipe = replace(RECIPE, steps=2, adapter=adapter)
    theirs, ours = (train_reference(folder, given, recipe), train_engine(folder, batches, recipe, Mode(vision="all")))
    assert ours.losses == theirs.losses
    assert ours.masters.keys() == theirs.masters.keys()
    assert any(".visual." in name for name in ours.masters)
    assert all(torch.equal(ours.masters[name].flatten(), theirs.masters[name].flatten()) for name in ours.masters)


def without_images(batch: Batch) -> Batch:
    """Return the rows of a batch that have no images."""
    rows = ~required(batch.image_numbers).any(axis=1)
    arrays = {k: v[rows] for k, v in vars(batch).items() if isinstance(v, np.ndarray)}
    num_supervised = int((arrays["targets"] != -100).sum())
    return replace(batch, **arrays, images=(), num_supervised=num_supervised)


def tensors(batch: Batch) -> dict[str, Any]:
    return {k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in vars(batch).items()}


def test_preferences_over_images_equal_plain_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's log-probabilities, DPO's steps, and the mismatched answers of KTO, whose prompts hold images."""
    folder = build_pictured("Qwen2.5-VL", tmp_path / "model")
    data, plain = Data(folder, tmp_path, monkeypatch), PlainChats.of(folder, answered(tmp_path), tmp_path)
    monkeypatch.setattr(type(plain.model.model), "get_image_features", one_by_one(plain.model.model))
    data.write(preferences(tmp_path))
    pairs = data.batches(3, kind="pairs", seq_len=220)
    data.write([
        {"prompt": r["prompt"], "completion": r["chosen"], "label": bool(i % 3), "images": r.get("images")}
        for i, r in enumerate(data.records)
    ])  # fmt: skip
    [labelled] = data.batches(1, kind="unpaired", seq_len=100)
    assert data.num_passes == 2 and pairs[0].row_parts == 1
    scored = [*pairs, labelled, required(labelled.mismatched)]
    logprobs = [plain.logprobs(batch) for batch in scored]
    [ours] = train_engine(folder, [], RECIPE, Mode(), held_out=scored).logprobs
    assert torch.equal(ours, torch.cat([found.flatten() for found in logprobs]))

    recipe = replace(RECIPE, steps=3, preference=Preference("dpo", 0.5))
    pairs = [replace(b, reference_logprobs=found.numpy()) for b, found in zip(pairs, logprobs, strict=False)]
    given = [SimpleNamespace(**tensors(batch), pictured=plain.arguments(batch)) for batch in pairs]
    theirs = train_reference(folder, given, recipe, frozen=TOWERS)
    assert_same(train_engine(folder, pairs, recipe, LAYERS), theirs)


def test_features_are_computed_once_and_follow_the_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Data(build_pictured("Qwen2.5-VL", tmp_path / "model"), tmp_path, monkeypatch)
    before = data.batches(1)
    _, _, (folder, *_) = (*data.features()[:2], list(data.features()[2].values()))
    assert data.num_passes == 1  # found again twice
    assert sum(len(batch.images) for batch in before) > 3  # distinct ones, in the one folder
    with (folder / FEATURES_NAME).open("r+b") as file:
        file.write(b"damage")
    data.features()
    assert data.num_passes == 2

    write_picture(tmp_path, 0, changed_pixel=True)
    after = data.batches(1)
    assert "an image in " in (told := capsys.readouterr().err) and "has changed: the tokens are made again" in told
    assert data.num_passes == 3
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(before, after, strict=True))
    first, second = (train_engine(tmp_path / "model", batches, RECIPE, Mode()) for batches in (before, after))
    assert differ(first, second)
    (tmp_path / "other.png").write_bytes((tmp_path / "2.png").read_bytes())
    (tmp_path / "0.png").rename(tmp_path / "first.png")
    for target, num_passes in (("first.png", 3), ("other.png", 4)):  # the same bytes, then others
        (tmp_path / "0.png").unlink(missing_ok=True)
        (tmp_path / "0.png").symlink_to(target)
        data.features()
        assert data.num_passes == num_passes
    data.features("all")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    data.features("all")
    assert data.num_passes == 5  # pixels are those of a save's weights, too
    data.features()
    assert data.num_passes == 6


def test_skipped_records_are_read_once_their_images_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = Data(build_pictured("Qwen2.5-VL", tmp_path / "model"), tmp_path, monkeypatch), []
    image = tmp_path / "1.png"
    whole = image.read_bytes()
    image.unlink()
    for content in (whole[:99], whole):
        _, [folder], _ = data.features(bad_records="skip")
        found.append(read_meta(folder))
        image.write_bytes(content)
    _, [folder], _ = data.features(bad_records="skip")
    assert [meta.num_documents for meta in map(required, (*found, read_meta(folder)))] == [5, 5, 8]


def required(numbers: Any) -> Any:
    assert numbers is not None
    return numbers


def differ(first: EngineResult, second: EngineResult) -> bool:
    return first.losses[0] != second.losses[0]


def test_tables_and_lists_of_other_tools_hold_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet as the datasets library writes images, and a column of images that a dataset_info.json names."""
    data = Data(build_pictured("LLaVA", tmp_path / "model"), tmp_path, monkeypatch)
    content = (tmp_path / "1.png").read_bytes()
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "A"}]
    listed = pa.array([[{"bytes": content, "path": "gone.png"}]])
    pq.write_table(pa.table({"conversations": [turns], "images": listed}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([{"turns": turns, "pictures": ["1.png"]}]))
    columns = {"messages": "turns", "images": "pictures"}
    entry = {"file_name": "b.json", "formatting": "sharegpt", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"own": entry}))
    named = {"path": str(tmp_path / "dataset_info.json"), "dataset": "own"}
    for settings in ({"path": str(tmp_path / "a.parquet")}, named):
        _, [folder], _ = data.features(**settings)
        assert read_images(folder, range(1)) == [content]
    with pytest.raises(ConfigError, match=r"own names a column of images: read with data\.images: true only"):
        data.features(**named, images=False)


def test_a_folder_without_a_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_pictured("LLaVA", tmp_path / "model")
    data = Data(folder, tmp_path, monkeypatch)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"data\.images: .*/model has none of preprocessor_config\.json"):
        data.features()
