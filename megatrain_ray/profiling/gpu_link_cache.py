"""Keeps the measured rates of links between GPUs: for each set of GPUs of a machine one, all in one file.

Sets are kept apart because some GPUs of a machine may be linked directly and others not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatrain_ray.engine.device.hardware_profile import Rate
from megatrain_ray.io.files.atomic_file import write_atomically

log = logging.getLogger(__name__)

Links = dict[str, Rate | None]  # bytes per second by set of GPUs; None: the measurement hung and is not to be repeated
_LINKS: TypeAdapter[Links] = TypeAdapter(Links)


def set_name(addresses: Sequence[str | None]) -> str:
    """Return the name of a set of GPUs: PCI addresses, or else indices, in the order in which a process sees them."""
    return " ".join(address or str(index) for index, address in enumerate(addresses))


def read_links(file: Path) -> Links:
    """Return the kept links; none if the file is missing or damaged."""
    try:
        return _LINKS.validate_json(file.read_bytes()) if file.exists() else {}
    except (OSError, ValidationError) as error:
        log.warning("measured links between GPUs are left out: cannot read %s: %s", file, error)
        return {}


def write_links(file: Path, links: Mapping[str, float | None]) -> None:
    """Replace the kept links. Raises OSError or MegatrainError if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, _LINKS.dump_json(dict(links), indent=1).decode() + "\n")
