"""Names the GPUs that this process sees, their memory and PCI addresses, and copies between two of them."""

from __future__ import annotations

import os

import torch


def total_memory_bytes() -> int | None:
    """Return the memory in bytes of the GPU that this process would use; None without one. Creates no context on it."""
    if not torch.cuda.is_available():
        return None
    return _properties().total_memory


def reserved_bytes() -> int:
    """Return the GPU memory that torch's allocator of this process holds, in use or not."""
    return torch.cuda.memory_reserved()


def device_name() -> str:
    return _properties().name


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the GPU that this process would use; None without one. Creates no context."""
    if not torch.cuda.is_available():
        return None
    found = _properties()
    return found.major, found.minor


def _properties(index: int = 0) -> torch.cuda._CudaDeviceProperties:
    """Return torch's properties of a GPU. The first call in a process fixes the allocator's settings."""
    expand_segments()
    return torch.cuda.get_device_properties(index)


def expand_segments() -> None:
    """Let the allocator reuse memory freed by activations for gradients of other sizes.

    torch reads the variable once, when the process first asks for a GPU's properties.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def pci_addresses() -> tuple[str | None, ...]:
    """Return the PCI address of each GPU that this process sees, in torch's order, as in /sys/bus/pci/devices.

    An address is None if torch does not report it. Creates no context on any GPU.
    """
    return tuple(map(_pci_address, range(num_gpus())))


def _pci_address(index: int) -> str | None:
    found = _properties(index)
    parts = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if None in parts:
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class PeerCopies:
    """Copies between two GPUs of this machine, in both directions at once."""

    def __init__(self, num_bytes: int, one: int = 0, other: int = 1) -> None:
        """Allocate buffers of `num_bytes` on both GPUs, given by their numbers in torch's order."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Stream]] = []
        for to, source in ((one, other), (other, one)):
            here, there = (torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{i}") for i in (to, source))
            self._copies.append((here, there, torch.cuda.Stream(source)))

    def run(self, count: int) -> None:
        """Copy `count` times in each direction, and wait for all copies."""
        for _ in range(count):
            for target, source, stream in self._copies:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for *_, stream in self._copies:
            stream.synchronize()
