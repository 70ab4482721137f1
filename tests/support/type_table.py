"""Writes the tables of model types into docs/, from the results of benchmarks/model_types.py.

Run as a module it renews the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
RESULTS = ROOT / "benchmarks" / "results"
NEWEST, *OLDER = (f"2026-11-26_2core_model_types_{version}.json" for version in ("5.24", "5.23.0", "4.57.6"))
BEGIN, END = "<!-- table begin -->\n", "<!-- table end -->\n"
Row = Mapping[str, str]

# Why a type is refused: a pattern of the message, and what the table says.
REASONS = (
    ("encoder-decoder", "encoder-decoders"),
    ("see later ones", "tokens see later ones"),
    ("no causal language model", "no causal language model in Transformers"),
    (r"pixel_values|'state'|mm_token_type_ids|shared_kv_states|image_outputs", "the forward needs more than a text"),
    ("between its layers|calls its layers|belongs to no layer", "layers in loops, parameters between layers"),
    ("requires the timm library|default_language|builds no|no default", "no default configuration that runs here"),
    ("Transformers itself reads no|is none that this version", "Transformers does not read what it writes"),
    ("has to be a multiple|sequence length", "the row must have a certain length"),
    ("cannot be traced", "the forward on a text cannot be traced"),
)


def result_of(row: Row) -> str:
    """Return the group of the table that a row belongs to."""
    if "failed" in row:
        return "fails where it is built or at its first step"
    if row["fp32"].startswith("refused"):
        return "refused: " + next(text for pattern, text in REASONS if re.search(pattern, row["fp32"]))
    if row["fp32"] != "equal" or not (row["packed"] == "equal" or row["packed"].startswith("refused")):
        return "last bits differ"
    packs = "packed too" if row["packed"] == "equal" else "not packed"
    if "in FP32" in row["bf16"]:
        return f"bit-equal in FP32, {packs}; BF16 refused"
    return f"bit-equal in FP32 and BF16, {packs}" if row["bf16"] == "equal" else "last bits differ"


def table() -> str:
    """Return the tables in Markdown: every type with the newest release, and what differs with the others."""
    newest = _report(NEWEST)
    groups = {row["model_type"]: result_of(row) for row in newest["rows"]}
    lines = [f"| Transformers {newest['transformers']} | types |", "|---|---|", *_lines(groups)]
    for name in OLDER:
        report = _report(name)
        found = {row["model_type"]: result_of(row) for row in report["rows"]}
        others = {kind: group for kind, group in found.items() if groups.get(kind) != group}
        lines += ["", f"| Transformers {report['transformers']} | types |", "|---|---|"]
        lines += [f"| as above ({len(found) - len(others)}) | {_counts(found, others)} |", *_lines(others)]
    return "\n".join(lines) + "\n"


def _report(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _lines(groups: Mapping[str, str]) -> list[str]:
    """Return a line for each group: its number of types, and their names. `groups`: by type."""
    types: dict[str, list[str]] = {}
    for kind, group in groups.items():
        types.setdefault(group, []).append(kind)
    order = sorted(types, key=lambda group: (group.startswith("refused"), -len(types[group])))
    return [f"| {group} ({len(types[group])}) | {', '.join(sorted(types[group]))} |" for group in order]


def _counts(found: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Return how many types of those that are no `others` are bit-equal and refused."""
    same = [group for kind, group in found.items() if kind not in others]
    refused = sum(group.startswith("refused") for group in same)
    return f"{len(same) - refused} bit-equal, {refused} refused"


def write_docs() -> None:
    """Put the tables between the page's marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    write_docs()
