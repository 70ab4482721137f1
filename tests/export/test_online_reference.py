"""The reference of a run that samples its answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.driver.logprob_pass import ModelIdentity
from megatrain_ray.export.online_reference import warn_of_change


def test_another_reference_than_at_the_last_start_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reference.json"
    first, other = (ModelIdentity({"save": save}, [["/runs/a/manifest.json", 7, 9]]) for save in ("one", "two"))
    warn_of_change(file, first)
    warn_of_change(file, first)
    assert not capsys.readouterr().err
    warn_of_change(file, other)
    assert capsys.readouterr().err.startswith("warning: the reference is another model than at the last start")
    warn_of_change(file, other)
    assert not capsys.readouterr().err, "said once"
