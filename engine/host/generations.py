"""Tracks how far each shard has updated each layer: generation g of a layer is what update g wrote."""

from __future__ import annotations

from typing import NamedTuple

from megatrain_ray.engine.host.signal_words import ShardWord, SignalWords, Word
from megatrain_ray.errors import DeadlineError


class TornLayer(NamedTuple):
    """Names a layer whose update was begun and not finished, and that update."""

    layer: int
    update: int


class Generations:
    """Reads and writes the words by which shards publish what they have updated."""

    def __init__(self, words: SignalWords) -> None:
        self._words = words

    def begin(self, shard: int, layer: int, update: int) -> None:
        """Mark the layer as begun, before the first write.

        A layer whose begun word is larger than its generation is torn.
        """
        self._words.store(self._words.of_shard(shard, layer, ShardWord.BEGUN), update)

    def finish(self, shard: int, layer: int, update: int) -> None:
        """Publish, after the last write, that the shard's part of the layer has generation `update`."""
        self._words.store(self._words.of_shard(shard, layer, ShardWord.GENERATION), update)
        self._words.ring()

    def begun(self, shard: int, layer: int) -> int:
        """Return the last update of the layer that the shard has begun."""
        return self._words.load(self._words.of_shard(shard, layer, ShardWord.BEGUN))

    def of_shard(self, shard: int, layer: int) -> int:
        """Return the generation of the shard's own part of the layer."""
        return self._words.load(self._words.of_shard(shard, layer, ShardWord.GENERATION))

    def of_layer(self, layer: int) -> int:
        """Return the generation that every shard's part of the layer has reached."""
        return min(self.of_shard(shard, layer) for shard in range(self._words.num_shards))

    def torn(self, shard: int) -> TornLayer | None:
        """Return what a shard that died has begun and not finished, or None.

        It is one layer at most, since a shard works on one at a time.
        """
        for layer in range(self._words.num_layers):
            begun = self.begun(shard, layer)
            if begun > self.of_shard(shard, layer):
                return TornLayer(layer, begun)
        return None

    def wait(self, shard: int, layer: int, generation: int, timeout_s: float) -> None:
        """Wait until the shard's own part of the layer has this generation.

        Raises DeadlineError after `timeout_s`, MegatrainError if a shard failed or the shards were stopped.
        """

        def reached() -> bool:
            if self.of_shard(shard, layer) >= generation:
                return True
            self._words.check()
            return False

        if not self._words.wait(Word.GENERATION_BELL, reached, timeout_s):
            raise self.late(layer, generation, timeout_s)

    def late(self, layer: int, generation: int, timeout_s: float) -> DeadlineError:
        """Return an error that says what keeps the layer from this generation."""
        behind = [s for s in range(self._words.num_shards) if self.of_shard(s, layer) < generation]
        landed, committed = self._words.last_landed(layer), self._words.load(Word.COMMITTED)
        cause = f"optimizer shard {', '.join(str(self._words.number_of(shard)) for shard in behind)} is stuck"
        if min(landed, committed) < generation:
            cause = f"its gradient is that of update {landed}, the last committed update is {committed}"
        return DeadlineError(f"layer {layer} did not get generation {generation} within {timeout_s:.0f} s: {cause}")
