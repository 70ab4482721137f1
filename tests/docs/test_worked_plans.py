"""docs/worked_plans.md: every line that it shows of a plan is one that the command prints on 16 cores."""

from __future__ import annotations

import re
import shlex

import pytest

from megatrain_ray.machine import machine
from megatrain_ray.machine.numa_topology import Topology
from tests.support.runs import ROOT, cli_here

PAGE = (ROOT / "docs" / "worked_plans.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ megatrain (plan [^\n]+)\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page_has_its_six_examples() -> None:
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(*example, id=name, marks=[] if name == "7.6b" else [pytest.mark.long])
        for example, name in zip(EXAMPLES, ("120b", "72b", "72b in 128 GB", "7.6b", "105b", "512k"), strict=True)
    ],
)
def test_a_plan_is_what_the_page_says(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: 16)
    monkeypatch.setattr(machine, "read_topology", lambda root: Topology((), frozenset(), {}))
    monkeypatch.setattr(machine, "total_memory_bytes", lambda: None)  # also where there is a GPU
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # no disk was measured
    monkeypatch.chdir(ROOT)
    done = cli_here(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert set(shown.splitlines()) <= set(done.stdout.splitlines())
