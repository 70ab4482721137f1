"""Holds back the device's updates while a save needs the old state, and publishes the updates that are done."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from megatrain_ray.engine.device.device import Event
from megatrain_ray.engine.host.host_words import HostWords
from megatrain_ray.engine.shards.device_shard import DeviceShard
from megatrain_ray.engine.shards.save_gate import SaveGate


class DeviceGate:
    """Signals the device's updates in the shared words, as a shard signals its own.

    Compute thread only, except for `close`.
    """

    def __init__(self, shard: DeviceShard, words: HostWords, index: int, gate: SaveGate) -> None:
        """Prepare to publish the updates of the layers that `shard` updates.

        index: number under which `words` keeps the device's generations.
        """
        self._layers = shard.updated
        self._words = words
        self._index = index
        self._gate = gate
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device updates")
        self._last: Future[None] | None = None

    def enter(self, layer: int, update: int) -> None:
        """Wait until a running save lets `update` overwrite the layer. Raises what `SaveGate.enter` raises."""
        self._gate.enter(layer, update)

    def finish(self, update: int, done: Event) -> None:
        """Publish, once the event `done` is reached, that the device's layers have generation `update`.

        Returns before the event, but not before the previous update is published. Raises what went wrong with that one.
        """
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
            self._words.generations.finish(self._index, layer, update)

    def close(self) -> None:
        """Stop the thread that publishes, once it has nothing left to do. Idempotent."""
        self._executor.shutdown()
