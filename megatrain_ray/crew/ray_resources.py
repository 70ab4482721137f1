"""Checks whether the Ray nodes have the resources that a run requests.

A missing resource is reported at once; Ray itself would wait for another machine to join.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from megatrain_ray.errors import CapacityError, ConfigError, DeadlineError

Bundle = Mapping[str, float]
HEAD = "node:__internal_head__"
A_BIT = 0.001  # amount of a node's own resource (`node:ADDRESS`, of which it has 1); a bundle with it is placed there


def show_own_gpus() -> None:
    """Let this process see only the GPUs that Ray assigned to it.

    Call it before torch looks for GPUs. Ray itself leaves all GPUs visible if a job sets
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (deploy/README.md).
    """
    if ids := ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def this_node() -> dict[str, Any]:
    """Return the entry of `ray.nodes` for the node that this process is connected through."""
    here = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == here)


def place_here(bundles: Sequence[Bundle], node: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the same bundles, with the first bound to `node`, since driver and actors share memory."""
    name = next(name for name in node["Resources"] if name.startswith("node:") and name != HEAD)
    first, *others = bundles
    return [{**first, name: A_BIT}, *map(dict, others)]


def asked_of(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Return the sum of all bundles, rounded to ten thousandths as Ray counts."""
    names = {name: None for bundle in bundles for name in bundle}
    return {name: round(sum(bundle.get(name, 0.0) for bundle in bundles), 4) for name in names}


def check_node(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]], node: Mapping[str, Any]) -> None:
    """Raise CapacityError naming a resource of which `node` has less than is requested, whoever uses it now."""
    for name, asked in asked_of(bundles).items():
        there = node["Resources"].get(name, 0.0)
        if there < asked:
            raise CapacityError(
                f"the Ray cluster lacks {name} on this machine: the run asks for {asked:g}, the node "
                f"{node['NodeManagerAddress']} has {there:g}; {_advice(name, asked, nodes)}"
            )


def check_hosts(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise CapacityError if fewer living nodes than `bundles`, which are alike, have what one of these requests."""
    if short := lacking_hosts(bundles, nodes):
        able = max(1, len(_able(bundles[0], nodes)))
        raise CapacityError(
            f"hardware.num_hosts: {len(bundles)}, and {short}; start Ray on more machines, or set hardware.num_hosts "
            f"to at most {able}"
        )


def lacking_hosts(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Return a text naming the nodes that have what a host needs if they are too few, else an empty text."""
    able = _able(bundles[0], nodes)
    if len(able) >= len(bundles):
        return ""
    asked = ", ".join(f"{name}: {amount:g}" for name, amount in bundles[0].items())
    return f"{len(able)} of the Ray cluster's nodes have what a host needs ({asked}): {', '.join(able) or 'none'}"


def _able(bundle: Bundle, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the addresses of living nodes that have all of a bundle, whoever uses it now."""
    having = [node for node in nodes if node["Alive"] and not lacking([bundle], node["Resources"])]
    return sorted(node["NodeManagerAddress"] for node in having)


def nodes_within(timeout_s: float) -> list[dict[str, Any]]:
    """Return `ray.nodes()`, which has no bound if the head is stopped. Raises DeadlineError after `timeout_s`."""
    found: list[list[dict[str, Any]]] = []
    asking = threading.Thread(target=lambda: found.append(ray.nodes()), name="nodes of Ray", daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not found:
        raise DeadlineError(f"Ray did not say within {timeout_s:.0f} s which nodes it has; the same command resumes")
    return found[0]


def check_device(asked: str, found: str) -> None:
    """Raise ConfigError if `auto` became the CPU because the driver is not where the cluster's GPUs are.

    asked, found: hardware.device as it is set, and as it was resolved on this machine.
    """
    if asked == "auto" and found == "cpu" and (others := _able({"GPU": 1.0}, ray.nodes())):
        raise ConfigError(
            f"hardware.device: torch sees no GPU on this machine, but the cluster has some on {', '.join(others)}; "
            "start the driver there (deploy/README.md), or train on the CPU: hardware.device=cpu"
        )


def lacking(bundles: Sequence[Bundle], free: Mapping[str, float]) -> str:
    """Return a text naming the resources of which less is free than requested, with the numbers; empty if none."""
    short = {name: asked for name, asked in asked_of(bundles).items() if free.get(name, 0.0) < asked}
    return ", ".join(f"{name} ({asked:g} asked for, {free.get(name, 0.0):g} free)" for name, asked in short.items())


def _advice(name: str, asked: float, nodes: Sequence[Mapping[str, Any]]) -> str:
    if others := _able({name: asked}, nodes):
        return f"{', '.join(others)} has: start the driver there (deploy/README.md)"
    if name == "GPU":
        return "start its Ray with --num-gpus=1, or train on the CPU: hardware.device=cpu"
    return f"start its Ray with more, as in --num-cpus={max(1, round(asked + 0.5))}"
