"""Waits for the end of another process of this machine."""

from __future__ import annotations

import os
import select

from megatrain_ray.errors import DeadlineError


def wait_gone(pid: int, timeout_s: float) -> None:
    """Wait until no process has this pid (a zombie is none). Raises DeadlineError after `timeout_s` seconds."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(fd, "rb") as process:
        poll = select.poll()
        poll.register(process, select.POLLIN)  # readable once the process has ended
        if not poll.poll(1000 * timeout_s):
            raise DeadlineError(f"process {pid}, which is to be replaced, did not end within {timeout_s:.0f} s")
