"""Defines the commands and options of the command line, and reads them. What they do is in commands/run_command.py."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatrain_ray import __version__
from megatrain_ray.config.urls import is_url
from megatrain_ray.errors import ConfigError
from megatrain_ray.escapes import escaped
from megatrain_ray.units import parse_size

A_MODEL = "a run directory, a Hugging Face folder or a hub id"


def _number(read: Callable[[str], float], accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """Return a function that reads a number, and raises ArgumentTypeError for one that is not accepted."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if accepts(number := read(text)):
                return number
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")

    return parse


_positive = _number(int, lambda number: number >= 1, "an integer from 1 on")
_from_zero = _number(float, lambda number: 0 <= number < math.inf, "a number from 0 on")
_above_zero = _number(float, lambda number: 0 < number < math.inf, "a number above 0")
_share = _number(float, lambda number: 0 < number <= 1, "a number above 0, at most 1")


def _local(text: str) -> str:
    if not is_url(text):
        return text
    export = "megatrain export URL OUT_DIR, which writes a save of a mirror as a model's folder"
    raise argparse.ArgumentTypeError(f"expected no URL; next: {export}")


def _local_path(text: str) -> Path:
    return Path(_local(text))


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Parser(argparse.ArgumentParser):
    """Escapes what it prints of the arguments, which may hold control characters of a terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))


def parse_command_line(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command and its options. `argv`: None: the arguments of this process.

    Prints the usage and raises SystemExit, with exit code 2, for arguments that are wrong.
    """
    parser, commands = make_parsers()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        parser.exit(ConfigError.exit_code)
    options, rest = parser.parse_known_args(argv)
    # argparse does not recognize the overrides of `plan CONFIG --json key=value`, nor the prompt of
    # `generate RUN --chat PROMPT`.
    if rest and getattr(options, "prompt", "") is None and not rest[0].startswith("-"):
        options.prompt = rest.pop(0)
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if unknown:
        hint = _as_setting(unknown[0], argv or sys.argv[1:]) if "overrides" in options else ""
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if rest:
        options.overrides += rest
    return options


def _as_setting(option: str, argv: Sequence[str]) -> str:
    """Return how an option such as `--learning_rate 1e-4` is written as a setting; empty if no setting is like it."""
    from megatrain_ray.config.problem_lines import key_of
    from megatrain_ray.config.schema import TrainConfig

    name, _, value = option.lstrip("-").partition("=")
    key = key_of(name.replace("-", "_"), TrainConfig)
    after = [*argv, ""][list(argv).index(option) + 1]
    return f"; settings are written as key=value: {key}={value or after}" if key else ""


