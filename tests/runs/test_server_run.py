"""Runs that learn from what a server samples: it has their weights at each sampling, wherever these are.

The server is a stand-in (tests/support/sampling_stand_in.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.rollouts import sampling_server
from tests.support.in_process import Train
from tests.support.runs import assert_same_masters, config, losses, plan_of, rows, write_config
from tests.support.sampling_stand_in import StandIn, stand_in
from tests.support.spilling import NUM_LAYERS, small_model, with_all_on_disk
from tests.support.tiny import build_tiny

STEPS, EVERY, GROUP = 4, 2, 4
REWARD = """
def even(completions, completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def prepare(tmp_path: Path, name: str, model: Path, server: StandIn, **changes: Any) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(6)))
    tree = config(tmp_path / name, model, save_every=0)
    tree["data"] = {"kind": "prompts", "path": str(tmp_path / "prompts.jsonl"), "tokenizer": "bytes", "seq_len": 64}
    tree["train"] = {
        "steps": STEPS, "batch_size": GROUP, "micro_batch_size": GROUP, "accumulate": 1, "lr": 0.02,
        "schedule": "constant", "precision": "fp32", "objective": "grpo",
        "rollouts": {
            "rewards": [f"{tmp_path / 'rewards.py'}:even"], "group_size": GROUP, "steps": EVERY, "max_new_tokens": 4,
            "temperature": 1.3, "server": {"url": server.url, "timeout_s": 30.0} | changes,
        },
    }  # fmt: skip
    return tree


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Serve another model of the same shape, whose weights no run has."""
    monkeypatch.setattr(sampling_server, "RETRY_S", 0.01)
    with stand_in(build_tiny(tmp_path / "other", seed=1)) as found:
        yield found


def ratios(run_dir: Path) -> list[float]:
    """Return the largest ratio of the model's to the server's probabilities in the first update of each sampling."""
    return [row["ratio_max"] for row in rows(run_dir)[::EVERY]]


def test_the_server_has_the_weights_of_each_step_and_a_run_goes_on_after_its_death(
    tmp_path: Path, server: StandIn, train: Train
) -> None:
    tree = prepare(tmp_path, "whole", build_tiny(tmp_path / "model"), server)
    done = train(str(write_config(tmp_path / "whole.yaml", tree)))
    assert done.returncode == 0, done.stderr
    assert ratios(tmp_path / "whole") == pytest.approx([1, 1], abs=1e-3)
    assert "warning: ratio_max" not in done.stderr
    assert server.asked.count("/collective_rpc") == 1 + STEPS // EVERY
    assert len(set(server.loaded)) == STEPS // EVERY, "a name is used once"
    assert all(folder.parents[1] == tmp_path / "whole" and not folder.exists() for folder in server.loaded)

    # The server dies in the second sampling. Nothing is lost: the run saves first.
    dies = str(write_config(tmp_path / "dies.yaml", {**tree, "run_dir": str(tmp_path / "dies")}))
    server.asked.clear()
    asked = 3 + EVERY * GROUP  # by the check at the start, and in the first sampling
    server.fault = lambda path, count: 500 if path == "/v1/completions" and count > asked else None
    died = train(dies, "train.rollouts.server.timeout_s=4", f"train.rollouts.server.url={server.url}/")
    assert died.returncode == 1
    assert f"{server.url} answered nothing for timeout_s: 4, with {EVERY * GROUP} of {EVERY * GROUP}" in died.stderr
    assert [row["step"] for row in rows(tmp_path / "dies")] == [1, 2]
    refused = train(dies)
    assert (refused.returncode, "/v1/completions: status 500" in refused.stderr) == (2, True), refused.stderr
    server.fault = lambda path, count: None
    again = train(dies)
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "dies") == losses(tmp_path / "whole")
    assert_same_masters(tmp_path / "dies", tmp_path / "whole")

    # It keeps the weights of the second sampling. Old log-probabilities are the model's own then, and hide nothing.
    server.keeps_weights = True
    stale = str(write_config(tmp_path / "stale.yaml", {**tree, "run_dir": str(tmp_path / "stale")}))
    done = train(stale, "train.rollouts.steps=1", "train.steps=2", "train.policy.correction=token_truncate")
    assert done.returncode == 0, done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "warning: ratio_max of update 1 is " in line)
    assert f"{rows(tmp_path / 'stale')[0]['ratio_max']:.3g}, which should be 1" in warning and server.url in warning


def test_weights_come_from_the_disk_and_with_adapters_merged(tmp_path: Path, train: Train) -> None:
    model = small_model(tmp_path, num_layers=NUM_LAYERS)
    with stand_in(model) as server:
        tree = with_all_on_disk(tmp_path, prepare(tmp_path, "disk", model, server))
        done = train(str(write_config(tmp_path / "disk.yaml", tree)))
        assert done.returncode == 0, done.stderr
        assert plan_of(tmp_path / "disk").weights_on_disk
        assert ratios(tmp_path / "disk") == pytest.approx([1, 1], abs=1e-3)

        served = tmp_path / "served"
        tree = prepare(tmp_path, "lora", model, server, weights=str(served), sleeps=True)
        tree["lora"] = {"match": ["q_proj", "down_proj"], "rank": 4}
        done = train(str(write_config(tmp_path / "lora.yaml", tree)))
        assert done.returncode == 0, done.stderr
        assert ratios(tmp_path / "lora") == pytest.approx([1, 1], abs=1e-3)
        assert server.loaded[-1].parents[1] == served and not list(served.iterdir())
        assert not server.awake
