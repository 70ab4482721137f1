"""Exit codes and messages of the command line where something is wrong, found before torch or Ray is imported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatrain_ray
from megatrain_ray.cli import main
from megatrain_ray.commands.run_command import COMMANDS
from megatrain_ray.errors import CapacityError, InterruptedRunError, MegatrainError
from tests.support.settings import settings


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(run_dir=str(tmp_path / "run"))))
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stepz=1"], "train.stepz: unknown key; did you mean train.steps?"),
        (["train.lr=fast"], "train.lr: expected a number, got 'fast'"),
        (["model.config={hidden_size: 8}"], "model.path and model.config are both set"),
        (
            ["hardware.num_gpus=2", "hardware.cuda_graphs=true"],
            "hardware.cuda_graphs: true goes with one GPU so far, and hardware.num_gpus is 2; leave one of the two out",
        ),
        (["train.lr"], "override 'train.lr': expected key=value"),
        (["train.steps=1" + 400 * "0"], "train.steps: expected at most 2147483647, got 10"),
        (["train.steps=null", "train.epochs=1e300"], "train.epochs: expected at most 1048576, got 1e+300"),
        (["train.batch_size=1048577"], "train.batch_size: expected at most 1048576, got 1048577"),
        (["hardware.ram_limit=" + 400 * "9"], "hardware.ram_limit: expected at most 1152921504606846976"),
        ([r'run_dir="a\0b"'], "run_dir: expected a text without a NUL character"),
        (["model.config=null", "model.path=" + 5000 * "a"], "too long for the name of a file"),
        (["log.mlflow=true"], "log.mlflow: expected text (in quotes where it looks like something else), got true. "),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_wrong_setting_is_one_line_and_exit_2(
    file: str, command: str, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, file, *overrides]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in Path(file).parent.iterdir()) == ["run.yaml"]


def test_options_and_overrides_may_come_in_any_order(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--json", file, "a=1", "b=2"], [file, "--json", "a=1", "b=2"], [file, "a=1", "--json", "b=2"]):
        assert main(["plan", *arguments]) == 2
        err = capsys.readouterr().err
        assert "a: unknown key" in err
        assert "b: unknown key" in err


def test_a_missing_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train"],
        ["plan", "x", "--fast"],
        ["bench", "x", "--steps", "many"],
        ["inspect", "x", "a=1"],
        ["export", "x", "y", "--dtype", "fp8"],
        ["generate", "x", "p", "--top-p", "2"],
        ["generate", "x", "p", "--max-new-tokens", "0"],
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("arguments", [["inspect"], ["report"], ["generate"], ["eval"], ["logprobs", "x", "--model"]])
def test_a_mirror_is_to_be_exported_first(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "s3://bucket/run"])
    assert caught.value.code == 2
    assert "expected no URL; next: megatrain export URL OUT_DIR, which writes a save" in capsys.readouterr().err


def test_the_usage_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "x", "y", "--fast"])
    assert capsys.readouterr().err.startswith("usage: megatrain export ")


@pytest.mark.parametrize(
    "option", [["--learning_rate", "1e-4"], ["--learning-rate=1e-4"], ["--train.lr", "1e-4"], ["--lr=1e-4"]]
)
def test_an_option_that_is_a_setting_is_shown_as_one(
    file: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["train", file, *option])
    assert capsys.readouterr().err.endswith("; settings are written as key=value: train.lr=1e-4\n")


def test_what_is_missing_is_the_configuration_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: CONFIG\n")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "train, or resume the run in run_dir" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "bench"])
def test_a_wrong_key_is_reported_without_torch_or_ray(command: str, file: str) -> None:
    code = (
        "import sys\nfrom megatrain_ray.cli import main\n"
        f"assert main([{command!r}, {file!r}, 'train.stepz=1']) == 2\n"
        "assert not {'ray', 'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_module_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatrain_ray", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path} holds no run")
    assert "Traceback" not in done.stderr


def buffered() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_a_reader_that_goes_ends_a_command_quietly(arguments: list[str]) -> None:
    """A reader goes as in `megatrain doctor | head -1`; here it is gone before the first line."""
    command = [sys.executable, "-m", "megatrain_ray", *arguments]
    end, out = os.pipe()
    os.close(end)
    try:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=buffered(), check=False)
    finally:
        os.close(out)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_that_is_full_is_told_in_one_line() -> None:
    command = [sys.executable, "-m", "megatrain_ray", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=buffered(), check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "full"), "full; free some room there, or name another folder"),
        (OSError(errno.EMFILE, "many", "/a"), "/a: many; raise the limit (ulimit -a)"),
        (FileNotFoundError(errno.ENOENT, "none in ['/tmp']"), "none in ['/tmp']; free some room there, or set TMPDIR"),
    ],
)
def test_what_the_machine_refuses_is_one_line_wherever_it_happens(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, told: str
) -> None:
    def fail(options: Any) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "plan", fail)
    assert main(["plan", file]) == 1
    assert capsys.readouterr().err == f"error: {told}\n"


def test_a_broken_pipe_that_is_not_the_output_is_no_silence(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any) -> int:
        raise BrokenPipeError("a tracker's socket")

    monkeypatch.setitem(COMMANDS, "train", fail)
    monkeypatch.setattr("megatrain_ray.cli.is_unread", lambda stream: False)
    with pytest.raises(BrokenPipeError):
        main(["train", file])


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (MegatrainError("a shard died"), 1),
        (CapacityError("needs 2 TiB"), 3),
        (InterruptedRunError("saved at step 3"), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_a_run_raises_decides_the_exit_code(
    file: str,
    error: BaseException,
    exit_code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(config: Any) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "train", fail)
    assert main(["train", file]) == exit_code
    ends = exit_code == InterruptedRunError.exit_code
    told = str(error) or "interrupted: nothing more was saved; the same command starts again"
    assert capsys.readouterr().err == f"{'' if ends else 'error: '}{told}\n"


def test_the_package_and_its_metadata_have_one_version(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert megatrain_ray.__version__ == project["version"]
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatrain-ray {project['version']}\n"


def test_exports_are_lazy() -> None:
    code = (
        "import sys, megatrain_ray\nassert not hasattr(megatrain_ray, 'nothing') and 'pydantic' not in sys.modules\n"
        "import megatrain_ray.config.schema\nassert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_directory_in_the_place_of_a_model_is_named(
    file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "earlier" / "saves").mkdir(parents=True)
    assert main(["plan", file, "model.config=null", f"model.path={tmp_path / 'earlier'}"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'earlier'} is a run directory: megatrain export makes a model's folder of it" in error
