"""Translates what LLaMA-Factory and Axolotl set for preferences and labelled answers, once the tables are applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain_ray.config.objective_checks import KIND_OF_OBJECTIVE, OBJECTIVES_OF_KEY
from megatrain_ray.convert.key_tables import Findings, Table

TARGETS = {f"train.preference.{key}": objectives for key, objectives in OBJECTIVES_OF_KEY.items()}
LENGTHS = ("cutoff_len", "sequence_len")  # of each answer with its prompt
ADDED = {"simpo": "cpo_alpha", "dpo": "rpo_alpha", "ipo": "rpo_alpha"}  # Axolotl's weight of the cross-entropy


def translate_preferences(table: Table, found: Findings, tree: Mapping[str, Any]) -> None:
    """Set the objective, and what follows from it; drop settings that it has no use for.

    tree: the tool's configuration file.
    """
    settings = found.settings
    objective = _objective(settings)
    added = {name: settings.pop(name, None) for name in ("cpo_alpha", "rpo_alpha")}
    _drop_unused(table, found, tree, objective)
    if objective is None:
        return
    settings["train.objective"] = objective
    if table.tool == "Axolotl" and (weight := _added(objective, added, found)):
        settings["train.preference.sft_weight"] = weight
    settings["data.packing"] = False  # a row is then a record, and batch sizes there count records
    if KIND_OF_OBJECTIVE[objective] == "pairs":
        key = next(key for key in LENGTHS if key in table.sets)
        settings["data.seq_len"] *= 2
        found.otherwise[key] = "data.seq_len is of both answers together, so it is twice that"
    chosen_by = "stage" if table.tool != "Axolotl" else "reward_model" if objective == "reward" else "rl"
    if chosen_by == "stage" and objective == "reward":
        found.otherwise[chosen_by] = (
            "the head is linear, as in Transformers' …ForSequenceClassification, without a bias"
        )
    elif settings.pop("lora.dropout", 0.0):
        found.otherwise["lora_dropout"] = "there is none, as in those trainers of preferences, which turn dropout off"
    if objective == "kto":
        found.otherwise[chosen_by] = "KL is of a whole step, and of answers to the records before"
    if objective == "orpo" and table.tool == "Axolotl":
        found.otherwise[chosen_by] = "the cross-entropy is of the answer only; TRL's is of the prompt as well"


def _objective(settings: dict[str, Any]) -> str | None:
    """Return train.objective, of which `objective` may be set; None: it is of single tokens.

    LLaMA-Factory's stage sets the kind of data, or reward, and `objective` counts only for pairs.
    """
    named: str | None = settings.pop("objective", None)
    kind = settings.get("data.kind")
    if kind is None:  # of Axolotl
        return named
    if kind == "reward":
        settings["data.kind"] = KIND_OF_OBJECTIVE[kind]
        return "reward"
    return {"pairs": named or "dpo", "unpaired": "kto"}.get(kind)


def _drop_unused(table: Table, found: Findings, tree: Mapping[str, Any], objective: str | None) -> None:
    """Drop settings that the objective does not use, and note them; a weight of the cross-entropy is refused."""
    keys = {rule.target: key for key, rule in table.sets.items() if key in tree}
    for target, objectives in TARGETS.items():
        value = found.settings.get(target)
        # LLaMA-Factory smooths labels of dpo only, and its pref_ftx is added to every loss.
        counts = objective in objectives and not (target.endswith(".label_smoothing") and objective == "simpo")
        if value is None or counts:
            continue
        del found.settings[target]
        if value and objective not in (None, "reward") and target.endswith(".sft_weight"):
            found.refused.append(f"{keys[target]}: {value:g}: is not added to {objective} here")
        elif value:
            found.meaningless[keys[target]] = f"of {' or '.join(objectives)}"
    if objective in (None, "simpo", "orpo", "reward") and found.settings.pop("train.reference", None):
        found.meaningless[keys["train.reference"]] = "of an objective that compares with a reference"


def _added(objective: str, weights: Mapping[str, float | None], found: Findings) -> float:
    """Return the weight of the cross-entropy that Axolotl adds: TRL's default for simpo is 1."""
    name = ADDED.get(objective)
    found.meaningless |= {key: "of another objective" for key, value in weights.items() if value and key != name}
    if name is None:
        return 0.0
    value = weights[name]
    weight = value if value is not None else 1.0 if objective == "simpo" else 0.0
    if weight:
        found.otherwise[name] = (
            f"{weight:g} × the cross-entropy is a mean over an answer's tokens, then over answers, as "
            "train.preference.sft_weight; TRL's is a mean over all tokens of a micro-batch"
        )
    return weight
