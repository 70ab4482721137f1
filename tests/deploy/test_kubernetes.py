"""Manifests of deploy/kuberay, as far as that can be checked without a cluster: fields and types, what a pod has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.manifests import IMAGE, cluster_of, pod_of, read

MANIFESTS = ["kuberay/rayjob.yaml", "kuberay/raycluster.yaml", "kuberay/rayjob_hosts.yaml"]

# Of ray.io/v1 what the manifests use, with the types of its schema.
POD = {
    "shareProcessNamespace": bool, "terminationGracePeriodSeconds": int, "containers": list, "initContainers": list,
    "volumes": list, "securityContext": dict,
}  # fmt: skip
CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str},
    "headGroupSpec": {"rayStartParams": {str: str}, "template": {"spec": POD}},
    "workerGroupSpecs": [
        {
            "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "rayStartParams": {str: str},
            "template": {"spec": POD},
        }
    ],
}  # fmt: skip
JOB = {
    "entrypoint": str, "runtimeEnvYAML": str, "submissionMode": str, "backoffLimit": int, "rayClusterSpec": CLUSTER,
    "shutdownAfterJobFinishes": bool, "ttlSecondsAfterFinished": int,
}  # fmt: skip
TOP = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
CONTAINER = {
    "name": str, "image": str, "command": [str], "ports": [{"containerPort": int, "name": str}],
    "env": [{"name": str, "value": str}], "resources": {"requests": {str: str}, "limits": {str: str}},
    "lifecycle": {"preStop": {"exec": {"command": [str]}}}, "volumeMounts": [{"mountPath": str, "name": str}],
    "securityContext": dict,
}  # fmt: skip


def misfits(tree: Any, schema: Any, at: str = "") -> Iterator[str]:
    """Yield the places where the tree has a field that the schema has not, or a value of another type."""
    if isinstance(schema, dict) and isinstance(tree, dict):
        for key, value in tree.items():
            inner = schema.get(key, schema.get(type(key)))
            yield from [f"{at}.{key}: no such field"] if inner is None else misfits(value, inner, f"{at}.{key}")
    elif isinstance(schema, list) and isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from misfits(value, schema[0], f"{at}.{number}")
    elif not isinstance(schema, type) or type(tree) is not schema:
        yield f"{at}: {tree!r:.40} is no {schema}"


def test_manifests_have_fields_that_there_are() -> None:
    assert list(misfits(read(MANIFESTS[0]), {**TOP, "spec": JOB})) == []
    assert list(misfits(read(MANIFESTS[1]), {**TOP, "spec": CLUSTER})) == []
    assert list(misfits(read(MANIFESTS[2]), {**TOP, "spec": JOB})) == []
    assert cluster_of(MANIFESTS[0]) == cluster_of(MANIFESTS[1])
    assert [read(name)["apiVersion"] for name in MANIFESTS] == ["ray.io/v1"] * 3
    assert [read(name)["kind"] for name in MANIFESTS] == ["RayJob", "RayCluster", "RayJob"]


def test_the_job_of_several_hosts_has_a_worker_like_its_head_for_each() -> None:
    job, of_one = read(MANIFESTS[2]), read(MANIFESTS[0])
    [workers] = job["spec"]["rayClusterSpec"].pop("workerGroupSpecs")
    entrypoint = job["spec"]["entrypoint"]
    assert entrypoint.startswith(of_one["spec"].pop("entrypoint"))
    settings = dict(word.split("=") for word in entrypoint.split() if word.startswith("hardware."))
    num_hosts = 1 + workers["replicas"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    of_host = int(head["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert settings == {"hardware.num_hosts": str(num_hosts), "hardware.num_gpus": str(num_hosts * of_host)}
    assert head == of_one["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert workers["rayStartParams"].items() <= head["rayStartParams"].items()
    for of_head in (pod := pod_of(MANIFESTS[2]), pod["containers"][0]):
        for key in ("terminationGracePeriodSeconds", "ports", "lifecycle"):  # a hook, and whom others ask
            of_head.pop(key, None)
    [container] = workers["template"]["spec"]["containers"]
    container["name"] = pod["containers"][0]["name"]
    assert workers["template"]["spec"] == pod


def test_a_field_that_is_not_there_is_noticed() -> None:
    assert list(misfits({"backofLimit": 3, "entrypoint": 5}, JOB)) == [
        ".backofLimit: no such field",
        ".entrypoint: 5 is no <class 'str'>",
    ]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_has_what_a_run_needs(name: str) -> None:
    pod = pod_of(name)
    [head] = pod["containers"]
    assert list(misfits([head, *pod["initContainers"]], [CONTAINER])) == []
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in head["volumeMounts"]}
    assert {container["image"] for container in (head, *pod["initContainers"])} == {IMAGE}
    assert pod["shareProcessNamespace"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert head["resources"]["limits"]["nvidia.com/gpu"] == head["resources"]["requests"]["nvidia.com/gpu"] == "1"
    assert head["resources"]["limits"]["memory"] == head["resources"]["requests"]["memory"]
    assert "cpu" not in head["resources"]["limits"]
    assert cluster_of(name)["authOptions"]["mode"] == "token"  # the dashboard is not on loopback