def make_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each command by name."""
    parser = _Parser(
        prog="megatrain",
        description="Train language models that are larger than GPU memory, in full precision.",
        epilog="megatrain COMMAND --help describes a command.",
    )
    parser.add_argument("--version", action="version", version=f"megatrain-ray {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=_sentence(text))

    _add_config(add("train", "train, or resume the run in run_dir"))
    _add_plan(add("plan", "show what would be kept in GPU memory, in RAM and on disk, and whether it fits"))
    _add_config(add("data", "show records as the model sees them, what it learns of them, their lengths and rows"))
    _add_bench(add("bench", "measure how fast a configuration trains, and how fast it could at most"))
    _add_logprobs(add("logprobs", "compute the log-probability of each target of the data, and keep it in the cache"))
    _add_export(add("export", "write a save as a Hugging Face folder; adapters as a folder of the peft library"))
    _add_generate(add("generate", "generate text with a save of a run, or with any model"))
    _add_eval(add("eval", "compute the held-out loss of a save of a run, or of any model, without training"))
    _add_inspect(add("inspect", "show how a run stands: loss, curves, saves, last steps, and time against the plan"))
    _add_report(add("report", "write a page about a run: curves, where time went, memory, faults"))
    _add_refit(add("refit", "write a hardware profile with the rates that a finished run measured"))
    _add_doctor(add("doctor", "show what about this machine would stop a run or slow it down"))
    _add_tokenizer(add("tokenizer", "train a tokenizer on your own texts"))
    _add_convert(add("convert-config", "translate a configuration of LLaMA-Factory or Axolotl"))
    return parser, commands.choices


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with the settings of the run")
    _add_overrides(parser, "setting that overrides the file's, such as train.lr=1e-4")


def _add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    # Has a default, since argparse would else call overrides required if an argument before them is missing.
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the plan in the format of plan.json")
    parser.add_argument(
        "--what-if", action="store_true", help="show what more or less memory, or more tokens a step, would change"
    )
    parser.add_argument(
        "--price", type=_from_zero, metavar="PER_HOUR", help="price of the machine, to print what the run would cost"
    )
    _add_config(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print all that was measured as JSON, and nothing else")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps to measure (default: 8)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before these (default: 2)")
    parser.add_argument(
        "--compare-in-process", action="store_true", help="measure the same steps in one process without Ray, too"
    )
    parser.add_argument(
        "--no-ceiling", dest="with_ceiling", action="store_false",
        help="do not measure the same layers with all weights in GPU memory, which is the fastest possible",
    )  # fmt: skip
    parser.add_argument(
        "--no-trace", dest="with_trace", action="store_false", help="do not trace one more step after the measured ones"
    )
    parser.add_argument("--commit", metavar="HASH", help="commit of the code to record if this is no git checkout")
    parser.add_argument(
        "--alias-host-memory", dest="alias_bytes", type=_size, metavar="SIZE",
        help="let all layers share SIZE of RAM (such as 32GiB), to measure plans that need more RAM than this machine "
        "has; losses then mean nothing",
    )  # fmt: skip
    _add_config(parser)


def _add_logprobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=_local, metavar="RUN_OR_FOLDER", help=f"{A_MODEL}, in place of model.path")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each source")
    _add_step(parser)
    _add_config(parser)


def _add_step(parser: argparse.ArgumentParser) -> None:
    save = parser.add_mutually_exclusive_group()
    save.add_argument("--step", type=_positive, metavar="N", help="use the save of step N (default: the newest)")
    save.add_argument("--best", dest="step", action="store_const", const="best", help="use the save of least eval_loss")


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory, or the URL of its mirror (save_mirror)")
    parser.add_argument("out_dir", metavar="OUT_DIR", help="new or empty folder, or a URL (s3://bucket/model)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="type of the weights (default: as trained)")
    parser.add_argument("--merge", action="store_true", help="add adapters to the model's weights (runs with lora)")
    parser.add_argument(
        "--no-extras", action="store_false", dest="extras",
        help="leave out tensors and files of the original folder that belong to no part of the trained model",
    )  # fmt: skip
    _add_step(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=_local, metavar="RUN_OR_FOLDER", help=A_MODEL)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="answer PROMPT as a user's turn; without PROMPT, chat in the terminal"
    )
    parser.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE", help="image of the first turn; repeatable"
    )
    _add_step(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt: the first turn of the chat")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=512, metavar="N", help="the most to make (default: 512)"
    )
    parser.add_argument(
        "--temperature", type=_from_zero, metavar="T", help="0 chooses the likeliest token (default: the model's own)"
    )
    parser.add_argument(
        "--top-p", type=_share, metavar="P", help="sample from the likeliest tokens that together have probability P "
        "(default: the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--repetition-penalty", type=_above_zero, metavar="X", help="above 1 repeats less (default: the model's own)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling; the same seed gives the same text")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="print each record of FILE, a prompt or a chat, with its answer"
    )
    parser.add_argument("--batch-size", type=_positive, default=16, metavar="N", help="prompts at a time (default: 16)")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=_local, metavar="RUN_OR_FOLDER", help=A_MODEL)
    _add_overrides(parser, "setting that overrides the configuration's, such as data.eval_path=held_out.jsonl")
    parser.add_argument("--json", action="store_true", help="print the numbers as a line of evaluations.jsonl")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration with the held-out data (default: the run's own)"
    )
    _add_step(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=_local_path, metavar="RUN_DIR", help="directory of the run (run_dir)")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--config", action="store_true", help="print the whole configuration, too")
    parser.add_argument("--verify", action="store_true", help="read every byte of the saves; exit 1 if one is damaged")


def _add_report(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="HTML file to write (default: RUN_DIR/report.html)")


def _add_refit(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("out", type=Path, metavar="FILE", help="new file to write, for hardware.profile")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path(), metavar="FOLDER", help="folder to keep runs in (default: .)"
    )
    parser.add_argument("--measure", action="store_true", help="measure the rates that plans are made with once more")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="train")
    text = "train a byte-level BPE, and write it as a folder that data.tokenizer can name"
    train = actions.add_parser("train", help=text, description=_sentence(text))
    train.add_argument("paths", nargs="+", metavar="PATH", help="file, folder or glob, as in data.path")
    train.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new or empty folder to write")
    train.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="number of ids, with 256 for bytes and the specials"
    )
    train.add_argument("--field", default="text", help="key or column that holds the text (default: text)")
    train.add_argument("--special", nargs="+", default=[], metavar="TOKEN", help="special tokens to add")
    train.add_argument(
        "--bad-records", choices=("error", "skip"), default="error", help="what to do about records without a text "
        "(default: error)",
    )  # fmt: skip


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="FILE", help="YAML file of LLaMA-Factory or Axolotl")
    _add_overrides(parser, "setting to write instead, such as train.steps=300")
    parser.add_argument("--out", type=Path, metavar="FILE", help="new file to write (default: standard output)")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that FILE is meant for (default: 1)")
    parser.add_argument(
        "--ignore-unsupported", action="store_true", help="leave out keys that cannot be honoured (an error otherwise)"
    )
