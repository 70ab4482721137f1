"""Measured links between GPUs: a file for each machine, whose entries have keys of the GPUs that the process saw, since
two of a machine may have a link of their own where two others have none."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.atomic_file import write_atomically
from megatrain_ray.engine.hardware_profile import Rate

log = logging.getLogger(__name__)

Links = dict[str, Rate | None]  # bytes per second by key; None: these GPUs hung, and are not asked again
_LINKS: TypeAdapter[Links] = TypeAdapter(Links)


def links_in(file: Path) -> Links:
    """Empty where there is no file, or a damaged one."""
    try:
        return _LINKS.validate_json(file.read_bytes()) if file.exists() else {}
    except (OSError, ValidationError) as error:
        log.warning("measured links between GPUs are left out: cannot read %s: %s", file, error)
        return {}


def keep_link(file: Path, key: str, bytes_per_s: float | None) -> None:
    """Beside those of others. Raises OSError and MegatrainError where it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, _LINKS.dump_json(links_in(file) | {key: bytes_per_s}, indent=1).decode() + "\n")


def key_of(addresses: Sequence[str | None]) -> str:
    """Of GPUs in the order in which a process sees them: their PCI addresses; of one without, its index."""
    return " ".join(address or str(index) for index, address in enumerate(addresses))
