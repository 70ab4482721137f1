"""Implements the command line.

Torch and Ray are imported by the commands that need them, so that a wrong key is reported at once.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megatrain_ray import __version__
from megatrain_ray.bench.bench_config import BenchOptions, bench_config
from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.console.logs import is_unread, show, silence
from megatrain_ray.errors import ConfigError, InterruptedRunError, MegatrainError
from megatrain_ray.units import parse_size

UNREAD = 128 + signal.SIGPIPE  # exit code of a program that the signal ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0    done
    1    failed while running, with a traceback if the error was not expected
    2    a setting or input is wrong
    3    cannot fit
    130  interrupted
    141  nobody reads the output any more (`| head`)
    """
    try:
        try:
            return _answer(argv)
        finally:
            if sys.stdout:  # None if it is closed
                sys.stdout.flush()  # now: an error at the interpreter's end cannot be handled
    except BrokenPipeError:
        if not is_unread(sys.stdout):
            raise
        silence(sys.stdout)
        return UNREAD


def _answer(argv: Sequence[str] | None) -> int:
    options = _parse(argv)
    try:
        return _run(options)
    except InterruptedRunError as end:
        show(str(end), sys.stderr)
        return end.exit_code
    except MegatrainError as error:
        show(f"error: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        goes_on = ": nothing more was saved; the same command resumes" if options.command == "train" else ""
        show(f"interrupted{goes_on}", sys.stderr)
        return InterruptedRunError.exit_code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    # argparse does not recognize the overrides of `plan CONFIG --json key=value`.
    strangers = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatrain", description="Train large language models from host memory.")
    parser.add_argument("--version", action="version", version=f"megatrain-ray {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, or resume the run in run_dir")
    plan = commands.add_parser("plan", help="show where everything would live, and whether it fits")
    _add_plan(plan)
    bench = commands.add_parser("bench", help="measure a configuration's speed: its steps, and what they could reach")
    _add_bench(bench)
    for command in (train, plan, bench):
        command.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
        # Has a default, since argparse would else call overrides required if CONFIG is missing.
        command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as in train.lr=1e-4")
    export = commands.add_parser(
        "export", help="write the newest save as a Hugging Face folder, adapters as one of peft's"
    )
    export.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    export.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    export.add_argument("--dtype", choices=("bf16", "fp32"), help="default: the working copy's")
    export.add_argument("--merge", action="store_true", help="of a run with lora: the model with its adapters added in")
    inspect = commands.add_parser("inspect", help="how it stands, configuration, saves, last rows, checksums")
    inspect.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    report = commands.add_parser("report", help="a page about a run: curves, where time went, memory, faults")
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    report.add_argument("--out", type=Path, metavar="FILE", help="of HTML (RUN_DIR/report.html)")
    refit = commands.add_parser("refit", help="a hardware profile with the rates that a finished run measured")
    refit.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    refit.add_argument("out", type=Path, metavar="FILE", help="new file, for hardware.profile")
    doctor = commands.add_parser("doctor", help="what of this machine would stop a run or slow it down")
    doctor.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="where runs will be")
    doctor.add_argument("--measure", action="store_true", help="measure the rates that plans are made with, once more")
    _add_tokenizer(commands.add_parser("tokenizer", help="train a tokenizer on a corpus of your own"))
    _add_convert(commands.add_parser("convert-config", help="a YAML of LLaMA-Factory or Axolotl as one of ours"))
    return parser


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the plan as in plan.json")
    parser.add_argument(
        "--what-if", action="store_true", help="what other memory, or other tokens a step, would change"
    )
    parser.add_argument("--price", type=_price, metavar="PER_HOUR", help="of the machine: what the whole run costs")


def _price(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (price := float(text)) < math.inf:
            return price
    raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="all that was measured, and nothing else on standard output"
    )
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before those that count (2)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps that count (8)")
    parser.add_argument("--compare-in-process", action="store_true", help="the same steps once more without Ray")
    parser.add_argument("--no-ceiling", action="store_true", help="do not measure the resident ceiling")
    parser.add_argument("--no-trace", action="store_true", help="no step behind those that count, to be traced")
    parser.add_argument("--commit", metavar="HASH", help="of the code, where it is no git checkout")
    parser.add_argument(
        "--alias-host-memory",
        type=_size,
        metavar="SIZE",
        help="of RAM, as in 32GiB, that layers take in turn: for plans of machines with more; losses mean nothing",
    )


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="a byte-level BPE, written as a folder that data.tokenizer can name")
    train.add_argument("paths", nargs="+", metavar="PATH", help="file, folder or glob, as in data.path")
    train.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    train.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="ids, 256 bytes and specials included"
    )
    train.add_argument("--field", default="text", help="key or column that holds the text (text)")
    train.add_argument("--special", nargs="+", default=[], metavar="TOKEN", help="special tokens of your own")
    train.add_argument("--bad-records", choices=("error", "skip"), default="error", help="records without a text")


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="FILE", help="YAML file of theirs")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings of ours, as in train.steps=300"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="new file to write; default: standard output")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="that the file was meant for (1)")
    parser.add_argument(
        "--ignore-unsupported", action="store_true", help="leave out what cannot be honoured, which ends it otherwise"
    )


