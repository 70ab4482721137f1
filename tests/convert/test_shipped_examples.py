"""The example files that both tools ship: which convert, what is warned about, and that what comes out trains.

tests/data/other_tools.yaml holds them by repository and path@commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatrain_ray.cli import main
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.convert.convert_config import Conversion, convert
from tests.support.chat_fixtures import FAMILIES, build
from tests.support.in_process import Train
from tests.support.runs import ROOT, rows
from tests.support.tiny import build_tiny

SHIPPED: dict[str, dict[str, Any]] = {
    path.partition("@")[0]: settings
    for files in yaml.safe_load((Path(__file__).parents[1] / "data" / "other_tools.yaml").read_text()).values()
    for path, settings in files.items()
}
REFUSED = {
    "examples/train_lora/qwen3vl_lora_sft.yaml": "image_max_pixels: the model's own processor sets the size",
    "examples/train_qlora/qwen3_lora_sft_otfq.yaml": "quantization_bit: a quantised base is not trained",
    "examples/extras/dft/qwen2_full_sft.yaml": "use_dft_loss: the loss is cross-entropy",
    "examples/llama-3/qlora-1b.yml": "adapter: qlora: adapters are plain LoRA pairs beside an unquantised base",
    "examples/llama-3/qlora-1b-kto.yaml": "adapter: qlora: adapters are plain LoRA pairs beside an unquantised base",
    "examples/mistral/mistral-qlora-orpo.yml": "adapter: qlora: adapters are plain LoRA pairs beside an unquantised",
    "examples/llama-3/fft-8b-liger-fsdp.yaml": "datasets: mlabonne/FineTome-100k: split: train[:20%]: give the split",
}
MEDIA = {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}}
ANSWERS = {
    "formatting": "sharegpt", "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}  # fmt: skip
LABELS = {
    "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}  # fmt: skip
FACTS = [{"instruction": f"question {n}", "input": "", "output": f"answer {n}"} for n in range(24)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the data sets that LLaMA-Factory's examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    info = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"},
        "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
        "mllm_demo": {"file_name": "mllm_demo.json", **MEDIA},
        "dpo_en_demo": {"file_name": "dpo_en_demo.json", "ranking": True, **ANSWERS},
        "kto_en_demo": {"file_name": "kto_en_demo.json", **LABELS},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    for name in ("identity", "alpaca_en_demo"):
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(FACTS))
    return tmp_path


def converted(name: str, *overrides: str) -> Conversion:
    Path("theirs.yaml").write_text(yaml.safe_dump(SHIPPED[name], sort_keys=False))
    return convert(Path("theirs.yaml"), overrides)


def test_what_is_shipped_converts(folder: Path) -> None:
    """All but those that cannot be followed, for a reason that is told. The page has their numbers."""
    for name in SHIPPED:
        found = converted(name)
        if name in REFUSED:
            assert not found.text
            assert any(line.startswith(f"  {REFUSED[name]}") for line in found.report), found.report
            continue
        assert not found.refused, (name, found.report)
        (folder / "ours.yaml").write_text(found.text)
        config = load_config(folder / "ours.yaml")
        assert config.train.epochs or config.train.steps
    page = (ROOT / "docs" / "convert.md").read_text()
    counts = f"Of {len(SHIPPED)} example files that the tools ship {len(SHIPPED) - len(REFUSED)} convert"
    assert f"{counts}, and {len(REFUSED)} are refused" in page


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "examples/train_full/llama3_full_sft.yaml",
            ("data.seq_len=200", "train.epochs=0.5"),
            {"kind": "sft", "eval_fraction": 0.1},
        ),
        (
            "examples/llama-3/lora-1b.yml",
            ("data.path=data/identity.json", "data.seq_len=200", "train.epochs=5"),
            {"kind": "sft", "chat_format": "alpaca", "eval_fraction": 0.1},
        ),
    ],
)
def test_what_comes_out_trains(
    folder: Path, name: str, changes: tuple[str, ...], expected: dict[str, Any], train: Train
) -> None:
    build(build_tiny(folder / "model", vocab_size=320), FAMILIES["qwen2.5"])
    local = ("model.path=model", "run_dir=run", "hardware.device=cpu", "train.precision=fp32", "log.prometheus=false")
    (folder / "ours.yaml").write_text(converted(name, *changes, *local).text)
    config = load_config(folder / "ours.yaml")
    assert {key: getattr(config.data, key) for key in expected} == expected
    assert main(["plan", "ours.yaml"]) == 0
    result = train("ours.yaml")
    assert result.returncode == 0, result.stderr
    made = rows(folder / "run")
    assert made[0]["lr"] == 0.0  # Transformers' first step
    evaluated = [
        json.loads(line)["eval_loss"] for line in (folder / "run" / "evaluations.jsonl").read_text().splitlines()
    ]
    assert evaluated[-1] < evaluated[0]
