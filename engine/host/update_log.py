"""Publishes the parameters of updates, and keeps those of the last few."""

from __future__ import annotations

from megatrain_ray.engine.host.generations import Generations
from megatrain_ray.engine.host.signal_words import NUM_LOGGED, SignalWords, Word
from megatrain_ray.engine.optimizer.adamw import UpdateParams
from megatrain_ray.errors import MegatrainError


class UpdateLog:
    """Reads and writes the words of the last NUM_LOGGED updates."""

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
