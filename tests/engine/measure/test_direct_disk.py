"""The way between a disk and a device's own memory: that it is tried, and measured in another process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain_ray.engine.device.cpu_device import CpuDevice
from megatrain_ray.engine.device.cuda_info import num_gpus
from megatrain_ray.engine.measure.measure_direct_disk import measure_direct
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.storage.blob_store import Block
from megatrain_ray.io.storage.disk_io import DiskIo
from megatrain_ray.io.storage.disk_rate import BLOCK_BYTES
from megatrain_ray.profiling.direct_rate import measure_direct_here
from tests.support import fake_kvikio
from tests.support.fake_kvikio import CuFile, IOFuture
from tests.support.isolated_device import ApartDevice


def test_blocks_of_the_device_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    device = ApartDevice()
    assert measure_direct(device, tmp_path, 3 * BLOCK_BYTES) > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(MegatrainError, match="only kvikio can"):
        measure_direct(device, tmp_path, BLOCK_BYTES, DiskIo.POSIX)
    device.close()


def test_what_comes_back_as_something_else_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kvikio.install(monkeypatch)
    read = CuFile.pread

    def pread(self: CuFile, buf: Block, size: int | None = None, file_offset: int = 0) -> IOFuture:
        found = read(self, buf, size, file_offset)
        buf.content[17] ^= 1  # type: ignore[union-attr]
        return found

    monkeypatch.setattr(CuFile, "pread", pread)
    device = ApartDevice()
    with pytest.raises(MegatrainError, match="something else came to the device than was written to "):
        measure_direct(device, tmp_path, BLOCK_BYTES)
    device.close()


def test_a_sum_of_other_bits_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    monkeypatch.setattr(device, "checksum", lambda block: 1)
    with pytest.raises(MegatrainError, match="something else came to the device"):
        measure_direct(device, tmp_path, BLOCK_BYTES, DiskIo.POSIX)
    device.close()


@pytest.mark.skipif(num_gpus() > 0, reason="there is a GPU")
def test_another_process_says_why_it_cannot_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        measure_direct_here(tmp_path, BLOCK_BYTES)
    assert not torch.cuda.is_initialized()
