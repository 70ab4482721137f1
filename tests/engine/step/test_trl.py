"""The recorded losses of TRL, with which ours are compared, are those that TRL's trainers make today."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.engine.step import test_distillation, test_kto, test_pairs, test_policy, test_reward
from tests.support.runs import ROOT

RECORDED: dict[str, Mapping[object, Sequence[float]]] = {
    "make_trl_losses": {
        **test_distillation.BY_TRL,
        **{preference: losses for preference, (_, losses) in test_pairs.BY_TRL.items()},
        "reward": test_reward.BY_TRL,
    },
    "make_kto_losses": {**test_kto.BY_TRL},
    "make_trl_policy_losses": {
        **test_policy.BY_TRL,
        **{("ten steps", policy): losses for policy, losses in test_policy.TEN_BY_TRL.items()},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("module", RECORDED)
def test_trl_makes_the_recorded_losses(module: str) -> None:
    pytest.importorskip("trl")
    command = [sys.executable, "-m", f"tests.support.{module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    found = {name: json.loads(losses) for name, losses in lines}
    assert found.keys() == {str(name) for name in RECORDED[module]}
    for name, losses in RECORDED[module].items():
        assert found[str(name)] == pytest.approx(losses, rel=1e-5, abs=1e-6), name
