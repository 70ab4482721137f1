"""Implements `megatrain export`: writes a save of a run as a Hugging Face folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.console.logs import say
from megatrain_ray.engine.model.structure import build_empty
from megatrain_ray.engine.weights.export_save import export_save
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.export.export_lora import export_adapter, export_merged
from megatrain_ray.export.source_extras import (
    SourceRest,
    empty_model,
    export_extras,
    published,
    source_rest,
    with_own_code,
)
from megatrain_ray.io.chat.template_ending import EndMarks, find_end_marks
from megatrain_ray.io.checkpoints.quantisation import without_quantisation
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import MARK_NAME, FolderKind, OwnedFolder
from megatrain_ray.io.files.partial_folder import remove_abandoned
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import list_saves, load_manifest, save_folder
from megatrain_ray.io.tokens.byte_tokenizer import write_byte_tokenizer
from megatrain_ray.io.tokens.tokenizer import holds_tokenizer
from megatrain_ray.model.architecture import Architecture, is_known, is_reward_model
from megatrain_ray.model.open_model import open_model
from megatrain_ray.run.best_evaluation import best_evaluation
from megatrain_ray.run.run_files import RunFiles

SaveChoice = int | Literal["best"] | None  # of a step; with the least held-out loss; the newest
MAX_TRIES = 5
NO_EOS_TOKEN = "{%- set eos_token = '' -%}\n"  # begins a template


def export_run(
    run_dir: Path, out_dir: Path, dtype: str | None, *, merge: bool = False, step: SaveChoice = None,
    extras: bool = True,
) -> int:  # fmt: skip
    """Export a save of a run and return its step.

    The tokenizer's files go with the weights. Of a run with `lora` only the adapters are exported, or, with `merge`,
    the model with the adapters added to its weights.

    dtype: bf16, fp32, or None for the working copy's.
    step: of the save; "best": that with the least held-out loss; None: the newest.
    extras: keep tensors and files of the folder that the run began with which belong to no part of the trained model.

    Raises ConfigError for a folder that holds no run or no such save, for an OUT_DIR that is in use, and for `merge` of
    a run without adapters; MegatrainError for a damaged save. OUT_DIR appears complete or not at all.
    """
    files = RunFiles(run_dir.absolute())
    config = files.read_config()
    if merge and config.lora is None:
        raise ConfigError(f"--merge: {run_dir} trained the model itself and has no adapters; leave --merge out")
    chosen = ExportDtype(dtype) if dtype else None
    for _ in range(MAX_TRIES):
        number = choose_save(files, step)
        try:
            _export(files, number, out_dir, chosen, config, merge=merge, extras=extras)
            return number
        except MegatrainError:
            if number in list_saves(files.saves):
                raise
            then = ": taking the next one" if step is None else ""
            say(f"the save of step {number} was deleted by the run that goes on before it was read{then}")
    raise MegatrainError(
        f"{MAX_TRIES} saves were deleted before they were read: set a larger save_keep or save_every, or export when "
        "the run is over"
    )


def choose_save(files: RunFiles, step: SaveChoice) -> int:
    """Return the step of the save that `step` means, as in export_run. Raises ConfigError if there is no such save."""
    saves = list_saves(files.saves)
    if not saves:
        raise ConfigError(f"{files.path} holds no save yet: train until one is made (save_every), then export")
    chosen = saves[-1] if step is None else files.best_save if step == "best" else step
    there = f"its saves are of steps {', '.join(map(str, saves))}" if saves[1:] else f"its save is of step {saves[0]}"
    if chosen is None:
        raise ConfigError(f"no save of {files.path} was evaluated; {there}; save_best: true keeps the best one")
    best = best_evaluation(files.evaluations()) if step == "best" else None
    if best and best["step"] != chosen:
        say(
            f"warning: eval_loss was least after step {best['step']}, {best['eval_loss']:.4f}, but that save is not "
            f"kept (save_best: true keeps it): this is the one of step {chosen}"
        )
    if chosen not in saves:
        raise ConfigError(f"{files.path} holds no save of step {chosen}; {there}; save_keep keeps more")
    return chosen


@contextmanager
def exported(run_dir: Path, dtype: str | None = None, step: SaveChoice = None, *, merge: bool = True) -> Iterator[Path]:
    """Export a save of a run to a folder that lasts as long as the block.

    step: as in export_run.
    merge: of a run with `lora`: export the model with its adapters added in, not the adapters.

    The folder is in the run's directory, which needs room for it. If the process is killed, the next export of this
    kind deletes what is left. Raises as export_run.
    """
    merge = merge and RunFiles(run_dir.absolute()).read_config().lora is not None
    remove_abandoned(run_dir)
    with explained("write to", run_dir):
        holder = OwnedFolder.make(run_dir / f".export-{secrets.token_hex(4)}.partial", FolderKind.PARTIAL)
    try:
        export_run(run_dir, holder.path / "model", dtype, merge=merge, step=step, extras=False)
        yield holder.path / "model"
    finally:
        holder.remove()


def load_exported(folder: Path, **options: Any) -> Any:
    """Load an exported folder as a PreTrainedModel.

    options: arguments of from_pretrained in addition.

    Raises ConfigError for a model with code of its own, which is not run unless the user asks for it.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not is_known(settings["model_type"]):
        raise ConfigError(
            f"a {settings['model_type']} model comes with code of its own: export it, and load the folder with "
            "trust_remote_code=True"
        )
    return Architecture(settings).load(folder, **options)


