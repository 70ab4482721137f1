"""Implements `megatrain report`: writes a run's files as one self-contained HTML page (docs/report.md)."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatrain_ray import __version__
from megatrain_ray.engine.layout.tier import Tier
from megatrain_ray.engine.plan.plan import Plan
from megatrain_ray.errors import ConfigError
from megatrain_ray.escapes import escaped
from megatrain_ray.io.files.atomic_file import left_by_kills, write_atomically
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.read_file import regular_file
from megatrain_ray.report.measured_starts import compare_starts, compared_terms
from megatrain_ray.report.run_header import describe_run, headline, other_settings, resumes
from megatrain_ray.report.run_state import RunState, read_state
from megatrain_ray.report.sound_rows import is_number, sound
from megatrain_ray.run.run_files import REPORT_NAME, RunFiles
from megatrain_ray.run.run_history import read_history
from megatrain_ray.units import format_bytes, format_count

if TYPE_CHECKING:
    from megatrain_ray.report.charts import Chart

log = logging.getLogger(__name__)

TITLE_END = "– megatrain</title>"  # the template contains it as well
TEMPLATE = "report.html.jinja"
TIER_NAMES = {Tier.HBM: "Device memory (HBM)", Tier.HOST: "Host memory", Tier.NVME: "Disk (NVMe)"}
Rows = Sequence[Mapping[str, Any]]


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run and return its path. A run may still be active: the page shows it so far.

    out: file to write; None: report.html in the run directory.

    Raises ConfigError if `run_dir` holds no run, or if `out` exists and is no such page. Raises MegatrainError if the
    page cannot be written.
    """
    files = RunFiles(run_dir.absolute())
    if out is not None and out.exists():
        with explained("read", out), regular_file(out).open("rb") as page:
            is_report = TITLE_END.encode() in page.read(4096)
        if not is_report:
            raise ConfigError(f"{out} exists and is no report: nothing else is overwritten; name another file")
    out, content = out or files.path / REPORT_NAME, render(files, time.time())
    with _locked(out) as is_alone:
        for left in left_by_kills(out.parent, [out.name]) if is_alone else ():
            left.unlink(missing_ok=True)
        write_atomically(out, content)
    return out


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Lock the folder of a file, if it can be locked. Yield whether no other process writes a report there."""
    with explained("write", out):
        folder = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except OSError:  # also of file systems that cannot lock a folder
        is_alone = False
    try:
        yield is_alone
    finally:
        os.close(folder)


@contextmanager
def report_at_end(run_dir: Path) -> Iterator[None]:
    """Write the page when the block ends, with or without an exception. A failure to write it is only logged."""
    try:
        yield
    finally:
        try:
            write_report(run_dir)
        except Exception as error:  # must not hide the run's own error, or fail a good run
            log.warning("no report was written", exc_info=error)


def render(files: RunFiles, now_s: float) -> str:
    """Return the page as text, as of `now_s` (seconds since 1970). Raises ConfigError if the run cannot be read."""
    config, rows, evaluations = files.read_config(), sound(files.rows()), sound(files.evaluations())
    state, plan = read_state(files, config, rows, now_s), files.read_plan()
    history = read_history(files.path)
    resumed = sorted(set(resumes(history)))
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template(TEMPLATE).render(
        name=files.path.name,
        made=_moment(now_s),
        version=__version__,
        state=state.state.value,
        state_lines=list(state.lines()),
        run=describe_run(files, config, plan, history),
        headline=headline(rows, evaluations),
        facts=_facts(rows, evaluations, state),
        resumed=resumed,
        charts=_charts(rows, evaluations, resumed),
        tiers=list(_tiers(plan, rows)) if plan else [],
        comparisons=[
            (f"steps {found.first_step:,} to {found.last_step:,}, plan {found.plan_sha256[:12]}", compared_terms(found))
            for found in reversed(compare_starts(files))
        ],
        events=[_event(row) for row in history],
        surroundings=_surroundings(history),
        settings=other_settings(config),
    )
    return escaped(page, keep="\n")


def _facts(rows: Rows, evaluations: Rows, state: RunState) -> dict[str, str]:
    facts = {}
    usual = [row for row in rows[1:] or rows if _number(row, "step_s")]
    if rows and (epoch := rows[-1].get("epoch")) is not None:
        facts["epoch"] = f"{epoch:.3g}"
    if usual:
        facts["median step"] = f"{statistics.median(row['step_s'] for row in usual):.3g} s"
    for key, name in (("tokens_per_s", "tokens/s"), ("model_tflops", "model TFLOPS")):
        if values := [value for row in usual if (value := _number(row, key)) is not None]:
            facts[name] = format_count(statistics.median(values))
    if tokens := sum(_number(row, "tokens") or 0 for row in rows):
        facts["supervised tokens"] = format_count(tokens)
    if skipped := sum(row.get("skipped") is True for row in rows):
        facts["skipped updates"] = f"{skipped:,}"
    if state.faults:
        facts["deaths"] = f"{len(state.faults):,}"
    return facts


def _charts(rows: Rows, evaluations: Rows, resumed: Sequence[int]) -> list[Chart]:
    from megatrain_ray.report.charts import line_chart, stacked_chart  # imports Matplotlib, which takes a second

    every = [*rows, *evaluations]
    if not every:
        return []
    steps = min(row["step"] for row in every), max(row["step"] for row in every)
    of_steps = (
        ("Learning rate", "learning rate", "lr"),
        ("Gradient norm before clipping", "gradient norm", "grad_norm"),
        ("Tokens a second", "tokens/s", "tokens_per_s"),
        ("Model TFLOPS", "model TFLOPS", "model_tflops"),
    )
    has_rewards = any("eval_completion_tokens" in row for row in evaluations)  # whose loss is no cross-entropy
    losses = {"training": _points(rows, "loss"), "held out": [] if has_rewards else _points(evaluations, "eval_loss")}
    rewards = {name: _points(rows, f"reward_{name}") for name in ("chosen", "rejected")}
    rewards |= {"sampled": _points(rows, "reward"), "held out": _points(evaluations, "eval_reward")}
    clipped = {name: _points(rows, f"clipped_{name}") for name in ("low", "high")}
    preferred = {"training": _points(rows, "reward_accuracy"), "held out": _points(evaluations, "eval_reward_accuracy")}
    divergence = {"training": _points(rows, "kl"), "held out": _points(evaluations, "eval_kl")}
    drawn = [
        line_chart("Loss, nats", losses, steps, from_zero=False, resumes=resumed),
        line_chart("Mean reward of the answers", rewards, steps, from_zero=False, resumes=resumed),
        line_chart("Share of preferences whose chosen answer has more reward", preferred, steps, resumes=resumed),
        line_chart("KL divergence from the reference", divergence, steps, resumes=resumed),
        line_chart("Share of tokens whose ratio is clipped", clipped, steps, resumes=resumed),
        *(line_chart(title, {name: _points(rows, key)}, steps, resumes=resumed) for title, name, key in of_steps),
        stacked_chart("Where a step's seconds went", list(_parts(rows)), "s"),
    ]
    return [chart for chart in drawn if chart]


def _points(rows: Rows, key: str) -> list[tuple[int, float]]:
    return [(row["step"], value) for row in rows if (value := _number(row, key)) is not None]


def _parts(rows: Rows) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield for each step the seconds of compute and of its waits by cause."""
    causes = next((list(row["exposed_s"]) for row in reversed(rows) if "exposed_s" in row), [])
    for row in rows:
        exposed, step_s = row.get("exposed_s"), _number(row, "step_s")
        if isinstance(exposed, Mapping) and step_s is not None:
            waits = {escaped(cause).replace("_", " "): max(0.0, _number(exposed, cause) or 0.0) for cause in causes}
            yield row["step"], {"compute": max(0.0, step_s - sum(waits.values())), **waits}


