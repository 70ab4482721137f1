"""What each of several hosts has of every layer, what a plan counts of it, and where the hosts find each other."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_ray.crew import actor_role, host_roles
from megatrain_ray.crew.ray_resources import check_hosts, lacking_hosts
from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.rank_group import Meeting, RankGroup, interface_of
from megatrain_ray.engine.device.ranks import RankParts
from megatrain_ray.engine.host.gradient_slab import GradientSlab
from megatrain_ray.engine.host.shared_update_state import SharedUpdateState
from megatrain_ray.engine.layout.model_layout import ModelLayout
from megatrain_ray.engine.layout.precision import Precision
from megatrain_ray.engine.plan.plan import ActivationPolicy, Plan
from megatrain_ray.engine.plan.plan_groups import HostSettings
from megatrain_ray.engine.plan.plan_shards import shard_layout
from megatrain_ray.engine.plan.schedule import LoopOrder
from megatrain_ray.engine.planner.request import Candidate, Machine, Request
from megatrain_ray.errors import CapacityError, ConfigError, LostPeerError, ShardFailedError
from megatrain_ray.io.storage.blob_store import aligned
from megatrain_ray.virtual_clock import Op, Stage, Timeline
from megatrain_ray.workers.arena_owner import ArenaOwner
from megatrain_ray.workers.arenas import SLAB, WORKING, arena_sizes, state_arena
from tests.support.candidate_plans import build_plan
from tests.support.rank_process import two_layers
from tests.support.reference import Recipe
from tests.support.run_engine import Mode, folder_source, plan_for
from tests.support.runs import ROOT
from tests.support.shapes import qwen
from tests.support.shards import header
from tests.support.tiny import build_tiny


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("frozen", [(), (5000, 70)], ids=["all trained", "some frozen"])
def test_shares_cover_a_layer_and_lie_behind_each_other_in_the_arena(num_hosts: int, frozen: tuple[int, ...]) -> None:
    whole = two_layers((5000, 64, 300), frozen)
    layer = whole.layers[0]
    of_hosts = [whole.on_host(host, num_hosts) for host in range(num_hosts)]
    positions: list[int] = []
    for of_host in of_hosts:
        share = of_host.shares[0]
        own = [*range(*share.trained), *range(*share.frozen)]
        assert [share.position(padded) for padded in own] == list(range(share.size))
        assert of_host.starts_among(None) == (0, share.size)
        assert of_host.size_among(None) == 2 * share.size
        assert of_host.gradient_bytes(4) == (4 * share.trained.size,) * 2
        positions += own
    assert sorted(positions) == list(range(layer.size)), "each element has one host"
    assert max(of_host.shares[0].size for of_host in of_hosts) <= layer.size // num_hosts + 256


@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(1, 3), (2, 2), (2, 6), (3, 3)])
def test_parts_of_the_ranks_of_a_host_cover_its_share(num_hosts: int, num_ranks: int) -> None:
    whole = two_layers((5000, 64, 300), (4100,))
    for rank in range(num_ranks):
        parts = RankParts(whole.on_host(rank * num_hosts // num_ranks, num_hosts), rank, num_ranks)
        for number, of_ranks in enumerate(parts.upload_spans_of_all(0)):
            count = num_ranks // num_hosts
            for host in range(num_hosts):
                share = whole.on_host(host, num_hosts).shares[0][number]
                mine = of_ranks[host * count : (host + 1) * count]
                assert (mine[0].start, mine[-1].stop) == share
                assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
        assert parts.gradient_span(0) == parts.upload_spans_of_all(0)[0][rank]


def test_shards_of_all_hosts_have_each_element_once(tmp_path: Path) -> None:
    plan, whole = planned(tmp_path, num_hosts=2, num_shards=3)
    for i, layer in enumerate(whole.layers):
        spans = [shard_layout(plan, whole.on_host(host, 2), k).spans[i] for host in (0, 1) for k in range(3)]
        assert sorted(x for span in spans for x in range(*span)) == list(range(*layer.trained))
    assert [shard_layout(plan, whole.on_host(1, 2), k).number for k in range(3)] == [3, 4, 5]


def planned(folder: Path, num_hosts: int, num_shards: int) -> tuple[Plan, ModelLayout]:
    source = folder_source(build_tiny(folder, num_layers=1))
    structure, plan = plan_for(source.factory, Recipe(1, micro_batch_size=2), Mode(), (4, 32))
    hosts, shards = HostSettings(num_hosts, num_gpus=num_hosts), replace(plan.shards, num_shards=num_shards)
    return replace(plan, hosts=hosts, shards=shards), structure.layout()


@pytest.mark.parametrize("num_hosts", [2, 3, 5, 7])
@pytest.mark.parametrize("clip", [True, False])
def test_what_a_plan_counts_is_enough_for_every_host(num_hosts: int, *, clip: bool) -> None:
    """Shares of three hosts are not equally large."""
    structure, activations = qwen(3, 64, hidden=256, heads=4, kv_heads=2, inner=576)
    request = Request(Precision.BF16, False, clip, 1, 2, 64, num_gpus=num_hosts, num_hosts=num_hosts)
    machine = Machine("cpu", num_cpus=4, num_nodes=1, ram_bytes=1 << 40, hbm_bytes=None)
    candidate = Candidate(LoopOrder.LAYERS_OUTER, ActivationPolicy.RECOMPUTE, 3, 2)
    plan = build_plan(structure, activations, machine, request, candidate)
    counted = {row.name: row.num_bytes for row in plan.memory_items}
    for host in range(num_hosts):
        layout = structure.layout().on_host(host, num_hosts)
        sizes = arena_sizes(plan, layout)
        assert sizes[WORKING] <= counted["working copy"]
        assert sizes[state_arena(0)] <= aligned(counted["optimizer state"])
        GradientSlab(
            torch.empty(sizes[SLAB], dtype=torch.uint8),
            layout.gradient_bytes(plan.gradients.slab_itemsize),
            passing=None,
        )


def test_a_rank_without_a_part_of_a_small_layer_uploads_nothing_of_it() -> None:
    """A head that is tied is its norm alone: 32 blocks of 64 elements."""
    whole = two_layers((128,))
    num_ranks = 64
    parts = [RankParts(whole.on_host(rank // 32, 2), rank, num_ranks).upload_spans(0) for rank in range(num_ranks)]
    assert all(len(of_rank) == 1 for of_rank in parts)
    assert sum(span.size for (span,) in parts) == whole.layers[0].size
    assert min(span.size for (span,) in parts) == 0


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_slot_has_the_parts_of_all_hosts(num_ranks: int) -> None:
    """Two ranks use an all-gather; parts of three are not equally large, and each sends its own."""
    meeting = Meeting()
    arguments = [sys.executable, "-m", "tests.support.rank_process", *map(str, meeting.place), str(num_ranks)]
    ranks = [subprocess.Popen([*arguments, str(rank)], cwd=ROOT, stderr=subprocess.PIPE) for rank in range(num_ranks)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors.decode()


def test_a_rank_that_meets_nobody_has_lost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # else it sets them, for good
        monkeypatch.setenv(name, "lo")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    meeting = Meeting()
    with pytest.raises(LostPeerError, match="rank 0 of 2 did not meet the others"):
        RankGroup(torch.device("cpu"), meeting.place, 0, 2, timeout_s=0.2)


def test_hosts_meet_at_an_address_of_theirs() -> None:
    assert Meeting().place.address == "127.0.0.1"
    elsewhere = Meeting("127.0.0.2")
    socket.create_connection(elsewhere.place, 5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", elsewhere.place.port), 5).close()
    with pytest.raises(OSError):
        Meeting("192.0.2.77")  # of nobody (RFC 5737)


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.3") == "lo"
    assert interface_of("192.0.2.77") is None
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
        assert interface_of(str(address)) in {name for _, name in socket.if_nameindex()}


def node(address: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}


def test_each_host_needs_a_node_that_has_what_it_asks_for() -> None:
    bundles = [{"CPU": 0.9, "GPU": 8.0}] * 2
    able, dead = node("10.0.0.1", CPU=64.0, GPU=8.0), node("10.0.0.2", alive=False, CPU=64.0, GPU=8.0)
    check_hosts(bundles, [able, node("10.0.0.3", CPU=1.0, GPU=8.0)])
    with pytest.raises(CapacityError) as refused:
        check_hosts(bundles, [able, dead, node("10.0.0.4", CPU=64.0, GPU=4.0)])
    assert str(refused.value) == (
        "hardware.num_hosts: 2, and 1 of the Ray cluster's nodes have what a host needs (CPU: 0.9, GPU: 8): 10.0.0.1; "
        "start Ray on more machines, or set hardware.num_hosts to at most 1"
    )


def test_a_wait_for_nodes_says_which_there_are() -> None:
    bundles = [{"CPU": 0.2}] * 2
    assert lacking_hosts(bundles, [node("10.0.0.1", CPU=4.0), node("10.0.0.2", CPU=4.0)]) == ""
    assert lacking_hosts(bundles, [node("10.0.0.1", CPU=4.0), node("10.0.0.2", alive=False, CPU=4.0)]) == (
        "1 of the Ray cluster's nodes have what a host needs (CPU: 0.2): 10.0.0.1"
    )


def test_messages_number_the_shards_of_all_hosts() -> None:
    words = SharedUpdateState(memoryview(mmap.mmap(-1, 8 * SharedUpdateState.num_words(1, 2))), 1, 2, first_shard=2)
    words.reset(0, [{0}, {0}])
    words.updates.commit(header(1))
    words.gradients.land(0, 1, 0)
    assert "optimizer shard 2, 3 is stuck" in str(words.generations.late(0, 1, 1.0))
    words.fail(1)
    with pytest.raises(ShardFailedError, match="optimizer shard 3 failed"):
        words.check()


def test_an_owner_waits_for_what_an_earlier_attempt_left() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        with ThreadPoolExecutor(1) as thread:
            owner = thread.submit(ArenaOwner, {"a": 4096}, left=[left.pid])
            assert not owner.done()
            left.communicate(b"\n")
            assert set(owner.result(60).handles()) == {"a"}
        owner.result().stop()
        owner.result().run()


def test_an_owner_tells_what_its_host_sees_of_a_file(tmp_path: Path) -> None:
    owner = ArenaOwner({})
    (tmp_path / "plan.json").write_text("{}")
    assert owner.digest_of(str(tmp_path / "plan.json")) == hashlib.sha256(b"{}").hexdigest()
    assert owner.digest_of(str(tmp_path / "none.json")) is None


def test_what_gathers_slots_is_a_stage_of_its_own() -> None:
    """It begins after the upload, beside what computes; whoever waits for it has its error."""
    device = CpuDevice(Timeline(lambda stage, op: 2.0 if stage is Stage.ALL_GATHER else 1.0))
    done: list[str] = []

    def fail() -> None:
        raise LostPeerError("gone")

    try:
        with device.compute(Op("forward", 0)):
            pass
        loaded = device.copy(Stage.H2D, torch.zeros(4), torch.ones(4), Op("load", 1), [])
        completed = device.all_gather(lambda: done.append("completed"), Op("all-gather", 1), loaded, 5.0)
        completed.synchronize()
        assert done == ["completed"]
        assert (loaded.at_s, completed.at_s) == (2.0, 4.0), "the host had seen the forward end"
        lost = device.all_gather(fail, Op("all-gather", 2), completed, 5.0)
        with pytest.raises(LostPeerError):
            device.wait(lost, "h2d")
    finally:
        device.close()


def test_a_run_dir_that_another_host_does_not_share_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"arena owner": "one", "arena owner of host 1": "another"}
    asked: list[str] = []

    class Owner:
        """Stands in for an owner of arenas whose actor answers at once."""

        def __init__(self, name: str) -> None:
            self.name, self.actor, self.digest_of = name, self, self

        def remote(self, path: str) -> str:
            asked.append(path)
            return seen[self.name]

    def check() -> None:
        place, owners = SimpleNamespace(addresses=["10.0.0.1", "10.0.0.2"]), [Owner(name) for name in seen]
        run_spec = SimpleNamespace(config=SimpleNamespace(run_dir="/runs/a"))
        host_roles.check_run_dir(run_spec, place, owners, lambda: None)  # type: ignore[arg-type]

    monkeypatch.setattr(actor_role, "answer", lambda late, call, check: call)
    monkeypatch.setattr(host_roles, "SAME_S", 0.0)
    with pytest.raises(ConfigError) as refused:
        check()
    assert str(refused.value) == (
        "run_dir: /runs/a on 10.0.0.2 (host 1) is not the folder that it is here, and every host saves into it; give "
        "an absolute path on a file system that all share"
    )
    assert set(asked) == {"/runs/a/plan.json"}
    seen["arena owner of host 1"] = "one"
    check()
