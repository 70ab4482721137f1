"""`megatrain export`: the newest save of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megatrain_ray.engine.export_save import export_save
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.export import ExportDtype
from megatrain_ray.io.save import list_saves, load_manifest, save_folder
from megatrain_ray.run_dir import RunFiles


def export_run(run_dir: Path, out_dir: Path, dtype: str | None) -> None:
    """`dtype`: bf16, fp32, or None for the working copy's. The tokenizer's files go with the weights.

    Raises ConfigError for a folder that holds no run or no save, and for an OUT_DIR that is in use; MegatrainError for
    a damaged save. OUT_DIR appears whole or not at all.
    """
    files = RunFiles(run_dir.absolute())
    files.read_config()
    chosen = ExportDtype(dtype) if dtype else None
    while True:
        saves = list_saves(files.saves)
        if not saves:
            raise ConfigError(f"{run_dir} holds no save yet: train until one is made (save_every), then export")
        step = saves[-1]
        try:
            folder, manifest = save_folder(files.saves, step), load_manifest(files.saves, step)
            return export_save(folder, manifest, out_dir, chosen, copies=files.tokenizer_files())
        except MegatrainError:
            if step in list_saves(files.saves):
                raise  # else the training that goes on has deleted it, and has made another one
