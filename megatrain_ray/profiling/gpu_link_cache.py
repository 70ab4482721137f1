"""Keeps measured rates of links between GPUs, in one file for each set of GPUs.

Sets are kept apart because some GPUs of a machine may be linked directly and others not.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.engine.device.hardware_profile import Rate
from megatrain_ray.io.files.atomic_file import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptLink:
    """Holds a measured link between GPUs.

    gpus: the GPUs, as `named` returns them.
    bytes_per_s: rate; None if the measurement hung and is not to be repeated.
    """

    gpus: tuple[str, ...]
    bytes_per_s: Rate | None


_LINK: TypeAdapter[KeptLink] = TypeAdapter(KeptLink)


def named(addresses: Sequence[str | None]) -> tuple[str, ...]:
    """Return the names of GPUs in the order in which a process sees them: PCI addresses, or else their indices."""
    return tuple(address or str(index) for index, address in enumerate(addresses))


def link_file(folder: Path, gpus: Sequence[str]) -> Path:
    """Return the file of the link between `gpus` in the folder of a machine's links."""
    return folder / f"{hashlib.sha256(' '.join(gpus).encode()).hexdigest()[:12]}.json"


def read_link(folder: Path, gpus: Sequence[str]) -> KeptLink | None:
    """Return the kept link; None if there is none, or its file is damaged."""
    return _read(link_file(folder, gpus))


def _read(file: Path) -> KeptLink | None:
    try:
        return _LINK.validate_json(file.read_bytes()) if file.exists() else None
    except (OSError, ValidationError) as error:
        log.warning("the measured link between GPUs is left out: cannot read %s: %s", file, error)
        return None


def keep_link(folder: Path, link: KeptLink) -> None:
    """Write the link to its file. Raises OSError or MegatrainError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(link_file(folder, link.gpus), _LINK.dump_json(link, indent=1).decode() + "\n")


def forget_hung(folder: Path) -> None:
    """Delete the records of GPUs whose measurement hung, so that they are measured again. Raises OSError."""
    for file in folder.glob("*.json"):
        link = _read(file)
        if link is not None and link.bytes_per_s is None and not file.is_symlink():
            file.unlink(missing_ok=True)
