"""Joins what the signal words of a host mean: its updates, the generations of its layers, and its gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatrain_ray.engine.host.generations import Generations
from megatrain_ray.engine.host.gradient_mailbox import GradientMailbox
from megatrain_ray.engine.host.interfaces import EVERY_GENERATION
from megatrain_ray.engine.host.signal_words import ShardWord, SignalWords, Word
from megatrain_ray.engine.host.update_log import UpdateLog


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
