"""Writes the table of model types into docs/, from the results of benchmarks/model_types.py.

Run as a module it renews the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "families.md"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-26_2core_model_types_5.24.json"
BEGIN, END = "<!-- table begin -->\n", "<!-- table end -->\n"
Row = Mapping[str, str]

# Why a type is refused: a pattern of the message, and what the table says.
REASONS = (
    ("encoder-decoder", "encoder-decoders"),
    ("see later ones", "tokens see later ones"),
    ("no causal language model", "no causal language model in Transformers"),
    (r"pixel_values|'state'|mm_token_type_ids|shared_kv_states|image_outputs", "the forward needs more than a text"),
    ("between its layers|calls its layers|belongs to no layer", "layers in loops, parameters between layers"),
    ("requires the timm library|default_language|builds no", "no default configuration that runs here"),
    ("Transformers itself reads no", "Transformers does not read what it writes"),
    ("has to be a multiple|sequence length", "the row must have a certain length"),
    ("cannot be traced", "the forward depends on values of tokens"),
)


def result_of(row: Row) -> str:
    """Return the group of the table that a row belongs to."""
    if row["fp32"].startswith("refused"):
        return "refused: " + next(text for pattern, text in REASONS if re.search(pattern, row["fp32"]))
    if row["fp32"] != "equal":
        return "last bits differ"
    packs = "packed too" if row["packed"] == "equal" else "not packed"
    if "in FP32" in row["bf16"]:
        return f"bit-equal in FP32, {packs}; BF16 refused"
    return f"bit-equal in FP32 and BF16, {packs}" if row["bf16"] == "equal" else "last bits differ"


def table() -> str:
    """Return the table in Markdown."""
    report = json.loads(RESULTS.read_text())
    groups: dict[str, list[str]] = {}
    for row in report["rows"]:
        groups.setdefault(result_of(row), []).append(row["model_type"])
    order = sorted(groups, key=lambda group: (group.startswith("refused"), -len(groups[group])))
    lines = [f"| Transformers {report['transformers']} | types |", "|---|---|"]
    lines += [f"| {group} ({len(groups[group])}) | {', '.join(sorted(groups[group]))} |" for group in order]
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    """Put the table between the page's marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    write_docs()
