"""A manifest that was edited, and sealed again, is refused with what does not fit together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.errors import DamagedSaveError
from megatrain_ray.io.saves.manifest import (
    MANIFEST_NAME,
    WIDE_KIND,
    LayerEntry,
    ParameterEntry,
    _sealed,
    _unsealed,
    read_manifest,
)
from tests.support.saves import make_state, write_save

Edit = Callable[[dict[str, Any]], None]


def parameter(**values: Any) -> Edit:
    return lambda tree: tree["layers"][0]["parameters"][0].update(values)


def layer(**values: Any) -> Edit:
    return lambda tree: tree["layers"][0].update(values)


def blob(**values: Any) -> Edit:
    return lambda tree: tree["parts"][0]["blobs"][0].update(values)


def piece(**values: Any) -> Edit:
    return lambda tree: tree["parts"][0]["blobs"][0]["pieces"][0].update(values)


EDITS: dict[str, Edit] = {
    "step: 5 is not": lambda tree: tree.update(step=5),
    "step: -1 is not": lambda tree: tree.update(step=-1, optimizer_step=-2),
    "step: 1 is not": lambda tree: tree.update(num_skipped=7),
    "precision: fp32, though": lambda tree: tree.update(precision="fp32"),
    "precision: none\\x1b, though": lambda tree: tree.update(precision="none\x1b"),
    "itemsize: m: 4, expected None": lambda tree: tree.update(moments="fp8"),
    "itemsize: working: 4, expected 2": lambda tree: tree["itemsize"].update(working=4),
    "itemsize: x: 4, expected no such kind": lambda tree: tree["itemsize"].update(x=4),
    "layers: there are none": lambda tree: tree.update(layers=[], parts=[]),
    "layers: two have one name": lambda tree: tree["layers"].append(tree["layers"][0]),
    "of shape [-5]": parameter(shape=[-5]),
    "its parameters have 0 elements": parameter(shape=[0]),  # which is no fault by itself
    "from element 8 on, expected from 0": parameter(start=8),
    "expected logical_size": layer(logical_size=1 << 40),
    "num_frozen: -1": layer(num_frozen=-1),
    "num_muon: 1099511627776": layer(num_muon=1 << 40),
    "../../config.yaml is no name of a file": blob(name="../../config.yaml"),
    "is no name of a file in": blob(name="a\0b"),
    "elements once": piece(start=1),
    "expected each of": lambda tree: tree.update(parts=[]),
}


def edit_manifest(file: Path, edit: Edit) -> None:
    tree = json.loads(_unsealed(file.read_bytes()))
    edit(tree)
    file.write_bytes(_sealed(json.dumps(tree, separators=(",", ":")).encode()))


@pytest.mark.parametrize("problem", EDITS)
def test_a_forged_manifest_is_refused(problem: str, tmp_path: Path) -> None:
    file = write_save(tmp_path, 1, make_state("bf16")) / MANIFEST_NAME
    read_manifest(file.parent)
    edit_manifest(file, EDITS[problem])
    with pytest.raises(DamagedSaveError) as refusal:
        read_manifest(file.parent)
    assert problem in str(refusal.value)
    assert f"{file} is damaged: " in str(refusal.value)


def test_a_save_of_a_tf32_run_is_read(tmp_path: Path) -> None:
    """Its kinds of state are those of FP32, but it names its own precision."""
    folder = write_save(tmp_path, 1, make_state("fp32"), "fp32")
    edit_manifest(folder / MANIFEST_NAME, lambda tree: tree.update(precision="tf32"))
    assert read_manifest(folder).precision == "tf32"


def test_a_tied_parameter_begins_no_wide_values() -> None:
    parameters = (
        ParameterEntry("trained", (8,), 0),
        ParameterEntry("tied", (8,), 8, tied_to="trained", fp32=True),
        ParameterEntry("frozen", (4,), 8),
        ParameterEntry("router", (2,), 12, fp32=True),
    )
    entry = LayerEntry("layer", 14, parameters, num_frozen=6)
    assert entry.span_of("working") == (0, 12)
    assert entry.span_of(WIDE_KIND) == (12, 14)
