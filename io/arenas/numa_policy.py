"""Chooses the NUMA node that memory comes from, and finds out which node pages are on.

It uses three system calls, without libnuma. For shared memory the kernel stores the policy of `take_from` with the
memory itself. So the policy holds for every process that maps it, whoever touches a page first, if it was set before
that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence

# Numbers of the system calls mbind and move_pages, by architecture.
CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def take_from(memory: memoryview, nodes: Sequence[int]) -> None:
    """Let pages of `memory` that nobody has touched yet come from these NUMA nodes.

    With one node, pages come from it while it has free memory, then from its neighbours. With several nodes, pages come
    from them in turn. Pages that exist already stay where they are. The policy never binds to a node (MPOL_BIND): if
    that node were full, the kernel would kill a process although other nodes have room.

    Raises OSError if the kernel refuses: EPERM from a container's filter, ENOSYS, EINVAL for a node that does not
    exist.

    memory: writable, beginning at a page boundary.
    """
    if not memory.nbytes:
        return
    words = (ctypes.c_ulong * (max(nodes) // WORD_BITS + 1))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    policy = MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE
    most = ctypes.c_ulong(len(words) * WORD_BITS + 1)  # the kernel subtracts one
    address = ctypes.c_void_p(address_of(memory))
    _call(0, address, ctypes.c_ulong(memory.nbytes), ctypes.c_int(policy), words, most, ctypes.c_uint(0))


def nodes_of_pages(addresses: Sequence[int], pid: int = 0) -> list[int | None]:
    """Return the NUMA node of the page at each address; None if the process has not touched that page.

    Moves nothing and touches nothing. Raises OSError if there is no such process, if it is another user's (EPERM), or
    if the kernel refuses.

    addresses: in the address space of the process.
    pid: the process; 0: this one.
    """
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*(address // mmap.PAGESIZE * mmap.PAGESIZE for address in addresses))
    found = (ctypes.c_int * count)()
    if count:
        _call(1, ctypes.c_int(pid), ctypes.c_ulong(count), pages, None, found, ctypes.c_int(0))
    return [node if node >= 0 else None for node in found]


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _call(which: int, *arguments: object) -> None:
    calls = CALLS.get(platform.machine())
    if calls is None:
        raise OSError(errno.ENOSYS, f"no numbers of system calls are known for {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(calls[which]), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
