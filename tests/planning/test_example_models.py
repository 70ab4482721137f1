"""examples/models/: each configuration loads, and plans for the card that its comment names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.engine.device.cards import cards
from megatrain_ray.planning.run_spec import planning_problem
from tests.support.families import FAMILIES
from tests.support.runs import ROOT

FAMILY = {
    "qwen3_8b": "Qwen3", "llama3.1_8b": "Llama", "gemma3_4b": "Gemma 3, vision-language", "mistral_nemo_12b": "Mistral",
    "gpt_oss_20b": "GPT-OSS",
}  # fmt: skip


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "models").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_plans_a_small_model_of_its_family(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    named = re.search(r"(hardware\.profile=(\w+)) (hardware\.ram_limit=\w+)$", file.read_text(), flags=re.MULTILINE)
    assert named is not None
    config = load_config(
        file, [named[1], named[3], "hardware.compile=false", "data.tokenizer=bytes", "data.seq_len=16"]
    )
    assert Path(str(config.data.path)).is_file()
    tiny = config.model.model_copy(update={"path": None, "config": FAMILIES[FAMILY[file.stem]].config})
    plan = planning_problem(config.model_copy(update={"model": tiny})).plan()
    assert plan.prediction is not None
    assert plan.prediction.rates.startswith(cards()[named[2]].gpu)
    assert (plan.num_trained < plan.num_parameters) == (config.lora is not None)
