"""Whether the Ray node of this machine, or of each of several hosts, has what a run asks of it. A resource that is not
there is named at once; Ray itself would wait for a machine to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from megatrain_ray.errors import CapacityError, ConfigError

Bundle = Mapping[str, float]
HEAD = "node:__internal_head__"
A_BIT = 0.001  # of the resource that every node has one of: who asks for it is placed there


def this_node() -> dict[str, Any]:
    """Ray's node that this process is connected through."""
    here = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == here)


def place_here(bundles: Sequence[Bundle], node: Mapping[str, Any]) -> list[dict[str, float]]:
    """The same bundles, to be placed on that node: driver and actors share memory."""
    name = next(name for name in node["Resources"] if name.startswith("node:") and name != HEAD)
    first, *others = bundles
    return [{**first, name: A_BIT}, *map(dict, others)]


def asked_of(bundles: Sequence[Bundle]) -> dict[str, float]:
    """All bundles together, rounded as Ray counts: ten thousandths."""
    names = {name: None for bundle in bundles for name in bundle}
    return {name: round(sum(bundle.get(name, 0.0) for bundle in bundles), 4) for name in names}


def check_node(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]], node: Mapping[str, Any]) -> None:
    """Raises CapacityError naming the resource of which `node` has less than is asked for, whoever has it now."""
    for name, asked in asked_of(bundles).items():
        there = node["Resources"].get(name, 0.0)
        if there < asked:
            raise CapacityError(
                f"the Ray cluster lacks {name} on this machine: the run asks for {asked:g}, the node "
                f"{node['NodeManagerAddress']} has {there:g}; {_advice(name, asked, nodes)}"
            )


def check_hosts(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises CapacityError where fewer living nodes than `bundles`, which are alike, have what one asks for."""
    if short := lacking_hosts(bundles, nodes):
        able = max(1, len(_able(bundles[0], nodes)))
        raise CapacityError(
            f"hardware.num_hosts: {len(bundles)}, and {short}; start Ray on more machines, or set hardware.num_hosts "
            f"to at most {able}"
        )


def lacking_hosts(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Which nodes there are, where these are too few."""
    able = _able(bundles[0], nodes)
    if len(able) >= len(bundles):
        return ""
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in bundles[0].items())
    return f"{len(able)} of the Ray cluster's nodes have what a host needs ({asked}): {', '.join(able) or 'none'}"


def _able(bundle: Bundle, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Addresses of living nodes that have all of it, whoever uses it now."""
    having = [node for node in nodes if node["Alive"] and not lacking([bundle], node["Resources"])]
    return sorted(node["NodeManagerAddress"] for node in having)


def check_device(asked: str, found: str, nodes: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Raises ConfigError where `auto` means the CPU because the driver is not where the cluster's GPUs are.

    asked, found: hardware.device as it is set, and as it was resolved on this machine.
    nodes: as `ray.nodes` lists them; None: asks it.
    """
    nodes = ray.nodes() if nodes is None else nodes
    if asked == "auto" and found == "cpu" and (others := _with("GPU", 1.0, nodes)):
        raise ConfigError(
            f"hardware.device: torch sees no GPU on this machine, but the cluster has some on {', '.join(others)}; "
            "start the driver there (deploy/README.md), or train on the CPU: hardware.device=cpu"
        )


def lacking(bundles: Sequence[Bundle], free: Mapping[str, float]) -> str:
    """What of the bundles is in use by others, with the numbers."""
    short = {name: asked for name, asked in asked_of(bundles).items() if free.get(name, 0.0) < asked}
    return ", ".join(f"{name} ({asked:g} asked for, {free.get(name, 0.0):g} free)" for name, asked in short.items())


def _with(name: str, amount: float, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Addresses of living nodes that have so much of it."""
    return [node["NodeManagerAddress"] for node in nodes if node["Alive"] and node["Resources"].get(name, 0) >= amount]


def _advice(name: str, asked: float, nodes: Sequence[Mapping[str, Any]]) -> str:
    if others := _with(name, asked, nodes):
        return f"{', '.join(others)} has: start the driver there (deploy/README.md)"
    if name == "GPU":
        return "start its Ray with --num-gpus=1, or train on the CPU: hardware.device=cpu"
    return f"start its Ray with more, as in --num-cpus={max(1, round(asked + 0.5))}"
