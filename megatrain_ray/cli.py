"""Runs a command of the command line, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import logging
import signal
import sys
from collections.abc import Sequence

from megatrain_ray.command_line import parse_command_line
from megatrain_ray.commands.run_command import COMMANDS
from megatrain_ray.console.interrupts import ERASE_LINE
from megatrain_ray.console.logs import SafeFormatter, cannot_flush, is_unread, show, silence
from megatrain_ray.errors import ConfigError, InterruptedRunError, MegatrainError

# What to do about errors of the machine and its limits, by number. Wherever they happen, one line says what is known.
ROOM, LIMIT = "free some room there, or name another folder", "raise the limit (ulimit -a)"
NO_RIGHT, BAD_DISK = "name a folder that this user may write to", "check the disk (dmesg)"
ADVICE = {
    errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: NO_RIGHT, errno.EACCES: NO_RIGHT, errno.EPERM: NO_RIGHT,
    errno.EMFILE: LIMIT, errno.ENFILE: LIMIT, errno.EAGAIN: LIMIT, errno.ENOMEM: LIMIT, errno.EIO: BAD_DISK,
}  # fmt: skip
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
            return _run(argv)
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


def _run(argv: Sequence[str] | None) -> int:
    options = parse_command_line(argv)
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
