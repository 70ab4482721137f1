"""Runs a function in a process of its own, so that its host and GPU memory are free afterwards."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

from megatrain_ray.engine.device.deadlines import DEADLINE_S, STEP_DEADLINE_S
from megatrain_ray.errors import DeadlineError, MegatrainError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_own_process(
    name: str, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Run a function in a process of its own and return its result.

    The function, its arguments and its result must be picklable. What it prints goes to standard error. The process has
    ended when this returns or raises.

    name: begins the message of errors.

    Raises what the function raises, MegatrainError if the process dies, and DeadlineError if it takes longer than
    STEP_DEADLINE_S.
    """
    # Spawned, since a fork would inherit the state of CUDA and Ray. The child imports the main module again.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()  # only the child holds this end, so its death ends the pipe
    try:
        if not ours.poll(STEP_DEADLINE_S):
            raise DeadlineError(f"{name} did not end within {STEP_DEADLINE_S:.0f} s; start again")
        done, answer = ours.recv()
    except EOFError:
        raise MegatrainError(f"{name} died, perhaps for want of memory (dmesg says so); start again") from None
    finally:
        process.kill()
        process.join(DEADLINE_S)
        ours.close()
    if not done:
        raise answer
    result: Result = answer
    return result


def _serve(
    answers: Connection, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives Ctrl-C as well and ends this process
    sys.stdout = sys.stderr
    try:
        answer: tuple[bool, object] = (True, function(*args, **kwargs))
    except Exception as error:
        error.add_note(traceback.format_exc())
        answer = (False, error)
    answers.send(answer)
