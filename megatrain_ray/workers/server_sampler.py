"""Samples by a server in place of the engine: writes the weights of the step and lets the server load them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from megatrain_ray.config.train_groups import ServerConfig
from megatrain_ray.engine.step.engine import Engine
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams
from megatrain_ray.errors import MegatrainError, SamplingError
from megatrain_ray.io.files.disk_errors import explained
from megatrain_ray.io.files.owned_folder import SHARED, FolderKind, OwnedFolder
from megatrain_ray.io.files.partial_folder import remove_abandoned
from megatrain_ray.rollouts.sampling_server import SamplingServer


class ServerSampler:
    """Samples by a server, one sampling at a time, between two steps of the engine."""

    def __init__(self, settings: ServerConfig, folder: Path, engine: Engine, write: Callable[[Path], None]) -> None:
        """Get ready.

        folder: absolute, for weights.
        write: writes the engine's weights as a model folder.
        """
        self._settings = settings
        self._folder = folder
        self._engine = engine
        self._write = write
        self._server: SamplingServer | None = None

    @property
    def current_phase(self) -> str:
        """Return what the server is waited for; nothing while it does not sample."""
        return self._server.current_phase if self._server else ""

    async def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, step: int) -> list[Completion]:
        """Return a completion of each prompt by the weights after the update of `step`.

        Raises SamplingError for what the server fails at, and if the weights cannot be written.
        """
        await self._engine.drain(step)
        if self._settings.sleeps:  # it needs the memory now
            await self._engine.on_compute_thread(self._engine.device.release_unused)
        try:
            return await self._sample(prompts, sampling)
        except MegatrainError as error:
            raise SamplingError(*error.args) from None

    async def _sample(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        with explained("write to", self._folder):
            self._folder.mkdir(exist_ok=True)
            remove_abandoned(self._folder)
            # Always a new name: vLLM may read files of a known name from memory (its issue 32718).
            name = f".weights-{secrets.token_hex(4)}.partial"
            holder = OwnedFolder.make(self._folder / name, FolderKind.PARTIAL, mode=SHARED)
        try:
            weights = holder.path / "model"
            await asyncio.to_thread(self._write, weights)
            async with SamplingServer(self._settings) as self._server:
                return await self._server.sample(prompts, sampling, weights)
        finally:
            self._server = None
            holder.remove()
