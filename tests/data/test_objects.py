"""Training a model object on a data set object: the same as on files, resumed, and read back."""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback

from megatrain_ray import Trainer
from megatrain_ray.data.python_objects import Objects
from megatrain_ray.driver.callbacks import Callbacks
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.tokens.train_bpe import special_tokens, train_bpe, write_tokenizer
from megatrain_ray.run.train_output import TrainOutput
from tests.support.in_process import Actors, Train
from tests.support.runs import config, losses, write_config
from tests.support.tiny import TEXT, build_tiny

WORDS = TEXT.read_bytes()
RECORDS = [
    {"input_ids": list(WORDS[at : at + 40]), "labels": [-100] * 9 + list(WORDS[at + 9 : at + 40])}
    for at in range(0, 2000, 40)
]


class Items:
    """A torch Dataset: items and a length, and no end of its own."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        record = self._records[index % len(self)]
        ids = torch.tensor(record["input_ids"])
        return UserDict({"input_ids": ids, "labels": np.array(record["labels"]), "length": object()})


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    tree = config(run_dir, Path("unused"), data__seq_len=32, train__batch_size=2, **changes)
    del tree["model"], tree["data"]["path"], tree["data"]["tokenizer"]
    return tree


class Recorder(TrainerCallback):
    """Records the calls, asks for a save and an evaluation after the first step, and stops after the third."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (state.max_steps, kwargs["processing_class"]) == (5, None)
        self.calls.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_evaluate = state.global_step == 1
        control.should_training_stop |= state.global_step == 3
        self.calls.append(("step", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **kwargs: Any) -> None:
        assert logs.keys() == {"loss", "grad_norm", "learning_rate", "epoch", "tokens_per_s"}
        assert (logs["learning_rate"], state.epoch) == (1e-3, logs["epoch"])
        self.losses.append(logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **kwargs: Any) -> None:
        assert metrics["perplexity"] > 1
        self.calls.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(("save", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise AssertionError

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert [row["loss"] for row in state.log_history if "loss" in row] == self.losses
        self.calls.append(("end", state.global_step))


def test_a_run_on_objects_is_that_on_files_and_goes_on(
    tmp_path: Path, actors: Actors, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records with labels, as tensors. A callback stops the first call; the second one, with new objects, goes on."""
    folder, recorder = build_tiny(tmp_path / "model"), Recorder()

    def trainer(records: Any, *callbacks: Any) -> Trainer:
        tree = settings(tmp_path / "run", train__steps=5, train__schedule="constant", train__lr=1e-3, eval_every=5)
        model = LlamaForCausalLM.from_pretrained(folder)
        model.generation_config.temperature = 0.5  # without do_sample, which Transformers does not save
        return Trainer(model, tree, train_dataset=records, eval_dataset=RECORDS[:4], callbacks=callbacks)

    def run(trainer: Trainer) -> TrainOutput:
        with actors():
            return trainer.train()

    with pytest.raises(ConfigError, match=r"evaluate: no run has begun in .*/run: call train\(\) first"):
        trainer(RECORDS).evaluate()
    assert run(trainer(Items(RECORDS), recorder)).global_step == 4, "step 4 was under way"
    told = capsys.readouterr().err
    assert "warning: callbacks: on_epoch_end of Recorder is never called here\n" in told
    assert "a callback ended the training after step 4, saved at step 4; the same command resumes\n" in told
    began, *steps, ended = [call for call in recorder.calls if call[0] != "save"]
    assert (began, ended) == (("begin", 0), ("end", 4))
    assert steps == [("evaluate", 0), ("step", 1), ("step", 2), ("evaluate", 2), ("step", 3), ("step", 4)]
    assert [call for call in recorder.calls if call[0] == "save"] == [("save", 3), ("save", 4)]
    written = (tmp_path / "run" / "inputs" / "train.jsonl").stat()
    second = trainer(RECORDS)
    output = run(second)
    assert (output.global_step, output.first_step, [row["step"] for row in output.rows]) == (5, 4, [1, 2, 3, 4, 5])
    assert output.training_loss == output.metrics["train_loss"] == np.mean(losses(tmp_path / "run"))
    assert output.metrics["eval_loss"] == output.evaluations[-1]["eval_loss"]
    assert (tmp_path / "run" / "inputs" / "train.jsonl").stat() == written
    capsys.readouterr()
    assert run(second) == replace(output, first_step=None), "a finished run"
    assert capsys.readouterr().out == f"already at step 5 of 5: nothing to do ({tmp_path / 'run'})\n"
    with actors():
        alone, others = second.evaluate(step=5), second.evaluate(RECORDS[4:6])
    assert alone["eval_loss"] == output.metrics["eval_loss"]
    assert (others["eval_tokens"], others["eval_loss"] != alone["eval_loss"]) == (2 * 24, True)

    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    files = settings(tmp_path / "files", train__steps=5, train__schedule="constant", train__lr=1e-3)
    files["model"] = {"path": str(folder)}
    files["data"] |= {"path": str(tmp_path / "a.jsonl"), "kind": "tokens"}
    done = train(str(write_config(tmp_path / "config.yaml", files)))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "files")

    exported = second.save_model(tmp_path / "out", "fp32")
    assert json.loads((exported / "generation_config.json").read_text())["temperature"] == 0.5
    loaded, read = second.load_model("fp32"), LlamaForCausalLM.from_pretrained(exported)
    assert type(loaded) is LlamaForCausalLM
    assert loaded.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), read.parameters(), strict=True))
    assert not list((tmp_path / "run").glob(".export-*"))

    with pytest.raises(ConfigError, match=r"record 3 is not that which the run began with .*train\.jsonl"):
        run(trainer(RECORDS[:2] + RECORDS[3:]))


@pytest.mark.parametrize(
    ("records", "kind", "line"),
    [
        ([{"text": "one", "other": object()}], "pretrain", {"text": "one"}),
        ([{"messages": [{"role": "user", "content": "q"}]}], "sft", {"messages": [{"role": "user", "content": "q"}]}),
        (Items(RECORDS), "tokens", RECORDS[0]),
        ([{"input_ids": (1, 2), "text": "x"}], "tokens", {"input_ids": [1, 2]}),
    ],
)
def test_records_are_recognised_and_written_as_files_have_them(
    tmp_path: Path, records: Any, kind: str, line: Any
) -> None:
    trainer = Trainer("model", settings(tmp_path / "run"), train_dataset=records, processing_class="bytes")
    assert trainer.config.data.kind == kind
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", trainer.config)
    with trainer._objects.written(run):  # type: ignore[arg-type]
        written = Path(str(trainer.config.data.path))
        assert json.loads(written.read_text().splitlines()[0]) == line
    assert not list((tmp_path / "run").iterdir()), "what no run has begun with goes again"


@pytest.mark.parametrize(
    ("objective", "kind", "more"),
    [("dpo", "pairs", {}), ("kto", "unpaired", {}), ("grpo", "rollouts", {}),
     ("grpo", "prompts", {"train.rollouts": {"rewards": ["exact"], "max_new_tokens": 8}})],
)  # fmt: skip
def test_an_objective_says_of_which_kind_its_records_are(
    tmp_path: Path, objective: str, kind: str, more: dict[str, Any]
) -> None:
    given = settings(tmp_path / "run") | {"train.objective": objective, "train.batch_size": 8} | more
    found = Trainer("model", given, train_dataset=[{"prompt": "q"}], processing_class="bytes").config
    assert (found.data.kind, found.train.objective) == (kind, objective)


def test_preferences_without_an_objective_are_told_what_to_set(tmp_path: Path) -> None:
    records = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    with pytest.raises(ConfigError, match=r"data\.kind is pairs; set dpo, ipo, hinge, simpo, orpo or reward"):
        Trainer("model", settings(tmp_path / "run"), train_dataset=records, processing_class="bytes")


def test_a_resume_gives_callbacks_what_the_run_has_logged(tmp_path: Path) -> None:
    """So does the next call of the same object. One that stops early would else take the next loss for the best."""
    rows = [{"step": step, "epoch": step / 4, "loss": 5.0 - step, "lr": 0.1, "tokens": 7} for step in (1, 2)]
    losses_of = {1: 3.0, 2: 4.0}
    run = SimpleNamespace(
        rows=lambda: rows, evaluations=lambda: [{"step": step, "eval_loss": loss} for step, loss in losses_of.items()]
    )
    callbacks = Callbacks([TrainerCallback])
    for _ in range(2):
        callbacks.begin(2, 9, run)  # type: ignore[arg-type]
        callbacks.evaluated({"step": 4, "eval_loss": 3.5})
    state = callbacks._state
    assert (state.global_step, state.epoch, state.max_steps) == (4, 0.5, 9)
    assert (state.best_metric, state.best_global_step) == (3.0, 1)
    assert [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in state.log_history] == [
        (1, 4.0, None), (1, None, 3.0), (2, 3.0, None), (2, None, 4.0), (4, None, 3.5),
    ]  # fmt: skip


class Filled(list[Any]):
    """A data set of the datasets library, which has its features, and fills keys that a record lacks with null."""

    features = ()


def test_keys_that_the_datasets_library_fills_are_left_out(tmp_path: Path) -> None:
    """A run of an earlier release has them in its file, and goes on with them."""
    turn = {"role": "user", "content": "q", "tool_calls": None}
    objects, run = Objects(train_dataset=Filled([{"messages": [turn], "id": None}])), tmp_path / "run"
    (run / "inputs").mkdir(parents=True)
    file = run / "inputs" / "train.jsonl"
    of_run = Run(run, SimpleNamespace(data=SimpleNamespace(kind="sft", text_field="")), has_begun=True)
    for before in (None, json.dumps({"messages": [turn], "id": None}) + "\n"):
        if before:
            file.write_text(before)
        with objects.written(of_run):  # type: ignore[arg-type]
            expected = before or json.dumps({"messages": [{"role": "user", "content": "q"}], "id": None}) + "\n"
            assert file.read_text() == expected


class Run:
    """Of a run directory what objects need."""

    def __init__(self, path: Path, config: Any, *, has_begun: bool = False) -> None:
        self.path, self.config = path, config
        self.holds_run = self.has_begun = has_begun


def test_the_tokenizer_object_is_the_runs(tmp_path: Path) -> None:
    """Cutting and padding, which each call of the object may set, do not make it another."""
    (tmp_path / "own").mkdir()
    specials = special_tokens([])
    write_tokenizer(train_bpe(iter(["a b c"]), 300, specials), specials, tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "own")
    objects = Objects(model="m", train_dataset="d", processing_class=tokenizer)
    run = Run(tmp_path, objects, has_begun=True)
    with objects.written(run):  # type: ignore[arg-type]
        pass
    assert (tmp_path / "inputs" / "tokenizer" / "tokenizer.json").exists()
    tokenizer(["a b c", "d"], truncation=True, max_length=2, padding=True)
    with objects.written(run):  # type: ignore[arg-type]
        pass
    tokenizer.add_tokens(["<new>"])
    other = objects.written(run)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="processing_class: is another tokenizer than the run began with"), other:
        pass
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == ["tokenizer"]


def test_held_out_records_may_change_and_others_may_not(tmp_path: Path) -> None:
    given = Trainer("m", settings(tmp_path / "run"), train_dataset=[{"text": "a"}], processing_class="bytes").config
    run = Run(tmp_path, given, has_begun=True)
    for text in "ab":
        with Objects(eval_dataset=[{"text": text}]).written(run):  # type: ignore[arg-type]
            assert (tmp_path / "inputs" / "eval.jsonl").read_text() == json.dumps({"text": text}) + "\n"
    with Objects(train_dataset=[{"text": "a"}]).written(run):  # type: ignore[arg-type]
        pass
    for records in ([{"text": "b"}], [{"text": "a"}, {"text": "b"}], []):
        longer = Objects(train_dataset=records).written(run)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"record [12] is not that which the run began with"), longer:
            pass
    assert (tmp_path / "inputs" / "train.jsonl").read_text() == json.dumps({"text": "a"}) + "\n"


def generated() -> Iterator[Any]:
    yield {"text": "a"}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a generator": ({"train_dataset": generated()}, "train_dataset: a generator can be gone over once only"),
    "no records": ({"train_dataset": []}, "train_dataset: holds no record"),
    "texts": ({"train_dataset": ["a"]}, "train_dataset: record 1: expected a mapping, got a str"),
    "a number": ({"train_dataset": 3}, "train_dataset: expected records or a path, got a int"),
    "no model": ({"model": torch.nn.Linear(2, 2)}, "model: expected a PreTrainedModel or a path, got a Linear"),
    "no callback": ({"callbacks": [len]}, "callbacks: expected transformers.TrainerCallback objects, got a builtin"),
    "no tokenizer": ({"processing_class": len}, "processing_class: expected a PreTrainedTokenizerBase or a path"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_objects_are_refused(tmp_path: Path, name: str) -> None:
    objects, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        Trainer(
            args=settings(tmp_path / "run"),
            **{"model": "m", "train_dataset": [{"text": "a"}], "processing_class": "bytes"} | objects,
        )
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_setting_and_an_object_for_it_are_refused(tmp_path: Path) -> None:
    tree = settings(tmp_path / "run")
    tree["data"]["path"] = "x.jsonl"
    with pytest.raises(ConfigError, match=r"train_dataset stands for data\.path: give one of them"):
        Trainer("m", tree, train_dataset=RECORDS)
    with pytest.raises(ConfigError, match="data: expected a mapping, got 3"):
        Trainer(args=tree | {"data": 3}, train_dataset=RECORDS)
    ready = Trainer("m", settings(tmp_path / "run"), train_dataset="x.jsonl", processing_class="bytes").config
    with pytest.raises(ConfigError, match="with objects or overrides give a mapping"):
        Trainer("m", ready)


def test_a_model_object_needs_a_tokenizer_for_texts(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(build_tiny(tmp_path / "model"))
    with pytest.raises(ConfigError, match="processing_class: a model object comes without a tokenizer"):
        Trainer(model, settings(tmp_path / "run"), train_dataset=[{"text": "a"}])


@pytest.mark.parametrize("spoil", [lambda r: r | {"x": object()}, lambda r: r | {"messages": float}])
def test_what_json_cannot_hold_is_named(tmp_path: Path, spoil: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    records = [{"messages": []}, spoil({"messages": []})]
    trainer = Trainer("m", settings(tmp_path / "run"), train_dataset=records, processing_class="bytes")
    (tmp_path / "run").mkdir()
    written = trainer._objects.written(Run(tmp_path / "run", trainer.config))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="record 2 cannot be written as JSON: it holds a "), written:
        pass
    assert not list((tmp_path / "run").iterdir())


def test_what_a_model_object_has_frozen_is_frozen(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(build_tiny(tmp_path / "model"))
    model.model.layers[1].mlp.requires_grad_(False)
    tree = settings(tmp_path / "run", train__freeze="embed_tokens")
    names = [rf"^model\.layers\.1\.mlp\.{name}_proj\.weight$" for name in ("gate", "up", "down")]
    assert Objects(model, RECORDS).fill(tree)["train"]["freeze"] == ["embed_tokens", *names]
    assert tree["train"]["freeze"] == "embed_tokens", "the settings stay as they are"