def _tiers(plan: Plan, rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield for each tier the bytes that the plan needs, item by item, and the bytes that were measured."""
    measured = {Tier.HBM: ("hbm_peak_bytes", "tensors, the most so far"), Tier.HOST: ("host_bytes", "shared memory")}
    for tier, name in TIER_NAMES.items():
        planned = [row for row in plan.memory_items if row.tier is tier and row.num_bytes]
        if not planned:
            continue
        key, of_what = measured.get(tier, ("", ""))
        values = [value for row in rows if key and (value := _number(row, key)) is not None]
        largest = max(row.num_bytes for row in planned)
        yield {
            "name": name,
            "planned": format_bytes(plan.total_bytes(tier)),
            "measured": f"{format_bytes(int(max(values)))} {of_what}" if values else "",
            "rows": [(x.name, format_bytes(x.num_bytes), x.formula, 100 * x.num_bytes / largest) for x in planned],
        }


def _event(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return time, kind and details of an event of the run's history."""
    match row["what"]:
        case "start":
            changed = row["changed"].items() if isinstance(row.get("changed"), Mapping) else ()
            details = "".join(
                [
                    f"from step {row.get('step')} to {row.get('steps')} on {row.get('host', 'an unknown machine')}",
                    *(f", {key} {' → '.join(map(str, values))}" for key, values in changed),
                ]
            )
        case "died":
            details = f"{row.get('process')}, after step {row.get('step')}"
        case "replaced":
            details = f"{row.get('process')}, in {_number(row, 'took_s') or math.nan:.1f} s"
        case "memory":
            details = f"host memory of all processes: {format_bytes(int(_number(row, 'pss_bytes') or 0))}"
        case _:
            details = f"{row.get('how', '')}{': ' if row.get('reason') else ''}{row.get('reason') or ''}"
    return _moment(row["unix_s"]), str(row["what"]), details


def _surroundings(history: Rows) -> dict[str, str]:
    """Return hardware and versions of the newest start, by name."""
    start = next((row for row in reversed(history) if row["what"] == "start"), {})
    groups = (group for key in ("hardware", "versions") if isinstance(group := start.get(key), Mapping))
    return {
        key.removesuffix("_bytes").replace("_", " "): _format_value(key, value)
        for group in groups
        for key, value in group.items()
        if value is not None
    }


def _format_value(key: str, value: Any) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """Return a number of the row; None if it is missing or not finite."""
    value = row.get(key)
    return value if is_number(value) else None


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
