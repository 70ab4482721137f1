"""Reads and writes folders of LoRA adapters in the format of the peft library.

A folder holds adapter_config.json and adapter_model.safetensors. The names in the latter are those of the model's
parameters after the prefix `base_model.model.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.checkpoints.safetensors_folder import WeightFolder, equal_values
from megatrain_ray.io.checkpoints.write_checkpoint import ExportTensor, write_folder
from megatrain_ray.read_file import parse_json, regular_file

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Settings of peft which, when set, make the adapter compute something other than a plain pair.
OTHER_KINDS = (
    "use_rslora", "use_dora", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "lora_bias", "arrow_config",
    "target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "kasa_config",
    "monteclora_config", "velora_config",
)  # fmt: skip
# Values of peft's init_lora_weights that only make pairs and leave the base unchanged. The others (pissa, olora, …)
# subtract the pair's product from the base, and do so again whenever the adapter is loaded.
PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterFolder:
    """Reads adapters, and other parameters that were trained with them, by the names of the model's parameters."""

    path: Path
    rank: int
    alpha: float
    _weights: WeightFolder

    @staticmethod
    def open(path: Path) -> AdapterFolder:
        """Open an adapter folder. Raises ConfigError if it holds none, others than plain LoRA, or damaged ones."""
        file = path / CONFIG_NAME
        try:
            settings = parse_json(regular_file(file).read_bytes())
            kind, rank, alpha = settings["peft_type"], int(settings["r"]), float(settings["lora_alpha"])
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}; expected a folder of peft's format") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} describes no LoRA adapter: {type(error).__name__}: {error}") from None
        others = [key for key in OTHER_KINDS if settings.get(key)]
        if (init := settings.get("init_lora_weights")) not in PLAIN_INITS:
            others.append(f"init_lora_weights: {init}, which changes the base")
        if kind != "LORA" or others or settings.get("bias", "none") != "none":
            found = kind if kind != "LORA" else ", ".join([*others, f"bias: {settings.get('bias', 'none')}"])
            raise ConfigError(f"{file}: only plain LoRA without biases is trained, got {found}")
        return AdapterFolder(path, rank, alpha, WeightFolder.of_file(path / WEIGHTS_NAME))

    def check(
        self, shapes: Mapping[str, tuple[int, ...]], required: Sequence[str], tied: Mapping[str, str] | None = None
    ) -> None:
        """Check that the folder holds the parameters that will be trained.

        shapes: shapes of all trained parameters, by name.
        required: names that the folder must hold.
        tied: other names of shared parameters, each with the name in `shapes`.

        Raises ConfigError if the folder lacks a required parameter, holds one of another shape, one that is not
        trained, or other values of a shared parameter under its other name.
        """
        shapes = {**shapes, **{alias: shapes[name] for alias, name in (tied or {}).items()}}
        names = [name.removeprefix(PREFIX) for name in self._weights.names]
        untrained = sorted(set(names) - shapes.keys())
        if untrained:
            raise ConfigError(
                f"{self.path} holds {untrained[0]} (and {len(untrained) - 1} more), which would not be trained: is it "
                "of another model? Else let lora.match, train.trainable and, of a vision tower, train.vision reach it"
            )
        aliases = {alias: name for alias, name in (tied or {}).items() if alias in names}
        self._weights.check({PREFIX + name: shapes[name] for name in {*names, *required, *aliases.values()}})
        for alias, name in aliases.items():
            if not equal_values(self.read, alias, name, math.prod(shapes[name])):
                raise ConfigError(
                    f"{self.path} holds other values of {alias} than of {name}, which are one parameter of the model; "
                    "train them tied (peft: ensure_weight_tying), or merge the adapter and begin with that model"
                )

    def holds(self, name: str) -> bool:
        return PREFIX + name in self._weights.names

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter: 1-D, fp32. Raises as WeightFolder.read."""
        return self._weights.read(PREFIX + name, start, stop)


def write_adapter_folder(
    out_dir: Path, tensors: Sequence[ExportTensor], settings: Mapping[str, Any], copies: Sequence[Path] = ()
) -> None:
    """Write `settings` as adapter_config.json, the weights by the names of parameters, and copies of files.

    The folder appears when it is complete. Raises as write_model_folder.
    """
    named = [tensor._replace(name=PREFIX + tensor.name) for tensor in tensors]
    write_folder(out_dir, {CONFIG_NAME: settings}, {WEIGHTS_NAME: named}, copies)
