"""A run directory: atomic, checked before anything is written, and gone where nothing was."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.yaml_file import config_to_dict
from megatrain_ray.errors import CapacityError, ConfigError
from megatrain_ray.io.chat.chat_template import PLAIN, read_named_template
from megatrain_ray.io.files.owned_folder import MARK_NAME
from megatrain_ray.io.files.partial_folder import complete_or_absent
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import load_manifest, prepare_save
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from megatrain_ray.run.run_dir import RunDir
from megatrain_ray.run.run_files import RunFiles
from tests.support.partial_folders import killed_while_writing
from tests.support.planned_steps import PROFILE, planned
from tests.support.run_folders import begin, content, in_folder, refusal, row, train
from tests.support.saves import make_manifest, make_state, write_save


def test_a_run_is_its_resolved_configuration_and_its_plan(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    begin(folder, train__micro_batch_size=2, train__accumulate=3)
    assert sorted(content(folder)) == ["config.yaml", "lock", "logs", "owner.json", "plan.json", "saves"]
    stored = RunFiles(folder).read_config()
    assert (stored.train.batch_size, stored.train.micro_batch_size, stored.train.accumulate) == (6, 2, 3)
    assert stored.data.tokenizer == "model"
    assert content(folder)["plan.json"] == "{}\n"


def kept(folder: Path, **data: Any) -> dict[str, str]:
    """Return the files that the run keeps of its tokenizer, by name."""
    with RunDir.open(in_folder(folder, **{f"data__{key}": value for key, value in data.items()})) as run:
        run.begin("{}", 0)
        run.keep_tokenizer()
        run.keep_tokenizer()
    files = content(folder / "tokenizer") if (folder / "tokenizer").exists() else {}
    assert not files or files.pop(MARK_NAME)
    return files


def test_a_tokenizer_without_tokenizer_json_is_kept_so_that_it_needs_no_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (model / "merges.txt").write_text("#version: 0.2\na b\n")
    (model / "config.json").write_text('{"model_type": "gpt2"}')  # names the tokenizer's class
    (model / "spiece.model").write_text("pieces")
    assert kept(tmp_path / "run", tokenizer=str(model))["spiece.model"] == "pieces"
    for folder in (model, tmp_path / "run" / "tokenizer"):
        tokenizer = load_tokenizer(str(folder))
        assert (tokenizer.encode("aba").tolist(), tokenizer.end_of_document) == ([2, 0], 3)


def test_the_tokenizer_is_kept_with_the_template_that_chats_were_written_with(tmp_path: Path) -> None:
    own, base, file = tmp_path / "own", tmp_path / "base", tmp_path / "other.jinja"
    for folder in (own, base):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    (own / "chat_template.jinja").write_text("own")
    (own / "tokenizer.model").write_text("pieces")  # llama.cpp's converter reads nothing else of some models
    file.write_text("other")
    its_own = {"tokenizer.json": "{}", "tokenizer.model": "pieces", "chat_template.jinja": "own"}
    assert kept(tmp_path / "1", kind="sft", tokenizer=str(own)) == its_own
    assert kept(tmp_path / "2", kind="sft", tokenizer=str(own), chat_template=str(file)) == its_own | {
        "chat_template.jinja": "other"
    }
    plain = kept(tmp_path / "3", kind="sft", tokenizer=str(base))
    assert plain == {"tokenizer.json": "{}", "chat_template.jinja": read_named_template(PLAIN)}
    assert kept(tmp_path / "4", kind="sft", tokenizer="bytes") == {"chat_template.jinja": read_named_template(PLAIN)}
    assert kept(tmp_path / "5", tokenizer=str(base)) == {"tokenizer.json": "{}"}
    assert kept(tmp_path / "6", tokenizer="bytes") == {}
    (own / "additional_chat_templates").mkdir()
    (own / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (own / "additional_chat_templates" / "secret.jinja").symlink_to(file)  # leads out of the folder
    more = its_own | {"additional_chat_templates": "", "additional_chat_templates/tool_use.jinja": "tools"}
    assert kept(tmp_path / "7", kind="sft", tokenizer=str(own)) == more
    assert kept(tmp_path / "8", kind="sft", tokenizer=str(own), chat_template=str(file)).keys() == its_own.keys()


def test_a_resume_has_the_runs_split_and_its_own_other_settings(tmp_path: Path) -> None:
    train(tmp_path, train__micro_batch_size=2, train__accumulate=3)
    with RunDir.open(in_folder(tmp_path, train__batch_size=6, train__steps=99)) as run:
        assert run.config.split() == (2, 3)
        run.begin("{}", 0)
    assert RunFiles(tmp_path).read_config().train.steps == 99


def test_a_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunDir.open(in_folder(Path("run"))) as run:
        assert run.path == tmp_path / "run"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": False}, "resume is false, but {} holds a run; set resume: true, or choose another run_dir"),
        ({"train__seed": 1}, "{} holds a run with other settings; set them back, or choose another run_dir:\n"
                             "  train.seed: 0 -> 1"),
    ],
)  # fmt: skip
def test_a_refused_resume_changes_nothing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    train(tmp_path)
    before = content(tmp_path)
    assert refusal(in_folder(tmp_path, **changes)) == message.format(tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("changes", [{"resume": False}, {"train__seed": 1}, {"data__tokenizer": "other"}])
def test_a_start_that_made_no_step_may_be_made_again_with_other_settings(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(name)
    for settings in ({"data__tokenizer": "model"}, {"data__tokenizer": "model"} | changes):
        names = {key: str(tmp_path / value) if key == "data__tokenizer" else value for key, value in settings.items()}
        with RunDir.open(in_folder(tmp_path / "run", **names)) as run:
            run.begin("{}", 0)
            run.keep_tokenizer()
    assert RunFiles(tmp_path / "run").read_config().train.seed == changes.get("train__seed", 0)
    if "data__tokenizer" in changes:
        assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text() == "other"


@pytest.mark.parametrize(
    "damage", [b'{"step": 2, "lo\xf3s": 1.0}\n', b'{"step": "2"}\n', b'{"step": null}\n', b"[1]\n"]
)
def test_a_damaged_row_costs_no_more_than_itself(tmp_path: Path, damage: bytes) -> None:
    train(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage + (json.dumps(row(3)) + "\n").encode())
    assert [found["step"] for found in RunFiles(tmp_path).rows() if "loss" in found] == [1, 3]
    begin(tmp_path, step=2)
    assert [found["step"] for found in RunFiles(tmp_path).rows() if "loss" in found] == [1]


def test_resume_false_is_fine_in_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    begin(tmp_path, resume=False)
    assert RunFiles(tmp_path).holds_run


@pytest.mark.parametrize("error", [CapacityError("does not fit"), KeyboardInterrupt()])
def test_a_run_that_fails_before_it_begins_leaves_no_folder(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), RunDir.open(in_folder(tmp_path / "deep" / "run")):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with RunDir.open(in_folder(tmp_path)):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} on {platform.node()}\n"
    assert content(tmp_path) == {"notes.txt": "mine"}


def test_a_broken_configuration_in_the_folder_is_named(tmp_path: Path) -> None:
    train(tmp_path)
    (tmp_path / "config.yaml").write_text("train: [")
    assert refusal(in_folder(tmp_path)).startswith(f"{tmp_path / 'config.yaml'}, line 1, column 9: broken YAML")


def test_rows_are_strict_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with RunDir.open(in_folder(tmp_path)) as run:
        run.begin("{}", 0)
        run.append(row(1, loss=math.nan, grad_norm=math.inf, exposed_s={"h2d": -math.inf}))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "loss": None, "grad_norm": None, "exposed_s": {"h2d": None}}


def test_a_resume_cuts_the_rows_after_the_restored_step_and_a_torn_one(tmp_path: Path) -> None:
    with RunDir.open(in_folder(tmp_path)) as run:
        run.begin("{}", 0)
        for step in range(1, 5):
            run.append(row(step, loss=0.1 * step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [r["step"] for r in RunFiles(tmp_path).rows()] == [1, 2, 3, 4]
    begin(tmp_path, step=3)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:3]
    begin(tmp_path, step=0)
    assert RunFiles(tmp_path).rows() == []


def test_a_plan_that_rows_were_made_with_is_kept_beside_another_one(tmp_path: Path) -> None:
    first, second = planned(PROFILE), planned(PROFILE, num_micro_batches=2)
    with RunDir.open(in_folder(tmp_path)) as run:
        run.begin(second.to_json(), 0)
        run.begin(first.to_json(), 0)  # nothing was made with the other one
        assert not (tmp_path / "plans").exists()
        run.append(row(1, loss=0.1))
        run.begin(first.to_json(), 1)
        assert not (tmp_path / "plans").exists()
        run.begin(second.to_json(), 1)
    assert [path.name for path in (tmp_path / "plans").iterdir()] == [f"{first.sha256[:12]}.json"]
    files = RunFiles(tmp_path)
    assert files.read_plan() == files.read_plan(second.sha256) == second
    assert files.read_plan(first.sha256) == first
    assert files.read_plan("0" * 64) is None
    (tmp_path / "plan.json").write_text(second.to_json().replace("layers_outer", "micro_batches_outer"))
    assert files.read_plan(second.sha256) is None


@pytest.mark.parametrize("damaged", [b"", b"{", b"\xff\xfe\x00"], ids=["empty", "half", "no text"])
def test_a_damaged_plan_of_an_earlier_start_is_in_nobodys_way(tmp_path: Path, damaged: bytes) -> None:
    train(tmp_path)
    (tmp_path / "plan.json").write_bytes(damaged)
    assert RunFiles(tmp_path).read_plan() is None
    begin(tmp_path)
    assert (tmp_path / "plan.json").read_text() == "{}\n"


def test_a_resume_cuts_the_evaluations_after_the_restored_step(tmp_path: Path) -> None:
    with RunDir.open(in_folder(tmp_path)) as run:
        run.begin("{}", 0)
        assert run.last_evaluated == -1
        run.append(row(1))
        run.flush()
        for step in (0, 3, 6):
            run.append_evaluation({"step": step, "eval_loss": math.inf})
            run.flush()
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 9, "ev')
    begin(tmp_path, step=4)
    assert RunFiles(tmp_path).evaluations() == [{"step": 0, "eval_loss": None}, {"step": 3, "eval_loss": None}]
    assert RunFiles(tmp_path).last_evaluated == 3
    begin(tmp_path, step=0)
    assert RunFiles(tmp_path).evaluations() == [], "the settings of a run that made no step may change"


def test_reading_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run: config\.yaml is missing"):
        RunFiles(tmp_path).read_config()


def test_what_a_dead_run_left_half_done_is_deleted_and_named(tmp_path: Path) -> None:
    begin(tmp_path)
    left = [".plan.json.0123abcd.new", ".metrics.jsonl.0123abcd.new", ".trace_steps_1_2.json.gz.0123abcd.new"]
    kept = [
        "notes.new",
        "plan.json.new",
        ".plan.json.new",
        ".notes.0123abcd.new",
        ".hidden.partial/config.json",
        "saves/.nfs0001",
        "saves/step_4/manifest.json",
        "saves/step_6.damaged/part_0.m",
        "export/config.json",
    ]
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    killed_while_writing(tmp_path / "abandoned")
    (prepare_save(tmp_path / "saves", 8, RunFiles(tmp_path).read_token()) / "manifest.json.partial").touch()
    with RunDir.open(in_folder(tmp_path)) as run, complete_or_absent(tmp_path / "under_way"):
        assert set(run.clean()) == {tmp_path / name for name in (*left, "saves/step_8", ".abandoned.partial")}
        assert (tmp_path / ".under_way.partial").exists(), "an export that runs beside the training"
        assert run.clean() == []
    there = set(content(tmp_path))
    assert set(kept) <= there
    assert not there & {*left, "saves/step_8", ".abandoned.partial"}


def test_a_new_run_has_nothing_to_clean(tmp_path: Path) -> None:
    with RunDir.open(in_folder(tmp_path / "run")) as run:
        assert run.clean() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "report.html", "owner.json"])
def test_a_folder_with_files_that_no_run_wrote_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert f"holds {name}, and no run that has begun: nothing there is overwritten" in refusal(in_folder(tmp_path))
    assert content(tmp_path) == {name: "mine"}


@pytest.mark.parametrize("name", ["tokenizer", "inputs", "saves", "plans"])
def test_a_folder_with_folders_that_no_run_made_is_refused(tmp_path: Path, name: str) -> None:
    """Such as a tokenizer that its user trained there."""
    (tmp_path / name).mkdir()
    begin(tmp_path / "with_an_empty_one")
    (tmp_path / name / "file").write_text("mine")
    assert f"holds {name}, and no run that has begun" in refusal(in_folder(tmp_path))
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    assert f"holds {name}, and no run that has begun" in refusal(in_folder(tmp_path))
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


def test_a_start_that_made_no_step_is_no_hindrance(tmp_path: Path) -> None:
    begin(tmp_path)
    begin(tmp_path, train__lr=0.5)
    assert RunFiles(tmp_path).read_config().train.lr == 0.5


def test_a_file_is_replaced_and_not_what_a_link_of_its_name_leads_to(tmp_path: Path) -> None:
    train(tmp_path / "run")
    for name in ("plan.json", ".plan.json.0123abcd.new"):
        (tmp_path / name).write_text("mine")
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    with RunDir.open(in_folder(tmp_path / "run")) as run:
        run.clean()
        run.begin("{}", 0)
    assert (tmp_path / "plan.json").read_text() == (tmp_path / ".plan.json.0123abcd.new").read_text() == "mine"
    assert (tmp_path / "run" / "plan.json").read_text() == "{}"


def save_of(run: Path, step: int, **changes: Any) -> Manifest:
    """Return the manifest of a run's save.

    changes: of the configuration. `token`: replaces the run's own; a run without one is that of an earlier release.
    """
    token = changes.pop("token", RunFiles(run).read_token())
    settings = config_to_dict(in_folder(run, **changes).resolve())
    return replace(make_manifest([], step=step), run=token, config=settings)


def test_a_save_of_another_run_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    files = RunFiles(tmp_path / "a")
    files.check_save(4, save_of(tmp_path / "a", 4))
    with pytest.raises(ConfigError, match=r"a/saves/step_4 is the save of step 4 of the run in .*/b: move it away"):
        files.check_save(4, save_of(tmp_path / "b", 4))
    with pytest.raises(ConfigError, match=r"step_9 is the save of step 4 of the run in .*/a: move it away"):
        files.check_save(9, save_of(tmp_path / "a", 4))


def test_a_save_of_an_earlier_release_is_known_by_its_settings(tmp_path: Path) -> None:
    train(tmp_path)
    files = RunFiles(tmp_path)
    files.check_save(4, save_of(tmp_path, 4, token=None))
    with pytest.raises(ConfigError, match=r"step_4 is the save of .* \(train.seed: 7 -> 0\): move it away"):
        files.check_save(4, save_of(tmp_path, 4, token=None, train__seed=7))


def write_whole_save(run: Path, step: int, token: str, **changes: Any) -> None:
    """Write a save that was made with the settings of the run, and `changes`."""
    write_save(run / "saves", step, make_state("fp32"), "fp32", 1, token=token)
    settings = config_to_dict(in_folder(run, **changes).resolve())
    manifest = replace(load_manifest(run / "saves", step), config=settings)
    (run / "saves" / f"step_{step}" / "manifest.json").write_bytes(manifest.to_json())


def test_a_run_whose_mark_was_deleted_has_the_token_of_its_save(tmp_path: Path) -> None:
    train(tmp_path)
    token = RunFiles(tmp_path).read_token()
    assert token is not None
    write_whole_save(tmp_path, 1, token)
    (tmp_path / MARK_NAME).unlink()
    write_whole_save(tmp_path, 2, "another", train__seed=7)
    with pytest.raises(ConfigError, match=r"step_2 is the save of .* \(train.seed: 7 -> 0\): move it away"):
        RunFiles(tmp_path).check_save(2, load_manifest(tmp_path / "saves", 2))
    shutil.rmtree(tmp_path / "saves" / "step_2")
    begin(tmp_path, step=1)
    assert RunFiles(tmp_path).read_token() == token


@pytest.mark.parametrize("name", ["owner.json", "model.json"])
def test_a_first_start_that_was_killed_is_no_hindrance(tmp_path: Path, name: str) -> None:
    """Between its files; the mark comes first."""
    with RunDir.open(in_folder(tmp_path)) as run:
        run.claim()
        (tmp_path / name).write_text("")
    begin(tmp_path)


def test_saves_that_are_on_a_disk_which_is_not_mounted(tmp_path: Path) -> None:
    train(tmp_path / "run")
    (tmp_path / "run" / "saves").rmdir()
    (tmp_path / "run" / "saves").symlink_to(tmp_path / "away")
    assert "run/saves is no folder, or a link to none: is its disk mounted?" in refusal(in_folder(tmp_path / "run"))
    assert len(RunFiles(tmp_path / "run").rows()) == 1


@pytest.mark.parametrize("name", ["plan.json", "history.jsonl", "processes.json"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    with RunDir.open(in_folder(tmp_path / "run")) as run:
        run.begin("{}", 0)
        run.append({"step": 1, "loss": 2.0})
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).mkdir()
    assert f"run/{name} is a folder, and a run writes a file there" in refusal(in_folder(tmp_path / "run"))


def test_a_lock_that_no_run_wrote_is_left(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("mine")
    assert "lock is no lock of a run: move it away" in refusal(in_folder(tmp_path))
    assert (tmp_path / "lock").read_text() == "mine"
    (tmp_path / "lock").rename(tmp_path / "elsewhere")
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    assert "cannot write to" in refusal(in_folder(tmp_path))
    assert (tmp_path / "elsewhere").read_text() == "mine"


def test_missing_rows_are_found(tmp_path: Path) -> None:
    with RunDir.open(in_folder(tmp_path)) as run:
        run.begin("{}", 0)
        for step in (1, 2, 5, 6):
            run.append(row(step))
        assert run.missing_rows(6) == [3, 4]
        assert run.missing_rows(2) == []
