"""A function in a process of its own: what it takes of memory and of a GPU is free again afterwards."""

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
    """The function, its arguments and its result must be picklable. What it prints goes to standard error. The process
    is gone when this returns or raises.

    Raises what the function raises, and with a message that `name` begins MegatrainError where the process dies and
    DeadlineError where it takes longer than STEP_DEADLINE_S.
    """
    # Spawned: a fork would inherit what CUDA and Ray have begun. It imports the program that runs, the command line.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, args, kwargs))
    process.start()
    theirs.close()  # theirs alone: when they die the answer ends
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    sys.stdout = sys.stderr
    try:
        answer: tuple[bool, object] = (True, function(*args, **kwargs))
    except Exception as error:
        error.add_note(traceback.format_exc())
        answer = (False, error)
    answers.send(answer)
