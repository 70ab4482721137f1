"""Homes in plans: what they say, what they change, and plans of earlier versions, which have none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from megatrain_ray.engine.device.numa_homes import Gpu, GpuHome, Home, NumaNode
from megatrain_ray.engine.layout.flat_layout import CUT_ELEMENTS, NODE_CUT_ELEMENTS
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.engine.planner.report import describe
from megatrain_ray.engine.planner.request import Machine
from megatrain_ray.engine.planner.search.make_plan import make_plan
from megatrain_ray.planning.plan_diff import changes, is_same_placement
from tests.engine.planner.test_planner import MACHINE, REQUEST, model
from tests.support.plan_versions import version_1
from tests.support.runs import cli_here, config, write_config

NODES = NumaNode(0, ((0, 8), (1, 9), (2, 10)), 0), NumaNode(2, ((4, 12), (5, 13)), 2)
TWO = replace(MACHINE, num_nodes=2, nodes=NODES, gpus=(Gpu(None, 2),))
HOMES = Home((0,), "0-2,8-10", (0,)), Home((2,), "4-5,12-13", (2,))


def plan_on(machine: Machine, num_shards: int | None = None) -> Plan:
    return make_plan(*model(), machine, replace(REQUEST, num_shards=num_shards))


def test_one_shard_a_node_and_the_gpu_worker_on_its_own() -> None:
    plan = plan_on(TWO)
    assert (plan.shards.num_shards, plan.shards.homes, plan.hosts.gpu_homes) == (2, HOMES, (GpuHome(None, HOMES[1]),))
    assert plan.shards.num_threads == 4, "as many as the smaller node has: shards have equal parts"
    assert plan.shards.cut_elements == NODE_CUT_ELEMENTS
    line = "shards    2: node 0 (6 CPUs), node 2 (4 CPUs); GPU worker and gradients that wait: node 2 (4 CPUs)"
    assert line in describe(plan).splitlines()
    without = describe(plan_on(replace(TWO, gpus=(Gpu(None, None),)))).splitlines()
    assert "shards    2: node 0 (6 CPUs), node 2 (4 CPUs)" in without


def test_one_node_has_no_homes() -> None:
    plan = plan_on(MACHINE, num_shards=2)
    assert (plan.shards.homes, plan.hosts.gpu_homes, plan.shards.num_threads) == ((), (), 8)
    assert plan.shards.cut_elements == CUT_ELEMENTS
    assert "shards    " not in describe(plan)


def test_homes_are_in_the_file_and_its_hash() -> None:
    plan, other = plan_on(TWO), plan_on(replace(TWO, gpus=(Gpu(None, 0),)))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.sha256 != other.sha256
    assert json.loads(plan.to_json())["shards"]["homes"][1] == {"nodes": [2], "cpus": "4-5,12-13", "memory": [2]}


def test_plans_of_earlier_versions_have_none() -> None:
    tree = version_1(plan_on(TWO))
    home = tree.pop("gpu_homes")[0]["home"]
    before = Plan.from_json(json.dumps({**tree, "gpu_home": home}))  # which knew the first GPU's alone
    assert (before.shards.homes, before.hosts.gpu_homes) == (HOMES, ())
    del tree["shard_homes"]
    earlier = Plan.from_json(json.dumps(tree))
    assert (earlier.shards.homes, earlier.hosts.gpu_homes) == ((), ())


def test_another_cpuset_is_another_placement() -> None:
    before, now = plan_on(TWO), plan_on(replace(TWO, nodes=(NODES[0], NumaNode(2, ((4, 12),), 0))))
    assert not is_same_placement(before, now)
    assert "node 2 (4 CPUs) → node 0 (6 CPUs), node 2 (2 CPUs, memory of node 0)" in changes(before, now)


def test_a_gpu_on_another_node_is_another_placement_and_one_at_another_address_is_not() -> None:
    before, moved = (plan_on(replace(TWO, gpus=(Gpu(address, 2),))) for address in ("0000:1b:00.0", "0000:00:06.0"))
    assert before != moved
    assert is_same_placement(before, moved)
    elsewhere = plan_on(replace(TWO, gpus=(Gpu(None, 0),)))
    assert not is_same_placement(before, elsewhere)
    assert "GPU workers node 2 (4 CPUs) → node 0 (6 CPUs)" in changes(before, elsewhere)
    assert "GPU workers node 2 (4 CPUs) → anywhere" in changes(before, plan_on(replace(TWO, gpus=())))


def test_megatrain_plan_shows_them_of_a_machine_that_is_elsewhere(tmp_path: Path) -> None:
    """A GPU that is not here, too."""
    model = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    nodes = [{"cpus": "0-15,32-47"}, {"cpus": "16-31,48-63", "gpu": True}]
    tree = config(tmp_path / "run", model, hardware__nodes=nodes, hardware__device="cuda", hardware__hbm_limit="24GiB")
    file = str(write_config(tmp_path / "config.yaml", tree))
    text, as_json = cli_here("plan", file), cli_here("plan", file, "--json")
    assert (text.returncode, as_json.returncode) == (0, 0), text.stderr
    line = "shards    2: node 0 (32 CPUs), node 1 (32 CPUs); GPU worker and gradients that wait: node 1 (32 CPUs)"
    assert line in text.stdout.splitlines()
    found = json.loads(as_json.stdout)
    [of_gpu] = found["hosts"]["gpu_homes"]
    assert of_gpu["home"] == found["shards"]["homes"][1] == {"nodes": [1], "cpus": "16-31,48-63", "memory": [1]}
    assert of_gpu["address"] is None
    assert found["shards"]["num_threads"] == 32