def _run(options: argparse.Namespace) -> int:
    commands: dict[str, Callable[[], int]] = {
        "train": lambda: _train(load_config(options.config, options.overrides)),
        "plan": lambda: _plan(load_config(options.config, options.overrides), options),
        "bench": lambda: _bench(options),
        "export": lambda: _export(options.run_dir, options.out_dir, options.dtype, merge=options.merge),
        "inspect": lambda: _inspect(options.run_dir),
        "report": lambda: _report(options.run_dir, options.out),
        "refit": lambda: _refit(options.run_dir, options.out),
        "doctor": lambda: _doctor(options.folder, measure=options.measure),
        "tokenizer": lambda: _train_tokenizer(options),
        "convert-config": lambda: _convert(options),
    }
    return commands[options.command]()


def _train(config: TrainConfig) -> int:
    from megatrain_ray.console.startup import spinner

    with spinner("importing PyTorch and Ray"):
        from megatrain_ray.console.run_summary import summarize
        from megatrain_ray.run.run_dir import RunFiles
        from megatrain_ray.trainer import Trainer

    summary = Trainer(config).fit()
    if summary.loss is None and not summary.evaluations:
        show(f"already at step {summary.step} of {config.train.steps}: nothing to do ({summary.run_dir})")
        return 0
    loss = "" if summary.loss is None else f", loss {summary.loss:.4f}"
    show(f"done: step {summary.step}{loss} ({summary.run_dir})")
    plan = RunFiles(summary.run_dir).read_plan()
    for line in summarize(summary.rows, summary.run_dir, summary.evaluations, config.train.moments, plan):
        show(f"  {line}")
    return 0


def _plan(config: TrainConfig, options: argparse.Namespace) -> int:
    from megatrain_ray.console.startup import spinner

    with spinner("importing PyTorch"):
        from megatrain_ray.commands.plan import show_plan

    show_plan(config, as_json=options.json, what_if=options.what_if, price_per_hour=options.price)
    return 0


def _bench(options: argparse.Namespace) -> int:
    settings = BenchOptions(
        warmup=options.warmup,
        steps=options.steps,
        compare_in_process=options.compare_in_process,
        with_ceiling=not options.no_ceiling,
        with_trace=not options.no_trace,
        commit=options.commit,
        alias_bytes=options.alias_host_memory,
    )
    with tempfile.TemporaryDirectory(prefix="megatrain-bench-") as folder:
        config = bench_config(options.config, options.overrides, settings, Path(folder) / "run")
        from megatrain_ray.console.startup import spinner

        with spinner("importing PyTorch and Ray"):
            from megatrain_ray.bench.bench import measure
            from megatrain_ray.bench.bench_report import print_table, to_json, to_report

        report = to_report(measure(config, settings), settings)
    if options.json:
        show(to_json(report))
    else:
        print_table(report)
    return 0


def _export(run_dir: Path, out_dir: Path, dtype: str | None, *, merge: bool) -> int:
    from megatrain_ray.console.startup import spinner

    with spinner("exporting"):
        from megatrain_ray.export.export import export_run
        from megatrain_ray.export.export_report import describe_export

        step = export_run(run_dir, out_dir, dtype, merge=merge)
    for line in describe_export(out_dir, step):
        print(line)
    return 0


def _inspect(run_dir: Path) -> int:
    from megatrain_ray.report.inspect_run import inspect_run, state_of_run

    print(state_of_run(run_dir), flush=True)  # at once: the rest comes only when all saves have been read
    report, good = inspect_run(run_dir)
    print(report)
    return 0 if good else MegatrainError.exit_code


def _report(run_dir: Path, out: Path | None) -> int:
    from megatrain_ray.report.html_report import write_report

    print(f"wrote {write_report(run_dir, out)}")
    return 0


def _refit(run_dir: Path, out: Path) -> int:
    from megatrain_ray.commands.refit import describe_refit, refit

    for line in describe_refit(refit(run_dir, out), out):
        print(line)
    return 0


def _doctor(folder: Path, *, measure: bool) -> int:
    from megatrain_ray.commands.doctor import examine
    from megatrain_ray.commands.finding import State
    from megatrain_ray.machine.machine import probe_machine
    from megatrain_ray.profiling.profiles import measure_everything
    from megatrain_ray.profiling.spill_disk import forget_rates

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name the one where runs will be")
    if measure:
        measure_everything(probe_machine("auto", None, None).device)
        forget_rates()
    states = set()
    for finding in examine(folder):
        print(finding, flush=True)
        states.add(finding.state)
    return MegatrainError.exit_code if State.STOP in states else 0


def _train_tokenizer(options: argparse.Namespace) -> int:
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
    print(f"wrote {num_ids} ids to {options.out}{fewer}; data.tokenizer: {options.out}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from megatrain_ray.convert.convert_config import convert

    if options.gpus < 1:
        raise ConfigError(f"--gpus: {options.gpus}: expected 1 or more")
    if options.out is not None and options.out.exists():
        raise ConfigError(f"--out: {options.out} exists: nothing is overwritten; name another one")
    lenient = options.ignore_unsupported
    found = convert(options.config, options.overrides, num_gpus=options.gpus, lenient=lenient)
    for line in found.report:
        print(line, file=sys.stderr)
    if found.refused and not lenient:
        raise ConfigError(
            "some keys cannot be honoured (see above): change them, or leave them out with --ignore-unsupported"
        )
    if options.out is None:
        print(found.text, end="")
    else:
        options.out.write_text(found.text, encoding="utf-8")
        print(f"wrote {options.out}; megatrain plan {options.out} says whether it fits")
    return 0