def _export(
    files: RunFiles, step: int, out_dir: Path, dtype: ExportDtype | None, config: TrainConfig, *, merge: bool,
    extras: bool,
) -> None:  # fmt: skip
    manifest = load_manifest(files.saves, step)
    files.check_save(step, manifest)
    with _tokenizer_files(files, config, manifest) as tokenizer:
        _write(files, manifest, out_dir, dtype, config, tokenizer, merge=merge, extras=extras)


@contextmanager
def _tokenizer_files(files: RunFiles, config: TrainConfig, manifest: Manifest) -> Iterator[Sequence[Path]]:
    """Yield the files of the run's tokenizer, of which `bytes` has none until here, and of its chat template."""
    kept = files.tokenizer_files()
    if config.tokenizer != "bytes" or config.data.kind == "tokens":
        yield kept
        return
    texts = manifest.model.get("text_config") or manifest.model
    with scratch_folder("tokenizer") as folder:
        head = "" if config.data.add_eos else NO_EOS_TOKEN  # chats were rendered with or without an eos token
        for file in kept:
            (folder / file.name).write_text(head + file.read_text(encoding="utf-8"), encoding="utf-8")
        write_byte_tokenizer(folder, vocab_size=texts["vocab_size"])
        yield sorted(file for file in folder.iterdir() if file.name != MARK_NAME)


def _write(
    files: RunFiles, manifest: Manifest, out_dir: Path, dtype: ExportDtype | None, config: TrainConfig,
    tokenizer: Sequence[Path], *, merge: bool, extras: bool,
) -> None:  # fmt: skip
    folder, model, lora = save_folder(files.saves, manifest.step), config.model, config.lora
    if lora is not None and not merge:
        empty = empty_model(with_own_code(model, manifest), manifest)
        return export_adapter(folder, manifest, out_dir, dtype, lora, empty, model, tokenizer)
    chosen = dtype or (ExportDtype.BF16 if "residual" in manifest.itemsize else ExportDtype.FP32)
    needed = export_extras(model, manifest, chosen)
    code = published(needed.code, needed.code[0].parent) if needed.code else []
    written = {file.name for file in (*tokenizer, *needed.code)}
    source = source_rest(files, config, needed, chosen, written) if extras else SourceRest()
    copies, rest = [*tokenizer, *code, *source.files], [*needed.rest, *source.tensors]
    # Inference servers read the class here. A run that began with only model.config has no entry for it.
    settings = {
        **without_quantisation(manifest.model),
        "architectures": manifest.model.get("architectures") or [type(needed.model).__name__],
    }
    whole = replace(manifest, model=settings)
    has_tokenizer = bool(tokenizer) and holds_tokenizer(tokenizer[0].parent)
    marks = find_end_marks(tokenizer[0].parent, chats=config.data.has_chats) if has_tokenizer else None
    if is_reward_model(settings):
        whole = with_pad(whole, marks)
    elif marks is not None:
        whole = with_ends(whole, marks)
    if lora is None:
        return export_save(folder, whole, out_dir, dtype, copies=copies, names=needed.names, rest=rest)
    opened = open_model(model)
    base, empty = opened.weights(), build_empty(opened.factory, torch.float32)
    return export_merged(folder, whole, out_dir, dtype, lora, empty, base, names=needed.names, rest=rest, copies=copies)


def with_ends(manifest: Manifest, marks: EndMarks) -> Manifest:
    """Return the manifest with settings by which generation stops where the texts that the model learned end.

    The ends that the model came with stay if they are marks of its tokenizer. Where nobody named any, Transformers
    writes the default of the model's class into both files, which may be any piece of text.
    """
    generation, model = dict(manifest.generation_config or {}), manifest.model
    named = [*listed_ids(generation.get("eos_token_id")), *listed_ids(model.get("eos_token_id"))]
    ends = list(dict.fromkeys([*marks.ends, *(end for end in named if end in marks.marks)]))
    if not ends:
        return manifest
    generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if generation.get("pad_token_id") is None and marks.pad is not None:
        generation["pad_token_id"] = marks.pad
    if "text_config" not in model:
        model = {**model, "eos_token_id": generation["eos_token_id"]}
    return replace(manifest, model=model, generation_config=generation)


def with_pad(manifest: Manifest, marks: EndMarks | None) -> Manifest:
    """Return the manifest of a reward model with the pad token of its tokenizer.

    Transformers scores the last token that is no pad. So a pad that ends answers is left out: several rows at once are
    then refused, and not scored at other tokens than the run has scored.

    marks: of the tokenizer; None: the run had none.
    """
    model = dict(manifest.model)
    texts = model
    if "text_config" in model:
        texts = model["text_config"] = dict(model["text_config"])
    if marks is not None:
        texts["pad_token_id"] = None if not marks.text and marks.pad in marks.ends[:1] else marks.pad
        if texts["pad_token_id"] is None:
            say(
                "note: the tokenizer pads with the token that ends answers, so config.json names no pad: score one "
                "answer at a time, or give the tokenizer and config.json a pad token that ends none"
            )
    return replace(manifest, model=model, generation_config=None)


def listed_ids(ids: int | list[int] | None) -> list[int]:
    """Return the ids of a setting, which may have one or none, as a list."""
    return [] if ids is None else ids if isinstance(ids, list) else [ids]
