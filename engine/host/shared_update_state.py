"""Says what the signal words of a host mean: its updates, the generations of its layers, and its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatrain_ray.engine.host.interfaces import EVERY_GENERATION
from megatrain_ray.engine.host.signal_words import NUM_LOGGED, PlaceWord, ShardWord, SignalWords, SlabRegion, Word
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.errors import DeadlineError, MegatrainError


class SharedUpdateState(SignalWords):
    """Reads and writes the signal words of one host."""

    def __init__(
        self, buffer: memoryview, num_layers: int, num_shards: int, num_ranks: int = 1, first_shard: int = 0
    ) -> None:
        super().__init__(buffer, num_layers, num_shards, num_ranks, first_shard)
        self.generations = Generations(self)
        self.updates = UpdateLog(self, self.generations)
        self.gradients = GradientMailbox(self, self.generations)

    def reset(self, generation: int, updated: Sequence[Collection[int]]) -> None:
        """Give every layer `generation`, with nothing landed after it. Call it before any shard runs.

        updated: the layers that each shard updates. Of all other layers, the shard has every generation.
        """
        for i in range(self.num_words(self.num_layers, self.num_shards, self.num_ranks)):
            self.store(i, 0)
        self.store(Word.COMMITTED, generation)
        for layer in range(self.num_layers):
            self.gradients.forget(layer, generation)
            for shard, layers in enumerate(updated):
                for word in ShardWord:
                    self.store(self.of_shard(shard, layer, word), generation if layer in layers else EVERY_GENERATION)


class TornLayer(NamedTuple):
    """Names a layer whose update was begun and not finished, and that update."""

    layer: int
    update: int


class Generations:
    """Tracks how far each shard has updated each layer: generation g of a layer is what update g wrote."""

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


class UpdateLog:
    """Publishes the parameters of updates, and keeps those of the last NUM_LOGGED."""

    def __init__(self, words: SignalWords, generations: Generations) -> None:
        self._words = words
        self._generations = generations

    def commit(self, params: UpdateParams) -> None:
        """Publish the parameters of the next update.

        Raises MegatrainError if it is not the next one, or if shards lag too far behind.
        """
        oldest = min(map(self._generations.of_layer, range(self._words.num_layers)))
        if params.update != self.committed + 1 or oldest < params.update - NUM_LOGGED + 1:
            raise MegatrainError(
                f"update {params.update} cannot be committed: the last one was {self.committed}, the slowest layer is "
                f"at generation {oldest}, expected at least {params.update - NUM_LOGGED + 1}"
            )
        for i, word in zip(self._words.logged(params.update), params.to_words(), strict=True):
            self._words.store(i, word)
        self._words.store(Word.COMMITTED, params.update)
        self._words.ring(Word.LANDED_BELL)

    @property
    def committed(self) -> int:
        """Return the last update whose parameters are valid."""
        return self._words.load(Word.COMMITTED)

    def params(self, update: int) -> UpdateParams:
        """Return the parameters of an update that is committed, and that the caller has not finished.

        Raises MegatrainError for any other update.
        """
        found = self._logged(update)
        if found.update != update:
            raise MegatrainError(
                f"the parameters of update {update} are not there: its place holds update {found.update}"
            )
        return found

    def saved_at(self, generation: int) -> bool:
        """Return whether a save wants this generation.

        The answer is right until every layer of every shard is beyond it.
        """
        found = self._logged(generation)
        return found.update == generation and found.save

    def _logged(self, update: int) -> UpdateParams:
        return UpdateParams.from_words([*map(self._words.load, self._words.logged(update))])


class GradientMailbox:
    """Tells where gradients and Muon's directions lie in the slab, when they have landed, and when they are stored.

    GPU workers hand gradients to the shards with it.
    """

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
        """Wait until the layer's gradient has landed and, if `committed`, the update is committed, too.

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
