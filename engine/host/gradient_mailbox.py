"""Tells where gradients and Muon's directions lie in the slab, when they have landed, and when they are stored."""

from __future__ import annotations

from megatrain_ray.engine.host.generations import Generations
from megatrain_ray.engine.host.signal_words import PlaceWord, ShardWord, SignalWords, SlabRegion, Word
from megatrain_ray.errors import MegatrainError


class GradientMailbox:
    """Reads and writes the words by which GPU workers hand gradients to the shards."""

    def __init__(self, words: SignalWords, generations: Generations) -> None:
        self._words = words
        self._generations = generations

    def place(self, what: SlabRegion, layer: int, update: int, start: int) -> None:
        """Publish at which byte of the slab the gradient or the directions of an update will begin.

        The first rank calls it for the others.
        """
        self._words.store(self._words.place(what, layer, PlaceWord.NEXT_START), start)
        self._words.store(self._words.place(what, layer, PlaceWord.UPDATE), update)
        self._words.ring()

    def placed_at(self, what: SlabRegion, layer: int, update: int) -> int | None:
        """Return the byte that `place` published, or None while it has not for this update."""
        if self._words.load(self._words.place(what, layer, PlaceWord.UPDATE)) < update:
            return None
        return self._words.load(self._words.place(what, layer, PlaceWord.NEXT_START))

    def land(self, layer: int, update: int, gradient_start: int, direction_start: int = 0, rank: int = 0) -> None:
        """Publish that this rank's part of the layer's gradient is complete in the slab.

        gradient_start: byte of the slab at which the whole gradient begins.
        direction_start: byte of the slab at which its directions begin, if Muon trains something of the layer.

        Raises MegatrainError while a shard may still read the layer's previous gradient.
        """
        generation = self._generations.of_layer(layer)
        if generation != update - 1:
            raise MegatrainError(
                f"the gradient of layer {layer} landed for update {update}, but the layer is at generation "
                f"{generation}, expected {update - 1}"
            )
        if rank == 0:
            self._words.store(self._words.place(SlabRegion.GRADIENT, layer, PlaceWord.START), gradient_start)
            self._words.store(self._words.place(SlabRegion.DIRECTIONS, layer, PlaceWord.START), direction_start)
        self._words.store(self._words.landed(layer, rank), update)
        self._words.ring(Word.LANDED_BELL)

    def start(self, what: SlabRegion, layer: int) -> int:
        """Return the byte of the slab at which the gradient or the directions begin that landed last."""
        return self._words.load(self._words.place(what, layer, PlaceWord.START))

    def has_landed(self, layer: int, update: int) -> bool:
        """Return whether all ranks have landed the layer's gradient for this update or a later one."""
        return self._words.last_landed(layer) >= update

    def wait_landed(self, layer: int, update: int, timeout_s: float, *, committed: bool) -> bool:
        """Wait until the layer's gradient has landed.

        committed: wait until the update is committed, too.

        Returns False after `timeout_s` or on stop.
        """

        def landed() -> bool:
            last = self._words.last_landed(layer)
            if committed:
                last = min(last, self._words.load(Word.COMMITTED))
            return self._words.stopped or last >= update

        return self._words.wait(Word.LANDED_BELL, landed, timeout_s) and not self._words.stopped

    def withdraw(self, update: int) -> None:
        """Discard gradients that landed for the update after `update`.

        Call it once every layer has generation `update`, the last committed one. Nobody has read these gradients, since
        their update is not committed.
        """
        for layer in range(self._words.num_layers):
            if self.has_landed(layer, update):
                self.forget(layer, update)

    def forget(self, layer: int, update: int) -> None:
        """Record `update` as the last one for which the layer's gradient has landed or been given a place."""
        for what in SlabRegion:
            self._words.store(self._words.place(what, layer, PlaceWord.UPDATE), update)
        for rank in range(self._words.num_ranks):
            self._words.store(self._words.landed(layer, rank), update)

    def store(self, shard: int, layer: int, update: int) -> None:
        """Publish that the shard has its part of the layer's gradient outside the slab."""
        self._words.store(self._words.of_shard(shard, layer, ShardWord.STORED), update)
        self._words.ring()

    def stored_by(self, shard: int, layer: int) -> int:
        """Return the last update for which the shard has stored the layer's gradient."""
        return self._words.load(self._words.of_shard(shard, layer, ShardWord.STORED))

    def stored(self, layer: int) -> int:
        """Return the last update for which every shard has stored the layer's gradient."""
        return min(self.stored_by(shard, layer) for shard in range(self._words.num_shards))
