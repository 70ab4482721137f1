"""Exports a run that trained adapters: the adapters in peft's format, or the model with the adapters merged in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from megatrain_ray.config.groups import ModelConfig
from megatrain_ray.config.train_groups import LoraConfig
from megatrain_ray.engine.model.lora import A_END, is_adapter, is_transposed, module_of
from megatrain_ray.engine.weights.export_save import export_tensors, owned, whole
from megatrain_ray.engine.weights.frozen_checksums import source_checksums
from megatrain_ray.engine.weights.lora_values import MergedValues, pairs_of
from megatrain_ray.engine.weights.saved_values import SavedValues
from megatrain_ray.engine.weights.weight_source import WeightSource
from megatrain_ray.io.checkpoints.hub import HUB_ID
from megatrain_ray.io.checkpoints.peft_adapter import write_adapter_folder
from megatrain_ray.io.checkpoints.weight_map import WeightMap
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype, ExportTensor, write_model_folder
from megatrain_ray.io.saves.manifest import Manifest, ParameterEntry
from megatrain_ray.model.architecture import REWARD_CLASS


def export_merged(
    save_folder: Path, manifest: Manifest, out_dir: Path, dtype: ExportDtype | None, lora: LoraConfig, model: nn.Module,
    base: WeightSource, *, names: WeightMap, rest: Sequence[ExportTensor], copies: Sequence[Path],
) -> None:  # fmt: skip
    """Write the model with the adapters merged into its weights as an ordinary Hugging Face folder.

    model: the model without LoRA pairs, on the meta device.
    base: its weights.

    The other arguments and the errors are as for export_save. Also raises ConfigError if `base` is not the run's base.
    """
    manifest.check_base(source_checksums(base, manifest))
    shapes = {p.name: p.shape for p in owned(manifest)}
    pairs = pairs_of(shapes, model)
    with SavedValues.open(save_folder, manifest) as saved:
        fp32 = {p.name for p in owned(manifest) if p.fp32}
        values, chosen = MergedValues(saved, base, pairs, lora.alpha / lora.rank, fp32), dtype or saved.dtype
        tensors = export_tensors(values, [p for p in owned(manifest) if not is_adapter(p.name)], chosen, names)
        write_model_folder(
            out_dir, [*tensors, *rest], chosen, manifest.model, manifest.generation_config, copies=copies
        )


def export_adapter(
    save_folder: Path, manifest: Manifest, out_dir: Path, dtype: ExportDtype | None, lora: LoraConfig, model: nn.Module,
    base: ModelConfig, copies: Sequence[Path],
) -> None:  # fmt: skip
    """Write the adapters, and whole parameters that were trained with them, as a folder that peft loads.

    base: settings of the base model, to which adapter_config.json refers.

    The other arguments are as for export_merged.
    """
    trained = [p for layer in manifest.layers for p in layer.parameters if p.start < layer.num_trained]
    beside = _with_aliases(manifest, whole(p for p in trained if p.tied_to is None and not is_adapter(p.name)))
    with SavedValues.open(save_folder, manifest) as saved:
        chosen = dtype or saved.dtype
        tensors = export_tensors(saved, [p for p in trained if is_adapter(p.name)], chosen, None)
        for name, parameter in beside.items():
            tensors += [t._replace(name=name) for t in export_tensors(saved, [parameter], chosen, None)]
        modules = [module_of(p.name) for p in trained if p.name.endswith(A_END)]
        settings = _settings(lora, model, base, modules, beside)
        write_adapter_folder(out_dir, tensors, settings, copies)


def _with_aliases(manifest: Manifest, parameters: Sequence[ParameterEntry]) -> dict[str, ParameterEntry]:
    """Return the parameters by all of their names.

    For peft, each module that holds a shared parameter has a copy of its own.
    """
    by_name = {p.name: p for p in parameters}
    tied = [p for layer in manifest.layers for p in layer.parameters if p.tied_to in by_name]
    return by_name | {p.name: by_name[p.tied_to] for p in tied if p.tied_to}


def _settings(
    lora: LoraConfig, model: nn.Module, base: ModelConfig, modules: Sequence[str], beside: Mapping[str, ParameterEntry]
) -> dict[str, Any]:
    """Return the contents of adapter_config.json, with the keys of peft's LoraConfig."""
    name, revision = _base_name(base)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if type(model).__name__.endswith(REWARD_CLASS) else "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _targets(model, modules),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in beside}) or None,
        "ensure_weight_tying": len({p.name for p in beside.values()}) < len(beside),
        "fan_in_fan_out": any(is_transposed(model.get_submodule(path)) for path in modules),
        "bias": "none",
    }


def _targets(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return target_modules for peft: the last parts of the paths if they match only these modules, else the paths."""
    last = {path.rpartition(".")[2] for path in paths}
    meant = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in last}
    return sorted(last if meant == set(paths) else paths)


def _base_name(base: ModelConfig) -> tuple[str | None, str | None]:
    """Return the name by which peft finds the base, and its revision on the hub."""
    if base.path is None or Path(base.path).exists():
        return base.path and str(Path(base.path).absolute()), None
    match = HUB_ID.fullmatch(base.path)
    return (match["repository"], match["revision"]) if match else (base.path, None)
