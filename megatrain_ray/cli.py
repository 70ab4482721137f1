"""Implements the command line: its options, and the exit codes of errors."""

from __future__ import annotations

import argparse
import errno
import logging
import math
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatrain_ray import __version__
from megatrain_ray.commands.run_command import COMMANDS
from megatrain_ray.config.urls import is_url
from megatrain_ray.console.interrupts import ERASE_LINE
from megatrain_ray.console.logs import SafeFormatter, cannot_flush, is_unread, show, silence
from megatrain_ray.errors import ConfigError, InterruptedRunError, MegatrainError
from megatrain_ray.escapes import escaped
from megatrain_ray.units import parse_size

# What to do about errors of the machine and its limits, by number. Wherever they happen, one line says what is known.
ROOM, LIMIT = "free some room there, or name another folder", "raise the limit (ulimit -a)"
NO_RIGHT, BAD_DISK = "name a folder that this user may write to", "check the disk (dmesg)"
ADVICE = {
    errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: NO_RIGHT, errno.EACCES: NO_RIGHT, errno.EPERM: NO_RIGHT,
    errno.EMFILE: LIMIT, errno.ENFILE: LIMIT, errno.EAGAIN: LIMIT, errno.ENOMEM: LIMIT, errno.EIO: BAD_DISK,
}  # fmt: skip
A_MODEL = "a run directory, a Hugging Face folder or a hub id"
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
    except OSError as error:
        unread = isinstance(error, BrokenPipeError) and is_unread(sys.stdout)
        if not unread and not (sys.stdout and cannot_flush(sys.stdout)):
            return _report(error)
        silence(sys.stdout)
        if unread:
            return UNREAD
        show(f"error: cannot write the output: {error.strerror}", stream=sys.stderr)
        return MegatrainError.exit_code


def _report(error: OSError) -> int:
    """Print an error of the machine that nothing else has explained, and return the exit code. Raises any other."""
    advice = ADVICE.get(error.errno or 0)
    if error.errno == errno.ENOENT and error.filename is None:  # what tempfile raises
        advice = "free some room there, or set TMPDIR"
    if advice is None:
        raise error
    where = f"{error.filename}: " if error.filename else ""
    show(f"error: {where}{error.strerror}; {advice}", stream=sys.stderr)
    return MegatrainError.exit_code


