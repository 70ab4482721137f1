"""Finds the features of images in the cache beside the tokens, or has them made by the model's vision tower."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.console.startup import Startup
from megatrain_ray.data.tokenize_data import image_processor, writable_cache
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.model.images import ImageFeatures
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.disk_errors import check_room, explained
from megatrain_ray.io.files.partial_folder import partial_of
from megatrain_ray.io.images.feature_files import FeatureMeta, append_features, finish_features, holds_features
from megatrain_ray.io.images.image_processor import ImageProcessor
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.io.tokens.cache_pruning import mark_used
from megatrain_ray.io.tokens.image_files import IMAGE, read_images
from megatrain_ray.io.tokens.token_cache import key_of, locked_folder, new_folder
from megatrain_ray.io.tokens.token_files import WEIGHT_TYPE, column_file, derived_provenance, read_meta
from megatrain_ray.machine.subprocess_call import in_own_process
from megatrain_ray.model.model_source import ModelSource
from megatrain_ray.model.open_model import checked
from megatrain_ray.model.vision_tower import VisionTower
from megatrain_ray.units import format_duration, format_quantity

PROCESS_S = 600.0  # after which a process hands on to a new one, which loads the tower again: both show signs of life
WRITTEN_TOGETHER = 16  # images
OF_PIXELS = ("model_type", "image_token_id", "image_token_index")  # all that pixels depend on of a model's settings


@dataclass(frozen=True)
class FeatureJob:
    """Says what computes the features of the images in a folder of tokens. Picklable."""

    source: ModelSource
    processor: ImageProcessor
    dtype: torch.dtype
    device: str
    tokens: Path
    num_images: int
    tower_is_trained: bool  # then the features are pixels


class _FeatureNotes:
    """Says that a folder cannot be made at once."""

    def wait(self, folder: Path) -> None:
        say(f"waiting for another process that makes the features of images in {folder}")

    def replace(self, folder: Path) -> None:
        say(f"the features of images in {folder} are damaged: they are made again")


def find_features(
    config: TrainConfig, source: ModelSource, identity: tuple[Mapping[str, Any], list[Any]], tokens: Sequence[Path],
    device: str, run_dir: Path, startup: Startup,
) -> dict[Path, Path]:  # fmt: skip
    """Return for each folder of tokens that of the features of its images, made if it is missing.

    They lie where tokens are cached, or else in `run_dir`.

    identity: settings of the model, and identities of its files, by which it is recognised.
    device: on which the tower runs: cuda or cpu.

    Raises ConfigError for a model without images, CapacityError if features have no room, MegatrainError if the disk or
    the process of the tower fails.
    """
    startup.tell("looking for features of images")
    source, processor = checked(source), image_processor(config.tokenizer)
    dtype = Precision(config.train.precision).working_dtype
    if trained := config.train.vision != "frozen":  # pixels are the same for every save of a run
        identity = {key: source.config.get(key) for key in OF_PIXELS}, []
    settings = {
        "model": identity[0], "dtype": str(dtype), "device": device, "pixels": trained,
        "versions": [torch.__version__, version("transformers"), version("pillow")], **processor.settings(),
    }  # fmt: skip
    found = {}
    for folder in dict.fromkeys(tokens):
        meta = read_meta(folder)
        assert meta is not None  # it was just made
        provenance = derived_provenance(folder, "images of", settings, identity[1])
        there = folder.with_name(key_of(provenance))
        if not holds_features(there):  # the cache may be read-only
            job = FeatureJob(source, processor, dtype, device, folder, meta.num_images, trained)
            with writable_cache(run_dir) as root:
                there = root / key_of(provenance)
                _make(job, there, provenance)
        mark_used(there)
        found[folder] = there
    return found


def _make(job: FeatureJob, folder: Path, provenance: dict[str, Any]) -> None:
    with locked_folder(folder, partial_of(folder), _FeatureNotes(), PROCESS_S):
        if holds_features(folder):  # another process has just made it
            return
        start_s = time.monotonic()
        with new_folder(folder, _FeatureNotes()) as partial, explained("write", partial):
            append_features(partial, [], [], [])
            done = FeatureMeta(0, 0, 0, 1, (0,), job.dtype.itemsize, ())
            while done.num_images < job.num_images:
                done = in_own_process("the vision tower", compute_features, job, partial, done)
            finish_features(partial, provenance, done)
        if done.num_images:
            seconds = format_duration(time.monotonic() - start_s)
            what = "pixels" if job.tower_is_trained else "features"
            say(f"{what} of {format_quantity(done.num_images, 'image')}: {done.num_tokens} tokens in {seconds}")


def compute_features(job: FeatureJob, folder: Path, done: FeatureMeta) -> FeatureMeta:
    """Compute features for at most PROCESS_S, and return what is done then. Raises as find_features.

    done: what earlier processes have done.
    """
    start_s = time.monotonic()
    tower = VisionTower(job.source, job.dtype, torch.device(job.device), trained=job.tower_is_trained)
    if tower.image_token_id != job.processor.image_token_id:
        raise ConfigError(
            f"data.images: images become tokens {job.processor.image_token_id} by the processor in "
            f"{job.processor.folder}, and the model has {tower.image_token_id} for them; use the model's own"
        )
    while done.num_images < job.num_images and time.monotonic() - start_s < PROCESS_S:
        numbers = range(done.num_images, min(done.num_images + WRITTEN_TOGETHER, job.num_images))
        images, counts = zip(*(_features(job, tower, c) for c in read_images(job.tokens, numbers)), strict=True)
        if not done.num_images:
            _check_room(job, folder, images[0].features.nbytes / counts[0])
        geometries = [image.geometry.numpy() for image in images if image.geometry is not None]
        append_features(folder, [_bits(image.features) for image in images], counts, geometries)
        done = replace(
            done,
            num_images=numbers.stop,
            num_tokens=done.num_tokens + sum(counts),
            num_rows=done.num_rows + sum(image.features.shape[1] for image in images),
            num_entries=len(images[0].features),
            row_shape=tuple(images[0].features.shape[2:]),
            geometry_shape=geometries[0].shape if geometries else (),
        )
    return done


def _features(job: FeatureJob, tower: VisionTower, content: bytes) -> tuple[ImageFeatures, int]:
    """Return the features of an image, and its number of tokens."""
    try:
        inputs, num_tokens = job.processor.inputs_of(content)
    except RecordError as error:  # it was read before
        raise MegatrainError(f"an image in {job.tokens} cannot be read any more: {error}; start again") from None
    return tower.features(inputs), num_tokens


def _bits(features: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return features as numpy has them, which has no bfloat16."""
    plain = features.view(torch.uint16) if features.dtype == torch.bfloat16 else features
    return plain.numpy()


def _check_room(job: FeatureJob, folder: Path, bytes_per_token: float) -> None:
    of_images = np.memmap(job.tokens / column_file(IMAGE), WEIGHT_TYPE, "r")
    needed_bytes = int(np.count_nonzero(of_images) * bytes_per_token)
    check_room(folder, needed_bytes, "features of images", "name a folder on another disk in XDG_CACHE_HOME")
