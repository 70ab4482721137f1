"""Preferences and labelled answers of both tools: objective, numbers and data, and what of them has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.convert.convert_config import convert
from tests.support.other_tools import AXOLOTL, LLAMA_FACTORY

HUB = {"dataset_dir": "ONLINE", "dataset": "owner/answers"}


def data_of(kind: str, **keys: Any) -> dict[str, Any]:
    return {"datasets": [{"path": "owner/answers", "type": kind, **keys}]}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dpo": (
        LLAMA_FACTORY,
        HUB | {"stage": "dpo", "pref_beta": 0.2, "dpo_label_smoothing": 0.1, "pref_ftx": 0.5, "ref_model": "other"},
        {
            "objective": "dpo", "preference": {"beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.5},
            "reference": "other",
        },
    ),
    "simpo": (
        LLAMA_FACTORY,
        HUB | {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.0, "ref_model": "other"},
        {"objective": "simpo", "preference": {"beta": 2.0, "gamma": 1.0}, "reference": None},
    ),
    "orpo": (
        LLAMA_FACTORY,
        HUB | {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.3, "dpo_label_smoothing": 0.1, "simpo_gamma": 1.0},
        {"objective": "orpo", "preference": {"beta": 0.3}},
    ),
    "kto": (
        LLAMA_FACTORY,
        HUB | {"stage": "kto", "pref_loss": "ipo", "kto_chosen_weight": 0.5, "kto_rejected_weight": 2.0},
        {"objective": "kto", "preference": {"desirable_weight": 0.5, "undesirable_weight": 2.0}},
    ),
    "rm": (
        LLAMA_FACTORY,
        HUB | {"stage": "rm", "pref_beta": 0.2, "pref_ftx": 0.5, "ref_model": "other"},
        {"objective": "reward", "preference": None, "reference": None},
    ),
    "sft": (LLAMA_FACTORY, HUB | {"pref_beta": 0.2, "pref_loss": "ipo"}, {"objective": None, "preference": None}),
    "Axolotl, dpo": (
        AXOLOTL,
        data_of("chatml.intel") | {"rl": "dpo", "rl_beta": 0.2, "dpo_label_smoothing": 0.1, "rpo_alpha": 0.5},
        {"objective": "dpo", "preference": {"beta": 0.2, "label_smoothing": 0.1, "sft_weight": 0.5}},
    ),
    "Axolotl, ipo": (
        AXOLOTL,
        data_of("chat_template.argilla_chat", field_chosen="chosen") | {"rl": "ipo", "cpo_alpha": 0.5},
        {"objective": "ipo", "preference": None},
    ),
    "Axolotl, simpo": (
        AXOLOTL,
        data_of("passthrough") | {"rl": "simpo", "simpo_gamma": 1.0},
        {"objective": "simpo", "preference": {"gamma": 1.0, "sft_weight": 1.0}},
    ),
    "Axolotl, simpo alone": (
        AXOLOTL,
        data_of("passthrough") | {"rl": "simpo", "cpo_alpha": 0.0},
        {"objective": "simpo", "preference": None},
    ),
    "Axolotl, orpo": (
        AXOLOTL,
        data_of("chat_template.argilla") | {"rl": "orpo", "orpo_alpha": 0.2},
        {"objective": "orpo", "preference": {"beta": 0.2}},
    ),
    "Axolotl, reward model": (
        AXOLOTL,
        data_of("bradley_terry.chat_template")
        | {
            "reward_model": True, "num_labels": 1, "model_type": "AutoModelForSequenceClassification",
            "center_rewards_coefficient": 0.01,
        },
        {"objective": "reward", "preference": {"center_rewards_coefficient": 0.01}},
    ),
    "Axolotl, kto": (
        AXOLOTL,
        data_of("llama3.ultra") | {"rl": "kto", "kto_desirable_weight": 0.2},
        {"objective": "kto", "preference": {"desirable_weight": 0.2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_objective_and_numbers(tmp_path: Path, name: str) -> None:
    text, changes, expected = CASES[name]
    lora = (
        {"finetuning_type": "lora"}
        if text == LLAMA_FACTORY
        else {"adapter": "lora", "lora_r": 8, "lora_target_linear": True}
    )
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), **lora, "lora_dropout": 0.1, "max_steps": 9, **changes}))
    found = convert(path)
    assert not found.refused, found.report
    tree = yaml.safe_load(found.text)
    assert {key: tree["train"].get(key) for key in expected} == expected
    kind = {"kto": "unpaired", None: "sft"}.get(expected["objective"], "pairs")
    # Both answers of a preference have the length that each has there. Those trainers turn dropout off.
    assert (tree["data"]["kind"], tree["data"]["seq_len"]) == (kind, 400 if kind == "pairs" else 200)
    assert tree["data"]["packing"] is False
    assert tree["lora"].get("dropout") == (0.1 if name in ("sft", "rm") else None)


@pytest.mark.parametrize(
    ("text", "changes", "line"),
    [
        (LLAMA_FACTORY, HUB | {"stage": "dpo", "pref_loss": "kto_pair"}, "pref_loss: kto_pair: of preferences and"),
        (LLAMA_FACTORY, HUB | {"stage": "kto", "pref_ftx": 0.5}, "pref_ftx: 0.5: is not added to kto here"),
        (
            AXOLOTL,
            data_of("chatml.intel") | {"reward_model": True},
            "datasets: owner/answers: type: chatml.intel: is not",
        ),
        (
            AXOLOTL,
            data_of("bradley_terry") | {"rl": "dpo"},
            "datasets: owner/answers: type: bradley_terry: is not here",
        ),
        (
            AXOLOTL,
            data_of("bradley_terry") | {"reward_model": True, "num_labels": 2},
            "num_labels: 2: a reward model has",
        ),
        (
            AXOLOTL,
            data_of("user_defined.default") | {"rl": "dpo"},
            "datasets: owner/answers: type: user_defined.default: is not here; expected one of chat_template, orpo,",
        ),
        (
            AXOLOTL,
            data_of("chat_template.default", field_chosen="good") | {"rl": "dpo"},
            "datasets: owner/answers: field_chosen: 'good': cannot be followed",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, text: str, changes: dict[str, Any], line: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(text), **changes}))
    found = convert(path)
    assert found.refused and not found.text
    assert f"\n  {line}" in "\n".join(found.report)


def test_what_has_no_effect_or_another_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    changes = HUB | {"stage": "kto", "simpo_gamma": 1.0, "ref_model": "other", "lora_dropout": 0.1}
    path.write_text(yaml.safe_dump({**yaml.safe_load(LLAMA_FACTORY), **changes, "finetuning_type": "lora"}))
    report = "\n".join(convert(path).report)
    for line in (
        "lora_dropout: there is none, as in those trainers of preferences",
        "stage: KL is of a whole step, and of answers to the records before",
        "simpo_gamma: of simpo",
    ):
        assert f"\n  {line}" in report
