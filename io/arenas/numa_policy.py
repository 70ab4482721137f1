"""Which NUMA node memory is taken from, and which one pages of it are on: three system calls, without libnuma.

For shared memory the kernel keeps what `take_from` asks for with the memory itself. So it holds for every process that
maps it, whoever touches a page first, as long as it came before that.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence

# By architecture: mbind, move_pages.
CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
MPOL_PREFERRED, MPOL_INTERLEAVE = 1, 3
WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def take_from(memory: memoryview, nodes: Sequence[int]) -> None:
    """Pages of `memory` (writable, from the start of a page on) that nobody has touched yet come from these nodes: from
    one as long as it has some free and from its neighbours then, from several in turn. What is there stays where it is.

    Never bound to a node (MPOL_BIND): where that one is full the kernel would kill a process, though others have room.
    Raises OSError where the kernel refuses: EPERM of a container's filter, ENOSYS, EINVAL of a node that is not there.
    """
    if not memory.nbytes:
        return
    words = (ctypes.c_ulong * (max(nodes) // WORD_BITS + 1))()
    for node in nodes:
        words[node // WORD_BITS] |= 1 << node % WORD_BITS
    policy = MPOL_PREFERRED if len(nodes) == 1 else MPOL_INTERLEAVE
    most = ctypes.c_ulong(len(words) * WORD_BITS + 1)  # the kernel takes one off
    address = ctypes.c_void_p(address_of(memory))
    _call(0, address, ctypes.c_ulong(memory.nbytes), ctypes.c_int(policy), words, most, ctypes.c_uint(0))


def nodes_of_pages(addresses: Sequence[int], pid: int = 0) -> list[int | None]:
    """Of the page at each address of a process (0: this one) the node that it is on; None where that process has not
    touched it. Nothing is moved and nothing touched.

    Raises OSError: no such process, one of another user (EPERM), or the kernel refuses.
    """
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*(address // mmap.PAGESIZE * mmap.PAGESIZE for address in addresses))
    found = (ctypes.c_int * count)()
    if count:
        _call(1, ctypes.c_int(pid), ctypes.c_ulong(count), pages, None, found, ctypes.c_int(0))
    return [node if node >= 0 else None for node in found]


def address_of(memory: memoryview) -> int:
    """Of its first byte in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _call(which: int, *arguments: object) -> None:
    calls = CALLS.get(platform.machine())
    if calls is None:
        raise OSError(errno.ENOSYS, f"no numbers of system calls are known for {platform.machine()}")
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(calls[which]), *arguments) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
