"""DeviceGate: lets the device update its layers as far as a save allows, and says which updates it has made."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.host.signal_words import HostWords
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.engine.shards.save_gate import SaveGate


class DeviceGate:
    """The device as one of those who signal. Compute thread only, but for `close`."""

    def __init__(self, shard: DeviceShard, words: HostWords, index: int, gate: SaveGate) -> None:
        """`index`: of the device's words."""
        self._layers = shard.updated
        self._words = words
        self._index = index
        self._gate = gate
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device updates")
        self._last: Future[None] | None = None

    def enter(self, layer: int, update: int) -> None:
        """Raises what `SaveGate.enter` does."""
        self._gate.enter(layer, update)

    def finish(self, update: int, done: Event) -> None:
        """The layers have generation `update` when the event comes; returns before, but not before the update before.
        Raises what went wrong with that."""
        if self._last is not None:
            self._last.result()
        self._last = self._executor.submit(self._publish, update, done)

    def _publish(self, update: int, done: Event) -> None:
        try:
            done.synchronize()
        except BaseException:
            self._words.fail(self._index)
            raise
        for layer in self._layers:
            self._words.finish(self._index, layer, update)

    def close(self) -> None:
        """Idempotent."""
        self._executor.shutdown()
