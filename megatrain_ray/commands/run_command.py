"""Runs the commands: each function takes the parsed options, prints what the command says, and returns the exit code.

Torch and Ray are imported inside the functions, so that a wrong key of a configuration is reported at once.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields

from megatrain_ray.bench.bench_config import BenchOptions, bench_config
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.logs import print_lines, show
from megatrain_ray.console.startup import spinner
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.files.scratch_folder import scratch_folder
from megatrain_ray.machine.no_collections import no_collections


def train(options: Namespace) -> int:
    config = load_config(options.config, options.overrides)
    with spinner("importing PyTorch and Ray"), no_collections():
        from megatrain_ray.console.run_summary import summarize
        from megatrain_ray.io.saves.save_folder import list_saves
        from megatrain_ray.run.best_evaluation import describe_harm
        from megatrain_ray.run.run_files import RunFiles
        from megatrain_ray.trainer import Trainer

    output = Trainer(args=config).train()
    if output.first_step is None:  # there was nothing to do, as the Trainer has printed
        return 0
    rows = [row for row in output.rows if row["step"] > output.first_step]
    loss = f", loss {rows[-1]['loss']:z.4f}" if rows and rows[-1]["loss"] is not None else ""
    show(f"done: step {output.global_step}{loss} ({output.run_dir})")
    files = RunFiles(output.run_dir)
    plan, best_save = files.read_plan(), files.best_save
    harm = describe_harm(output.evaluations)
    ways = {"chats": config.data.has_chats, "generates": config.train.objective != "reward"}
    has_save = bool(list_saves(files.saves))  # an evaluation alone (train.steps: 0) makes none
    for line in summarize(rows, output.run_dir, output.evaluations, plan, best_save, harm, **ways, has_save=has_save):
        show(f"  {line}")
    return 0


def plan(options: Namespace) -> int:
    config = load_config(options.config, options.overrides)
    with spinner("importing PyTorch"):
        from megatrain_ray.commands.plan import show_plan

    show_plan(config, as_json=options.json, what_if=options.what_if, price_per_hour=options.price)
    return 0


def data(options: Namespace) -> int:
    config = load_config(options.config, options.overrides)
    with spinner("importing PyTorch"):
        from megatrain_ray.commands.show_data import show_data

    show_data(config)
    return 0


def bench(options: Namespace) -> int:
    settings = BenchOptions(**{field.name: getattr(options, field.name) for field in fields(BenchOptions)})
    with scratch_folder("bench") as folder:
        config = bench_config(options.config, options.overrides, settings, folder / "run")
        with spinner("importing PyTorch and Ray"):
            from megatrain_ray.bench.bench import measure
            from megatrain_ray.bench.bench_report import print_table, to_json, to_report

        results = to_report(measure(config, settings), settings)
    if options.json:
        show(*to_json(results).split("\n"))
    else:
        print_table(results)
    return 0


def export(options: Namespace) -> int:
    with spinner("exporting"):
        from megatrain_ray.export.remote_export import export_by_name

        report = export_by_name(
            options.run_dir, options.out_dir, options.dtype, merge=options.merge, step=options.step,
            extras=options.extras,
        )  # fmt: skip
    print_lines(*report.lines)
    if report.is_no_better:
        show("warning: no evaluated save of the run is better than the model before training (megatrain inspect)")
    return 0


def evaluate(options: Namespace) -> int:
    with spinner("importing PyTorch and Ray"):
        from megatrain_ray.commands.evaluate import evaluate as evaluate_model

    show(evaluate_model(options))
    return 0


def logprobs(options: Namespace) -> int:
    with spinner("importing PyTorch and Ray"):
        from megatrain_ray.commands.logprobs import logprobs as compute

    for line in compute(options):
        show(line)
    return 0


def generate(options: Namespace) -> int:
    from megatrain_ray.commands.generate import generate_text

    generate_text(options)
    return 0


def inspect(options: Namespace) -> int:
    from megatrain_ray.report.inspect_run import inspect_run, state_of_run
    from megatrain_ray.run.run_files import RunFiles

    if RunFiles(options.run_dir.absolute()).is_starting:
        print_lines("state", "  starting: data, plan and processes are prepared, and no step is made yet")
        return 0
    print_lines(*state_of_run(options.run_dir).split("\n"))  # at once: with --verify the rest takes a while
    text, good = inspect_run(options.run_dir, with_config=options.config, verify_saves=options.verify)
    print_lines(*text.split("\n"))
    return 0 if good else MegatrainError.exit_code


def report(options: Namespace) -> int:
    from megatrain_ray.report.html_report import write_report

    print_lines(f"wrote {write_report(options.run_dir, options.out)}")
    return 0


def refit(options: Namespace) -> int:
    from megatrain_ray.commands.refit import refit as write_profile

    print_lines(*write_profile(options.run_dir, options.out).report)
    print_lines(f"wrote {options.out}; hardware.profile={options.out} plans with it")
    return 0


def doctor(options: Namespace) -> int:
    from megatrain_ray.commands.doctor import examine
    from megatrain_ray.commands.doctor_numa import Severity
    from megatrain_ray.config.groups import HardwareConfig
    from megatrain_ray.machine.machine import machine_of
    from megatrain_ray.profiling.profiles import measure_everything
    from megatrain_ray.profiling.spill_disk import forget_rates

    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is no folder: name the one where runs will be")
    if options.measure:
        measure_everything(machine_of(HardwareConfig()).device)
        forget_rates()
    states = set()
    for finding in examine(options.folder):
        print_lines(str(finding))
        states.add(finding.severity)
    return MegatrainError.exit_code if Severity.STOP in states else 0


def tokenizer(options: Namespace) -> int:
    from megatrain_ray.commands.train_tokenizer import train_tokenizer

    num_ids = train_tokenizer(
        options.paths,
        options.out,
        vocab_size=options.vocab_size,
        text_field=options.field,
        specials=options.special,
        bad_records=options.bad_records,
    )
    fewer = f": the corpus has no more pairs to merge for {options.vocab_size}" if num_ids < options.vocab_size else ""
    print_lines(f"wrote {num_ids} ids to {options.out}{fewer}; data.tokenizer: {options.out}")
    return 0


def convert_config(options: Namespace) -> int:
    from megatrain_ray.convert.convert_config import convert

    if options.gpus < 1:
        raise ConfigError(f"--gpus: {options.gpus}: expected 1 or more")
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out: {options.out} exists: nothing is overwritten; name another one")
    lenient = options.ignore_unsupported
    found = convert(options.config, options.overrides, num_gpus=options.gpus, lenient=lenient)
    print_lines(*found.report, stream=sys.stderr)
    if found.refused and not lenient:
        raise ConfigError(
            "some keys cannot be honoured (see above): change them, or leave them out with --ignore-unsupported"
        )
    if options.out is None:
        print_lines(*found.text.removesuffix("\n").split("\n"))
    else:
        options.out.write_text(found.text, encoding="utf-8")
        print_lines(f"wrote {options.out}; megatrain plan {shlex.quote(str(options.out))} says whether it fits")
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "train": train,
    "plan": plan,
    "data": data,
    "bench": bench,
    "export": export,
    "generate": generate,
    "eval": evaluate,
    "logprobs": logprobs,
    "inspect": inspect,
    "report": report,
    "refit": refit,
    "doctor": doctor,
    "tokenizer": tokenizer,
    "convert-config": convert_config,
}