def _answer(argv: Sequence[str] | None) -> int:
    options = _parse(argv)
    if logging.lastResort:  # prints the warnings of a command that writes no log
        logging.lastResort.setFormatter(SafeFormatter())
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that cannot be written to
    try:
        if sys.flags.optimize > 1:
            raise ConfigError(
                "python -OO removes docstrings, and Transformers reads them; start Python with -O at most"
            )
        return COMMANDS[options.command](options)
    except InterruptedRunError as end:
        show(*str(end).split("\n"), stream=sys.stderr)
        return end.exit_code
    except MegatrainError as error:
        show(*f"error: {error}".split("\n"), stream=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        show(f"error: {str(error.filename)[:64]}…: too long for the name of a file", stream=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        if sys.stderr and sys.stderr.isatty():
            sys.stderr.write(ERASE_LINE)
        goes_on = ": nothing more was saved; the same command starts again" if options.command == "train" else ""
        show(f"interrupted{goes_on}", stream=sys.stderr)
        return InterruptedRunError.exit_code


class _Parser(argparse.ArgumentParser):
    """Escapes what it prints of the arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = _parsers()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(ConfigError.exit_code)
    options, rest = parser.parse_known_args(argv)
    # argparse does not recognize the overrides of `plan CONFIG --json key=value`, nor the prompt of
    # `generate RUN --chat PROMPT`.
    if rest and getattr(options, "prompt", "") is None and not rest[0].startswith("-"):
        options.prompt = rest.pop(0)
    strangers = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if strangers:
        hint = _as_setting(strangers[0], argv or sys.argv[1:]) if "overrides" in options else ""
        commands[options.command].error(f"unrecognized arguments: {' '.join(strangers)}{hint}")
    if rest:
        options.overrides += rest
    return options


def _as_setting(option: str, argv: Sequence[str]) -> str:
    """Return how an option such as `--learning_rate 1e-4` is written as a setting; empty if it stands for none."""
    from megatrain_ray.config.checks import key_of
    from megatrain_ray.config.schema import TrainConfig

    name, _, value = option.lstrip("-").partition("=")
    key = key_of(name.replace("-", "_"), TrainConfig)
    after = [*argv, ""][list(argv).index(option) + 1]
    return f"; settings are written as key=value: {key}={value or after}" if key else ""


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each command."""
    parser = _Parser(prog="megatrain", description="Train large language models from host memory.")
    parser.add_argument("--version", action="version", version=f"megatrain-ray {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="train, or resume the run in run_dir")
    plan = commands.add_parser("plan", help="show where everything would live, and whether it fits")
    _add_plan(plan)
    data = commands.add_parser("data", help="show records as the model sees them, what is learned, lengths and rows")
    bench = commands.add_parser("bench", help="measure a configuration's speed: its steps, and what they could reach")
    _add_bench(bench)
    logprobs = commands.add_parser("logprobs", help="log-probability of each target of the data, in the token cache")
    _add_logprobs(logprobs)
    for command in (train, plan, data, bench, logprobs):
        command.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
        # Has a default, since argparse would else call overrides required if CONFIG is missing.
        command.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="as in train.lr=1e-4")
    export = commands.add_parser("export", help="write a save as a Hugging Face folder, adapters as one of peft's")
    export.add_argument("run_dir", metavar="RUN_DIR", help="or the URL of its mirror (save_mirror)")
    export.add_argument("out_dir", metavar="OUT_DIR", help="new or empty folder, or a URL (s3://bucket/model)")
    export.add_argument("--dtype", choices=("bf16", "fp32"), help="default: the working copy's")
    export.add_argument("--merge", action="store_true", help="of a run with lora: the model with its adapters added in")
    without = "leave out tensors and files of the model's folder that belong to no part of the trained model"
    export.add_argument("--no-extras", action="store_false", dest="extras", help=without)
    _add_step(export)
    _add_generate(commands.add_parser("generate", help="text or answers of a run's save, or of any model"))
    _add_eval(commands.add_parser("eval", help="held-out loss of a run's save, or of any model, without training"))
    inspect = commands.add_parser("inspect", help="how it stands: loss, curves, saves, last rows, measurement")
    inspect.add_argument("run_dir", type=_local_path, metavar="RUN_DIR")
    inspect.add_argument("--config", action="store_true", help="the whole configuration, too")
    inspect.add_argument("--verify", action="store_true", help="read every byte of the saves; exit 1 if one is damaged")
    report = commands.add_parser("report", help="a page about a run: curves, where time went, memory, faults")
    report.add_argument("run_dir", type=_local_path, metavar="RUN_DIR")
    report.add_argument("--out", type=Path, metavar="FILE", help="of HTML (RUN_DIR/report.html)")
    refit = commands.add_parser("refit", help="a hardware profile with the rates that a finished run measured")
    refit.add_argument("run_dir", type=_local_path, metavar="RUN_DIR")
    refit.add_argument("out", type=Path, metavar="FILE", help="new file, for hardware.profile")
    doctor = commands.add_parser("doctor", help="what of this machine would stop a run or slow it down")
    doctor.add_argument("folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="where runs will be")
    doctor.add_argument("--measure", action="store_true", help="measure the rates that plans are made with, once more")
    _add_tokenizer(commands.add_parser("tokenizer", help="train a tokenizer on a corpus of your own"))
    _add_convert(commands.add_parser("convert-config", help="a YAML of LLaMA-Factory or Axolotl as one of ours"))
    return parser, commands.choices


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the plan as in plan.json")
    parser.add_argument(
        "--what-if", action="store_true", help="what other memory, or other tokens a step, would change"
    )
    parser.add_argument("--price", type=_from_zero, metavar="PER_HOUR", help="of the machine: what the whole run costs")


def _add_step(parser: argparse.ArgumentParser) -> None:
    save = parser.add_mutually_exclusive_group()
    save.add_argument("--step", type=_positive, metavar="N", help="the save of this step; default: the newest")
    save.add_argument("--best", dest="step", action="store_const", const="best", help="that with the least eval_loss")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=_local, metavar="RUN_OR_FOLDER", help=A_MODEL)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="as in data.eval_path=held_out.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="the numbers as a line of evaluations.jsonl")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration whose held-out data are evaluated (the run's own)"
    )
    _add_step(parser)


def _add_logprobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=_local, metavar="RUN_OR_FOLDER", help=f"{A_MODEL}, in place of model.path")
    parser.add_argument("--json", action="store_true", help="an object for each source, one a line")
    _add_step(parser)


def _from_zero(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")


def _above_zero(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1, got {text!r}")


def _local(text: str) -> str:
    if not is_url(text):
        return text
    export = "megatrain export URL OUT_DIR, which writes a save of a mirror as a model's folder"
    raise argparse.ArgumentTypeError(f"expected no URL; next: {export}")


def _local_path(text: str) -> Path:
    return Path(_local(text))


def _positive(text: str) -> int:
    with suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"expected an integer from 1 on, got {text!r}")


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
    parser.add_argument(
        "--no-ceiling", dest="with_ceiling", action="store_false", help="do not measure the resident ceiling"
    )
    parser.add_argument(
        "--no-trace", dest="with_trace", action="store_false", help="no step behind those that count, to be traced"
    )
    parser.add_argument("--commit", metavar="HASH", help="of the code, where it is no git checkout")
    parser.add_argument(
        "--alias-host-memory",
        dest="alias_bytes",
        type=_size,
        metavar="SIZE",
        help="of RAM, as in 32GiB, that layers take in turn: for plans of machines with more; losses mean nothing",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=_local, metavar="RUN_OR_FOLDER", help=A_MODEL)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text that it goes on from; - reads standard input")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's turn; without PROMPT, chat in the terminal"
    )
    _add_step(parser)
    parser.add_argument("--system", metavar="TEXT", help="the chat's first turn")
    parser.add_argument("--max-new-tokens", type=_positive, default=512, metavar="N", help="of an answer (512)")
    parser.add_argument("--temperature", type=_from_zero, metavar="T", help="0: the likeliest token (the model's)")
    parser.add_argument("--top-p", type=_share, metavar="P", help="sample from the likeliest tokens (the model's)")
    parser.add_argument(
        "--repetition-penalty", type=_above_zero, metavar="X", help="above 1, as 1.1: repeat less (the model's)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the sampling, for the same text again")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="records with a prompt or a chat: each is printed with its answer"
    )
    parser.add_argument("--batch-size", type=_positive, default=16, metavar="N", help="prompts of FILE at a time (16)")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="train")
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
