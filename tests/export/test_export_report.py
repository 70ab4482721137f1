"""What an export says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.errors import ConfigError
from megatrain_ray.export import export
from megatrain_ray.export.describe_export import describe_export
from megatrain_ray.io.checkpoints.write_checkpoint import ExportDtype, ExportTensor, write_model_folder
from megatrain_ray.run.run_files import RunFiles


def tensor(name: str, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> ExportTensor:
    return ExportTensor(name, shape, lambda: [memoryview(bytes(num_bytes))], dtype)


def test_weights_files_and_what_comes_next(tmp_path: Path) -> None:
    out, tokenizer = tmp_path / "my out", tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    tensors = [tensor("a", 1200, (2, 300)), tensor("b", 800, (400,)), tensor("c", 16, (2,), torch.int64)]
    write_model_folder(out, tensors, ExportDtype.BF16, {"model_type": "x"}, file_bytes=1300, copies=[tokenizer])
    first, *files, look, load, train = describe_export(out, 7)
    total = sum(file.stat().st_size for file in out.iterdir()) / 1024
    assert first == (
        f"exported the save of step 7 to {out}: 3 tensors, 1.00k parameters, BF16 and I64, {total:.2f} KiB"
    )
    assert [line.split()[0] for line in files] == sorted(file.name for file in out.iterdir())
    assert len(files) == 5
    assert files[0].split(maxsplit=1)[1] == f"{(out / 'config.json').stat().st_size} B"
    assert look == f"next  megatrain generate '{out}' \"PROMPT\" for a look; with --chat if it learned chats"
    assert load == f'      AutoModelForCausalLM.from_pretrained("{out}") in Transformers; AutoTokenizer as well'
    assert f"model.path: {out} in" in train
    (out / "tokenizer.json").unlink()
    assert "no tokenizer: the run had none but ids" in list(describe_export(out, 7))[-2]


@pytest.mark.parametrize(("saves", "there"), [([4], "its save is of step 4"), ([4, 6], "its saves are of steps 4, 6")])
def test_a_save_that_is_missing_is_told_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[int], there: str
) -> None:
    monkeypatch.setattr(export, "list_saves", lambda folder: saves)
    with pytest.raises(ConfigError, match=f"holds no save of step 3; {there}; save_keep keeps more"):
        export.choose_save(RunFiles(tmp_path), 3)
