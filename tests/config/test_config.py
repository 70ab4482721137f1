"""What a configuration accepts and refuses; every refusal names the key and what to do."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest

from megatrain_ray.config.resume_changes import resume_diff
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.values import HubDataset, WeightedPath, listed, weight_of
from megatrain_ray.errors import ConfigError
from tests.support.settings import MISSING, config, settings

ALONE = "goes with one GPU so far, and hardware.num_gpus is 3; leave one of the two out"
PAIRS = {"data__kind": "pairs", "train__objective": "orpo"}
TAUGHT = {"train__objective": "distill", "train__distillation__teacher": "teacher"}
ROLLOUTS = {"data__kind": "rollouts", "train__objective": "grpo"}
RANDOM_MODEL = {"model__path": MISSING, "model__config": {"hidden_size": 8}}


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    return str(caught.value)


def test_defaults_are_those_of_the_table() -> None:
    assert config().model_dump() == {
        "model": {"path": "model", "config": None, "seed": 0, "trust_remote_code": False, "attention": "auto"},
        "data": {
            "kind": "pretrain",
            "path": "text.txt",
            "eval_path": None,
            "eval_fraction": None,
            "max_records": None,
            "dataset": None,
            "eval_dataset": None,
            "chat_format": "auto",
            "chat_template": None,
            "chat_template_args": {},
            "images": False,
            "learn": "all",
            "learn_reasoning": True,
            "truncation": "turn",
            "scale_rewards": "group",
            "unfinished": "learn",
            "text_field": "text",
            "add_bos": None,
            "add_eos": None,
            "bad_records": "error",
            "tokenizer": None,
            "seq_len": 8,
            "stream": None,
            "stream_portion": None,
            "packing": True,
            "shuffle": True,
            "seed": 0,
        },
        "train": {
            "steps": 4,
            "batch_size": None,
            "micro_batch_size": None,
            "accumulate": None,
            "lr": 1e-4,
            "min_lr": 0.0,
            "schedule": "cosine",
            "objective": "sft",
            "distillation": {"teacher": None, "top_k": 64, "temperature": 1.0, "beta": 0.0, "sft_weight": 0.0},
            "preference": {
                "beta": 0.1,
                "gamma": 1.0,
                "label_smoothing": 0.0,
                "sft_weight": 0.0,
                "center_rewards_coefficient": 0.0,
                "desirable_weight": 1.0,
                "undesirable_weight": 1.0,
            },
            "policy": {
                "clip_low": 0.2,
                "clip_high": 0.2,
                "beta": 0.0,
                "level": "token",
                "loss_type": "dapo",
                "answer_length": None,
                "correction": None,
                "correction_min": None,
                "correction_max": 3.0,
            },
            "rollouts": None,
            "reference": None,
            "epochs": None,
            "warmup_steps": 0,
            "warmup_from_zero": False,
            "weight_decay": 0.1,
            "trainable": (),
            "freeze": (),
            "vision": "frozen",
            "groups": (),
            "optimizer": "adamw",
            "muon": {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "match_rms_adamw"},
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "clip": 1.0,
            "z_loss": 0.0,
            "label_smoothing": 0.0,
            "seed": 0,
            "precision": "bf16",
            "compute": None,
            "moments": "fp32",
            "grad_dtype": "fp32",
            "deterministic": False,
        },
        "hardware": {
            "device": "auto",
            "num_gpus": 1,
            "num_hosts": 1,
            "all_gather": "auto",
            "hbm_limit": None,
            "ram_limit": None,
            "hbm_layers": None,
            "num_shards": None,
            "nodes": (),
            "profile": "auto",
            "compile": "auto",
            "block_parts": "auto",
            "cuda_graphs": "auto",
        },
        "spill": {"path": None, "limit": None, "io": "auto", "compression": "auto"},
        "run_dir": "run",
        "resume": True,
        "save_every": 0,
        "save_keep": 2,
        "save_compress": "none",
        "lora": None,
        "save_keep_every": None,
        "save_best": False,
        "save_mirror": None,
        "eval_every": None,
        "eval_patience": None,
        "max_failures": 3,
        "max_skipped": 10,
        "log": {"every": None, "tensorboard": True, "wandb": None, "mlflow": None, "prometheus": True, "trace": None},
    }


def test_a_number_may_be_written_without_a_point_and_a_size_as_text() -> None:
    written = config(train__lr=1, train__betas=[0, 0.5], hardware__hbm_limit="24GiB", hardware__ram_limit=5)
    spill = config(spill__path="nvme", spill__limit="200GB").spill
    assert (written.train.lr, written.train.betas) == (1.0, (0.0, 0.5))
    assert (written.hardware.hbm_limit, written.hardware.ram_limit) == (24 << 30, 5)
    assert (spill.path, spill.limit) == ("nvme", 200 * 10**9)


def test_it_cannot_be_changed_and_survives_pickling() -> None:
    whole = config(**RANDOM_MODEL, data__tokenizer="bytes", data__path=["a", "b"])
    assert pickle.loads(pickle.dumps(whole)) == whole
    with pytest.raises(ValueError, match="frozen"):
        whole.train.lr = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__lr": "1e-4"}, "train.lr: expected a number, got '1e-4'"),
        ({"train__lr": True}, "train.lr: expected a number, got true"),
        ({"train__lr": float("nan")}, "train.lr: expected a finite number, got nan"),
        ({"train__steps": 10.0}, "train.steps: expected an integer, got 10.0"),
        ({"train__steps": MISSING}, "train.steps or train.epochs is required: how long to train, in updates or in "
                                    "passes over the data"),
        ({"train__warmup_steps": 2.5}, "train.warmup_steps: expected a whole number of steps, or their share as a "
                                       "number below 1; got 2.5"),
        ({"train__betas": [0.9]}, "train.betas.1: required."),
        ({"train__betas": 0.9}, "train.betas: expected a list, got 0.9"),
        ({"train__schedule": "cos"}, "train.schedule: expected 'cosine', 'constant' or 'linear', got 'cos'"),
        ({"data__packing": "yes"}, "data.packing: expected true or false, got 'yes'"),
        ({"run_dir": 7}, "run_dir: expected text (in quotes where it looks like something else), got 7"),
        ({"run_dir": ""}, "run_dir: expected a text that is not empty, got ''"),
        ({"train": None}, "train: expected a mapping, got null"),
        ({"train": MISSING}, "train: required. The updates: train.steps or train.epochs at least."),
        ({"model__config": 3}, "model.config: expected a mapping of the model's settings, or the path of a "
                               "config.json; got 3"),
        ({"log__every": 0}, "log.every: expected a number of steps from 1 on, or seconds as in 30s, got 0"),
        ({"log__every": "1m"}, "log.every: expected seconds, as in 30s, got '1m'"),
        ({"log__every": "0s"}, "log.every: expected seconds, as in 30s, got '0s'"),
        ({"data__path": []}, "data.path: expected a path, a glob, a list of these, or a list of "
                               "{path, weight} or {hub: OWNER/NAME}; got []"),
    ],
)  # fmt: skip
def test_a_wrong_type_names_key_expected_and_got(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train__steps", 0),
        ("train__batch_size", 0),
        ("train__accumulate", -1),
        ("train__lr", 0),
        ("train__min_lr", -1e-9),
        ("train__warmup_steps", -1),
        ("save_every", 0.5),
        ("save_every", "0 epochs"),
        ("eval_every", "1 epoc"),
        ("train__weight_decay", -0.1),
        ("train__betas", [0.9, 1.0]),
        ("train__eps", 0.0),
        ("train__clip", 0),
        ("train__seed", -1),
        ("data__seq_len", 0),
        ("hardware__hbm_limit", 0),
        ("hardware__num_shards", 0),
        ("spill__limit", 0),
        ("spill__limit", -1),
        ("save_every", -1),
        ("save_keep", 0),
        ("save_compress", "gzip"),
    ],
)
def test_numbers_out_of_range_are_refused_by_key(key: str, value: Any) -> None:
    assert refusal(**{key: value}).startswith(key.replace("__", "."))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__stepz": 1}, "train.stepz: unknown key; did you mean train.steps?"),
        (
            {"train__beta": 1},
            "train.beta: unknown key; did you mean train.distillation.beta or train.preference.beta or "
            "train.policy.beta?",
        ),
        ({"trian": {}}, "trian: unknown key; did you mean train?"),
        ({"lr": 1.0}, "lr: unknown key; did you mean train.lr?"),
        ({"train__learning_rate": 1.0}, "train.learning_rate: unknown key; did you mean train.lr?"),
        ({"train__learing_rate": 1.0}, "train.learing_rate: unknown key; did you mean train.lr?"),
        ({"data__eval_frac": 0.1}, "data.eval_frac: unknown key; did you mean data.eval_fraction?"),
        ({"data__test_size": 0.1}, "data.test_size: unknown key; did you mean data.eval_fraction?"),
        ({"num_epoch": 3}, "num_epoch: unknown key; did you mean train.epochs?"),
        ({"model__name": "x"}, "model.name: unknown key; did you mean model.path?"),
        ({"optim": "adamw"}, "optim: unknown key; did you mean train.optimizer?"),
        ({"epochs": 3}, "epochs: unknown key; did you mean train.epochs?"),
        ({"num_train_epochs": 3}, "num_train_epochs: unknown key; did you mean train.epochs?"),
        ({"max_length": 3}, "max_length: unknown key; did you mean data.seq_len?"),
        ({"sequence_len": 3}, "sequence_len: unknown key; did you mean data.seq_len?"),
        ({"train__epsilon_high": 0.3}, "train.epsilon_high: unknown key; did you mean train.policy.clip_high?"),
        ({"eval_evry": 3}, "eval_evry: unknown key; did you mean eval_every?"),
        ({"auto_resume_from_checkpoints": True}, "auto_resume_from_checkpoints: unknown key; the same command resumes "
                                                 "the run in run_dir"),
        ({"log__report_to": "wandb"}, "log.report_to: unknown key; metrics.jsonl and TensorBoard always; log.wandb and "
                                      "log.mlflow name a project"),
        ({"hardware__qqqq": 1}, "hardware.qqqq: unknown key; expected one of hardware.device, hardware.num_gpus, "
                                "hardware.num_hosts, hardware.all_gather, "
                                "hardware.hbm_limit, hardware.ram_limit, hardware.hbm_layers, hardware.num_shards, "
                                    "hardware.nodes, hardware.profile, hardware.compile, hardware.block_parts, "
                                    "hardware.cuda_graphs"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_the_nearest(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware__cuda_graphs": True}, f"hardware.cuda_graphs: true {ALONE}"),
        (
            {"train__batch_size": 4},
            "train.batch_size: 4 sequences cannot be divided among hardware.num_gpus: 3; set a multiple of 3",
        ),
        (
            {"train__batch_size": 4, "train__micro_batch_size": 2},
            "train.batch_size: 4 disagrees with micro_batch_size × accumulate × num_gpus = 2 × 1 × 3 = 6 "
            "(each 1 when unset); set train.batch_size: 6",
        ),
    ],
)
def test_what_several_gpus_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(hardware__num_gpus=3, **changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hardware__num_gpus": 3},
            "hardware.num_gpus: 3, of all hosts together, cannot be divided among hardware.num_hosts: 2; set a "
            "multiple of 2",
        ),
        (
            {"hardware__num_gpus": 1},
            "hardware.num_gpus: 1, of all hosts together, cannot be divided among hardware.num_hosts: 2; set a "
            "multiple of 2",
        ),
        (
            {"hardware__num_gpus": 2, "train__optimizer": "muon"},
            "train.optimizer: muon goes with one host so far, since a matrix would be divided among several, and "
            "hardware.num_hosts is 2; leave one of the two out",
        ),
        (
            {"hardware__num_gpus": 2, "run_dir": "/runs/a", "spill__path": "spill"},
            "spill.path: spill is relative, and other hosts have other working directories; give an absolute path",
        ),
        (
            {"hardware__num_gpus": 2, "run_dir": "runs/a"},
            "run_dir: runs/a is relative, and other hosts have other working directories; give an absolute path",
        ),
    ],
)
def test_what_several_hosts_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(**{"hardware__num_hosts": 2, "run_dir": "/runs/a"} | changes) == message


def test_an_all_gather_takes_several_gpus_and_several_hosts_take_it() -> None:
    hosts = {"hardware__num_hosts": 2, "hardware__num_gpus": 2, "run_dir": "/runs/a"}
    assert refusal(hardware__all_gather=True) == (
        "hardware.all_gather: true takes several GPUs, and hardware.num_gpus is 1; leave one of the two out"
    )
    assert refusal(hardware__all_gather=False, **hosts) == (
        "hardware.all_gather: false needs whole layers on every host, and each of hardware.num_hosts: 2 has a part; "
        "leave it out"
    )
    assert config(hardware__all_gather=False).hardware.all_gather is False
    assert config(hardware__all_gather=False, hardware__num_gpus=2).hardware.all_gather is False
    assert config(hardware__all_gather=True, **hosts).hardware.all_gather is True


def test_several_gpus_share_a_batch() -> None:
    assert config(hardware__num_gpus=3).resolve().train.batch_size == 3, "one sequence each where nothing is said"
    asked = config(train__batch_size=12, hardware__num_gpus=3)
    earlier = asked.resolve().with_split(2, 2)
    assert asked.resolve(earlier).split() == (2, 2)
    of_two = config(train__batch_size=12, hardware__num_gpus=2).resolve(earlier)
    assert of_two.train.split_is_free, "the plan chooses again"
    assert of_two.train.batch_size == 12


def test_an_evaluation_needs_held_out_data_and_may_be_switched_off_with_them() -> None:
    message = (
        "data.eval_path or data.eval_fraction is required with eval_every: 5: held-out files, given as data.path is"
    )
    assert refusal(eval_every=5).startswith(message)
    assert refusal(eval_every=-1).startswith("eval_every: ")
    assert refusal(data__eval_path=[]).startswith("data.eval_path: expected a path, a glob, ")
    assert refusal(data__eval_dataset="x").startswith("data.eval_dataset: goes with data.kind: sft")
    assert config(data__eval_path="held", eval_every=0).data.held_out is not None
    both = refusal(data__eval_path="held", data__eval_fraction=0.1)
    assert both == "data.eval_fraction: 0.1 and data.eval_path are both set; keep one of the two"
    assert refusal(data__eval_fraction=1.0).startswith("data.eval_fraction: expected less than 1")


@pytest.mark.parametrize(
    ("changes", "interval"),
    [
        ({}, 0),
        ({"data__eval_path": "held"}, 4),
        ({"data__eval_fraction": 0.1}, 4),
        ({"data__eval_fraction": 0.1, "eval_every": 0}, 0),
        ({"data__eval_fraction": 0.1, "eval_every": 3}, 3),
    ],
)
def test_held_out_data_are_evaluated_at_the_start_and_the_end_at_least(changes: dict[str, Any], interval: int) -> None:
    assert config(**changes).eval_steps == interval


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"save_best": True},
            "eval_every is required with save_best: true: after how many updates the held-out data are evaluated",
        ),
        (
            {"eval_patience": 3},
            "eval_every is required with eval_patience: after how many updates the held-out data are evaluated",
        ),
        (
            {"save_best": True, "save_every": None, "eval_every": 1, "data__eval_path": "held"},
            "save_best: true needs saves, and save_every: null makes none; set save_every: 0 or more",
        ),
        (
            {"save_keep_every": 100},
            "save_keep_every: 100 keeps some of the saves of save_every, which is 0; set save_every: 100, or a number "
            "that divides it",
        ),
        (
            {"save_keep_every": 100, "save_every": 30},
            "save_keep_every: 100 is no multiple of save_every: 30; set save_keep_every: 90",
        ),
    ],
)
def test_saves_that_would_never_be_made_are_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message


def test_a_save_comes_after_the_smaller_interval() -> None:
    def of(**changes: Any) -> int | None:
        return config(eval_every=6, data__eval_path="held", **changes).save_interval

    assert [of(save_every=every) for every in (None, 0, 4)] == [None, 0, 4]
    assert [of(save_every=every, save_best=True) for every in (0, 4, 9)] == [6, 4, 6]
    weighted = config(data__eval_path=[{"path": "a", "weight": 2}], eval_every=5, data__dataset=None).data.held_out
    assert weighted is not None
    assert (weighted.path, weighted.seq_len, weighted.held_out) == ((WeightedPath(path="a", weight=2),), 8, None)


def test_a_data_set_of_the_hub_is_read_at_the_commit_of_the_runs_first_start() -> None:
    hub = {"hub": "o/data", "split": "test"}
    assert [str(source) for source in config(data__path=hub).data.path] == ["o/data, test"]
    for path in ("o/data@v1", [{"path": "o/data@v1", "weight": 2}], hub, [{**hub, "name": "en"}, "more.txt"]):
        new = config(data__path=path)
        named = HubDataset(hub="o/data", revision="v1") if "@v1" in str(path) else listed(new.data.path)[0]
        first = named.model_copy(update={"commit": "a" * 40, "weight": weight_of(listed(new.data.path)[0])})
        earlier = new.model_copy(
            update={"data": new.data.model_copy(update={"path": (first, *listed(new.data.path)[1:])})}
        )
        assert resume_diff(earlier, new) == []
        assert new.resolve(earlier).data.path == earlier.data.path
        other = config(data__path={"hub": "o/data", "split": "other"})
        assert resume_diff(earlier, other)[0].startswith("data.path: ")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([{"hub": "a/b"}, {"path": "a", "weight": 1}], "some sources have a weight and some none"),
        ({"hub": "a"}, "expected {hub: OWNER/NAME, name, split, revision, weight}, got {'hub': 'a'}: see hub"),
        (
            {"hub": "a/b", "subset": "c"},
            "expected {hub: OWNER/NAME, name, split, revision, weight}, got {'hub': 'a/b', ",
        ),
        ([{"path": "a"}], "expected {path: a path or a glob, weight: a number}, got {'path': 'a'}"),
        ([{"path": "a", "weight": True}], "expected {path: a path or a glob, weight: a number}, got {'path': 'a', "),
        ([{"path": "a", "weight": 1, "share": 2}], "expected {path: a path or a glob, weight: a number}, got {"),
        ([{"path": "a", "weight": 0}], "the weight of a is 0; expected a number more than 0"),
        ([{"path": "a", "weight": float("inf")}], "the weight of a is inf; expected a number more than 0"),
        (["a", {"path": "b", "weight": 1}], "some sources have a weight and some none"),
    ],
)
def test_weighted_sources_that_are_none(path: Any, message: str) -> None:
    assert refusal(data__path=path).startswith(f"data.path: {message}")


def test_all_problems_come_in_one_message() -> None:
    assert refusal(train__lr="x", train__stepz=1, hardware__device="tpu").splitlines() == [
        "train.lr: expected a number, got 'x'",
        "train.stepz: unknown key; did you mean train.steps?",
        "hardware.device: expected 'auto', 'cpu' or 'cuda', got 'tpu'",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__config": "shape.json"}, "model.path and model.config are both set: keep path"),
        ({"model__path": MISSING}, "model.path or model.config is required"),
        (RANDOM_MODEL, "data.tokenizer is required with model.config"),
        ({"train__min_lr": 1.0}, "train.min_lr: 1.0 is more than train.lr: 0.0001"),
        (
            {"train__warmup_steps": 5},
            "train.warmup_steps: 5 is more than train.steps: 4; set train.warmup_steps "
            "to 4 or fewer, or train.steps to 5 or more",
        ),
        ({"train__epochs": 3}, "train.steps: 4 and train.epochs: 3 are both set; set one of them to null"),
        ({"spill__limit": "200GB"}, "spill.path is required with spill.limit: 200000000000: a folder on"),
        ({"log__trace": [3, 2]}, "log.trace: [3, 2]: expected two steps with 1 ≤ first ≤ last ≤ train.steps: 4"),
        ({"log__trace": [3, 5]}, "log.trace: [3, 5]: expected two steps with 1 ≤ first ≤ last ≤ train.steps: 4"),
        (
            {"data__dataset": "d"},
            "data.dataset: goes with data.kind: sft or pairs or unpaired, and data.kind is pretrain",
        ),
        ({"data__chat_template_args": {"a": 1}}, "data.chat_template_args: goes with data.kind: sft"),
        ({"data__kind": "sft", "data__text_field": "body"}, "data.text_field: goes with data.kind: pretrain, and"),
        ({"data__kind": "pairs"}, "train.objective: sft learns single answers, and data.kind is pairs; set dpo, ipo,"),
        ({"train__objective": "orpo"}, "data.kind: pretrain, and train.objective: orpo is over pairs of a chosen and"),
        (
            {"train__objective": "kto"},
            "data.kind: pretrain, and train.objective: kto is over answers that are labelled",
        ),
        (
            {"data__kind": "unpaired"},
            "train.objective: sft learns single answers, and data.kind is unpaired; set kto or",
        ),
        (
            PAIRS | {"train__preference__desirable_weight": 2.0},
            "train.preference.desirable_weight: goes with train.objective: kto or apo_zero_unpaired, and",
        ),
        (
            {"train__preference__gamma": 0.5},
            "train.preference.gamma: goes with train.objective: simpo, and train.objective is sft; leave the key out",
        ),
        ({"data__kind": "rollouts"}, "train.objective: sft learns single answers, and data.kind is rollouts; set grpo"),
        ({"train__objective": "grpo"}, "data.kind: pretrain, and train.objective: grpo is over sampled answers with r"),
        ({"train__policy__beta": 1.0}, "train.policy.beta: goes with train.objective: grpo, and that is sft; leave it"),
        (
            {"train__rollouts": {"rewards": ["exact"], "server": {"url": "localhost:8000"}}},
            "train.rollouts.server.url: expected a server as in http://localhost:8000, without a path; got 'local",
        ),
        (ROLLOUTS | {"data__eval_fraction": 0.5}, "data.eval_fraction: goes with data.kind: pretrain or sft or"),
        (
            ROLLOUTS | {"train__policy__answer_length": 9},
            "train.policy.answer_length: goes with loss_type: dr_grpo, and that",
        ),
        (ROLLOUTS | {"train__policy__correction_min": 0.5}, "train.policy.correction_min: goes with train.policy.corr"),
        (
            ROLLOUTS | {"train__policy": {"correction": "token_mask", "correction_max": None}},
            "train.policy.correction: token_mask has no bound; set train.policy.correction_max",
        ),
        (
            ROLLOUTS | {"train__policy": {"correction": "token_mask", "correction_min": 3.0}},
            "train.policy.correction_min: 3 is not less than correction_max: 3",
        ),
        (
            ROLLOUTS | {"train__reference": "model"},
            "train.reference: train.objective: grpo compares with no reference; ",
        ),
        (PAIRS | {"train__label_smoothing": 0.1}, "train.label_smoothing: is of single tokens, and train.objective is"),
        (
            {"train__reference": "model"},
            "train.reference: train.objective: sft compares with no reference; leave the key",
        ),
        ({"train__objective": "distill"}, "train.distillation.teacher is required: the folder, hub id or run of the"),
        ({"train__distillation__top_k": 3}, "train.distillation.top_k: goes with train.objective: distill; set that,"),
        (TAUGHT | {"data__kind": "pairs"}, "data.kind: pairs, and train.objective: distill learns single answers; set"),
        (TAUGHT | {"train__z_loss": 1e-4}, "train.z_loss: changes the cross-entropy, and train.objective is distill;"),
        (TAUGHT | {"train__reference": "model"}, "train.reference: train.objective: distill compares with no"),
        (PAIRS | {"train__reference": "model"}, "train.reference: train.objective: orpo compares with no reference"),
        (PAIRS | {"hardware__cuda_graphs": True}, "hardware.cuda_graphs: true goes with train.objective: sft so far"),
    ],
)
def test_settings_that_disagree(changes: dict[str, Any], message: str) -> None:
    assert refusal(**{"model": {"path": "model"}, **changes}).startswith(message)


@pytest.mark.parametrize(
    ("epochs", "num_rows", "batch_size", "steps"),
    [(3, 10, 4, 8), (0.5, 8, 4, 1), (0.07, 100, 1, 7), (1e-9, 5, 5, 1), (1, 7, 7, 1), (2, 7, 4, 4), (2.5, 1, 16, 1)],
)
def test_epochs_are_steps_rounded_up(epochs: float, num_rows: int, batch_size: int, steps: int) -> None:
    given = config(train__steps=MISSING, train__epochs=epochs, train__batch_size=batch_size)
    resolved = given.with_steps(num_rows)
    assert (resolved.train.num_steps, resolved.train.epochs) == (steps, None)
    assert resolved.with_steps(2 * num_rows) == resolved


def test_settings_that_epochs_of_few_rows_do_not_allow() -> None:
    given = config(train__steps=MISSING, train__epochs=2, train__warmup_steps=9)
    with pytest.raises(
        ConfigError, match=r"train\.epochs: 2 of 4 rows are 8 steps: train\.warmup_steps: 9 is more than"
    ):
        given.with_steps(4)


@pytest.mark.parametrize(
    ("warmup", "steps", "number"), [(3, 9, 3), (0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0, 5, 0)]
)
def test_a_warm_up_may_be_a_share_of_the_steps(warmup: float, steps: int, number: int) -> None:
    assert config(train__warmup_steps=warmup, train__steps=steps).train.num_warmup_steps == number


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "accumulate", "split"),
    [
        (None, None, None, (1, 1)),
        (6, None, None, (1, 6)),
        (None, 3, None, (3, 1)),
        (None, None, 5, (1, 5)),
        (None, 3, 5, (3, 5)),
        (15, 3, 5, (3, 5)),
    ],
)
def test_the_split_of_a_step(
    batch_size: int | None, micro_batch_size: int | None, accumulate: int | None, split: tuple[int, int]
) -> None:
    asked = config(train__batch_size=batch_size, train__micro_batch_size=micro_batch_size, train__accumulate=accumulate)
    assert asked.split() == split
    assert asked.num_step_rows == asked.resolve().num_step_rows == split[0] * split[1]
    train = asked.resolve().train
    left_open = (None, None) if batch_size == 6 else split
    assert (train.batch_size, train.micro_batch_size, train.accumulate) == (split[0] * split[1], *left_open)
    assert asked.with_split(3, 5).split() == (3, 5)
    TrainConfig.model_validate(asked.resolve().model_dump())


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"train__micro_batch_size": 2}, "train.accumulate: 4"),
        ({"train__accumulate": 4}, "train.micro_batch_size: 2"),
        ({"train__micro_batch_size": 3}, "train.batch_size: 3"),
        ({"train__micro_batch_size": 2, "train__accumulate": 2}, "train.batch_size: 4"),
    ],
)
def test_batch_sizes_that_disagree_say_what_to_set(changes: dict[str, Any], remedy: str) -> None:
    assert refusal(train__batch_size=8, **changes).endswith(f"set {remedy}")
    answers = {"data__kind": "prompts", "train__objective": "grpo", "train__rollouts": {"rewards": ["exact"]}}
    told = refusal(train__batch_size=8, **changes, **answers, data__seq_len=512)
    assert "\n" not in told and told.endswith(f"set {remedy}"), "not that batch_size is no multiple of group_size"


@pytest.mark.parametrize(
    ("objective", "kind"), [("dpo", "pairs"), ("kto", "unpaired"), ("distill", "pretrain, sft or")]
)
@pytest.mark.parametrize("rollouts", [{"rewards": ["exact"]}, None])
def test_prompts_with_another_objective_get_one_advice(objective: str, kind: str, rollouts: object) -> None:
    teacher = {"train__distillation__teacher": "t"} if objective == "distill" else {}
    told = refusal(
        data__kind="prompts", data__seq_len=512, train__objective=objective, train__rollouts=rollouts,
        train__batch_size=8, **teacher,
    )  # fmt: skip
    assert "\n" not in told
    assert told.startswith(f"train.objective: {objective} learns from no rewards, and data.kind is prompts; set train.")
    assert f"or data.kind: {kind}" in told


def test_the_tokenizer_is_the_models_own_unless_set() -> None:
    assert config().resolve().data.tokenizer == "model"
    assert config(data__tokenizer="bytes").resolve().data.tokenizer == "bytes"


def test_a_resume_keeps_a_split_that_is_left_open() -> None:
    earlier = config(train__micro_batch_size=2, train__accumulate=3).resolve()
    assert config(train__batch_size=6).resolve(earlier).split() == (2, 3)
    assert config(train__batch_size=4).resolve(earlier).split() == (1, 4)
    assert config(train__micro_batch_size=3, train__accumulate=2).resolve(earlier).split() == (3, 2)


def test_keys_of_chats() -> None:
    data = {"data__kind": "sft", "data__dataset": ["a", "b"], "data__chat_template_args": {"enable_thinking": False}}
    assert config(**data, data__text_field="text").data.dataset == ("a", "b")
    assert config(**data | {"data__dataset": "a"}).data.chat_template_args == {"enable_thinking": False}
    dated = config(**data | {"data__chat_template_args": {"date_string": datetime.date(2024, 7, 26)}})
    assert dated.data.chat_template_args == {"date_string": "2024-07-26"}
    wrong = refusal(**data | {"data__chat_template_args": {"x": b"1"}})
    assert wrong.startswith("data.chat_template_args: expected texts, numbers, true")
    assert refusal(**data, data__chat_format="parquet").startswith("data.chat_format: expected 'auto', 'alpaca'")
    assert refusal(**data | {"data__dataset": [1]}) == "data.dataset: expected a name or a list of names, got [1]"


def test_it_may_be_built_from_its_groups() -> None:
    whole = config()
    assert TrainConfig(model=whole.model, data=whole.data, train=whole.train, run_dir="run") == whole
    assert settings()["run_dir"] == whole.run_dir


@pytest.mark.parametrize(("given", "beta"), [({}, 2.0), ({"beta": 0.1}, 0.1), ({"gamma": 0.5}, 2.0)])
def test_simpo_has_a_beta_of_its_own(given: dict[str, float], beta: float) -> None:
    settings = config(train__objective="simpo", data__kind="pairs", train__preference=given)
    assert settings.train.preference.beta == beta
    assert config(train__objective="dpo", data__kind="pairs").train.preference.beta == 0.1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"train__steps": None, "train__epochs": 1},
            "data.stream: the rows of a stream are not counted before",
        ),
        ({"save_every": "1 epoch"}, "data.stream: the rows of a stream are not counted before"),
        ({"train__reference": "model"}, "data.stream: a reference or teacher reads all data before training; "),
        ({"data__eval_fraction": 0.1}, "data.eval_fraction: does not go with data.stream (set data.eval_path); "),
        ({"data__max_records": 9}, "data.max_records: does not go with data.stream "),
        ({"data__kind": "sft", "data__dataset": "a"}, "data.dataset: does not go with data.stream "),
        ({"data__kind": "sft", "data__images": True}, "data.images: does not go with data.stream "),
        (PAIRS, "data.stream: goes with data.kind: pretrain or sft or tokens, and data.kind is pairs; "),
        ({"data__stream": None, "data__stream_portion": 9}, "data.stream_portion: goes with data.stream; "),
    ],
)
def test_a_stream_refuses_what_needs_all_data_first(changes: dict[str, Any], line: str) -> None:
    assert line in refusal(**{"data__stream": "1GB", **changes})


def test_held_out_data_of_a_stream_are_read_whole() -> None:
    held_out = config(data__stream="1GB", data__eval_path="held.txt").data.held_out
    assert held_out is not None
    assert held_out.stream is None
