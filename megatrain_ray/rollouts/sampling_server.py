"""Samples completions by a server of vLLM: it hands over the run's weights, and asks for completions of token ids.

The protocol is that of OpenAI's completions with vLLM's additions. Weights are handed over as a model folder, by the
endpoints of vLLM's development mode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain_ray.config.train_groups import ServerConfig
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams
from megatrain_ray.errors import ConfigError, MegatrainError, first_failure

if TYPE_CHECKING:
    from aiohttp import ClientSession

MOST_REQUESTS = 512  # at a time; vLLM itself computes 256 to 1024 together
RETRY_S = 1.0  # between two attempts to reach the server
SHOWN = 300  # characters of an answer that a message shows
# What the server would else take from the model's generation_config.json, as values that change nothing.
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
COLD, HOT = 0.1, 2.0  # temperatures between which processed log-probabilities differ; vLLM takes 2 at most
SAME_LOGPROB = 0.1  # two forwards of one prompt differ by less


class _UnavailableError(MegatrainError):
    """Reports that the server cannot be reached or has failed, which may pass."""


class SamplingServer:
    """Speaks with the server. Used as a context manager, on one event loop."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._model = ""  # the name by which the server knows its model
        self._num_left = 0
        self._problem = ""

    async def __aenter__(self) -> SamplingServer:
        from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector  # takes 0.4 s, and few runs need it

        connector = TCPConnector(limit=MOST_REQUESTS)
        self._http: ClientSession = ClientSession(self._settings.url, timeout=ClientTimeout(None), connector=connector)
        self._failures = ClientError, OSError
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    @property
    def current_phase(self) -> str:
        """Return what the server is waited for, for the message about a sampling that does not end."""
        problem = f" ({self._problem})" if self._problem else ""
        return f"sampling by {self._settings.url}, {self._num_left} completions left{problem}"

    async def check(self, sampling: SamplingParams, seq_len: int, vocab_size: int) -> None:
        """Raise ConfigError unless the server has all that a run needs. If it is to sleep, it sleeps afterwards.

        seq_len: tokens of a prompt with its completion, at most.
        vocab_size: of the model.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._check(sampling, seq_len, vocab_size)
        except TimeoutError:
            raise ConfigError(self._says(f"did not answer within timeout_s: {self._settings.timeout_s:g}")) from None
        except _UnavailableError as error:
            raise ConfigError(self._says(f"{error}; is vLLM running there?")) from None
        except MegatrainError as error:
            raise ConfigError(str(error)) from None

    async def _check(self, sampling: SamplingParams, seq_len: int, vocab_size: int) -> None:
        (model, *_) = (await self._ask("GET", "/v1/models"))["data"]
        self._model = model["id"]
        if (longest := model.get("max_model_len")) is not None and longest < seq_len:
            raise self._wrong(
                f"takes {longest} tokens, and data.seq_len is {seq_len}: start it with --max-model-len {seq_len}"
            )
        if (await self._answer("POST", "/collective_rpc", {}))[0] == 404:  # else it misses the name of a method
            raise self._wrong("has no endpoint for new weights: start it with VLLM_SERVER_DEV_MODE=1")
        if (await self._ask("GET", "/is_sleeping"))["is_sleeping"]:
            if self._settings.sleeps:
                return  # since an earlier start, which has checked it: it has no weights to answer with
            raise self._wrong("is asleep: start it again, or set train.rollouts.server.sleeps: true")
        one = replace(sampling, max_new_tokens=1)
        last = Prompt([vocab_size - 1], 0)
        try:
            await self._complete(last, one)
        except _RefusedError as error:
            asked = f"it was asked what follows token {vocab_size - 1}, the model's last"
            raise MegatrainError(f"{error}; {asked}: does it serve model.path?") from None
        if sampling.temperature != 1 or sampling.top_p < 1:
            logprobs = [await self._likeliest(last, temperature) for temperature in (COLD, HOT)]
            if abs(logprobs[0] - logprobs[1]) > SAME_LOGPROB:
                raise self._wrong(
                    "reports log-probabilities after temperature and top_p, and a run learns from the model's own: "
                    "start it with --logprobs-mode raw_logprobs"
                )
        if self._settings.sleeps:
            await self._sleep()

    async def sample(self, prompts: Sequence[Prompt], sampling: SamplingParams, weights: Path) -> list[Completion]:
        """Return a completion of each prompt by the weights in a model folder, which may go afterwards.

        A server that fails gets the weights again, since it may be another process by then, and the prompts that are
        left. Raises MegatrainError if it answers nothing for `timeout_s`, and for what it refuses.
        """
        found: dict[int, Completion] = {}
        limit_s, self._num_left = self._settings.timeout_s, len(prompts)
        try:
            async with asyncio.timeout(limit_s) as silence:
                while len(found) < len(prompts):
                    try:
                        await self._hand_over(weights)
                        # A task of its own: a group whose task fails leaves the task that runs it marked as cancelled
                        # (Python 3.11), and the timeout would then not know its own cancellation.
                        await asyncio.create_task(self._complete_all(prompts, sampling, found, silence))
                    except _UnavailableError as error:
                        self._problem = str(error)
                        if silence.expired():  # in the same moment: its cancellation has ended in this error
                            raise TimeoutError from None
                        await asyncio.sleep(RETRY_S)
                if self._settings.sleeps:
                    await self._sleep()
        except TimeoutError:
            left = f"{self._num_left} of {len(prompts)} completions left"
            raise self._wrong(
                f"answered nothing for timeout_s: {limit_s:g}, with {left}"
                f"{f': {self._problem}' if self._problem else ''}; see its log, and start it again"
            ) from None
        return [found[k] for k in range(len(prompts))]

    async def _complete_all(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, found: dict[int, Completion],
        silence: asyncio.Timeout,
    ) -> None:  # fmt: skip
        """Add the missing completions to `found`, by the number of their prompt. Each answer ends the silence."""
        now_s = asyncio.get_running_loop().time

        def note_answer() -> None:
            self._problem, self._num_left = "", len(prompts) - len(found)
            if not silence.expired():
                silence.reschedule(now_s() + self._settings.timeout_s)

        async def complete(number: int) -> None:
            found[number] = await self._complete(prompts[number], sampling)
            note_answer()

        if not self._problem:  # else one that loads weights but completes nothing would be tried for ever
            note_answer()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(prompts)):
                    if number not in found:
                        group.create_task(complete(number))
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _hand_over(self, weights: Path) -> None:
        """Let the server load weights, and forget what it has computed with the former ones."""
        await self._ask("GET", "/health")
        self._model = (await self._ask("GET", "/v1/models"))["data"][0]["id"]
        if self._settings.sleeps:
            await self._command("/wake_up?tags=weights")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        await self._command("/collective_rpc", body, f"; does it find {weights}?")
        if json.loads(await self._command("/reset_prefix_cache") or "{}").get("success") is False:
            raise _UnavailableError("/reset_prefix_cache: other requests are still running")
        if self._settings.sleeps:
            await self._command("/wake_up?tags=kv_cache")

    async def _sleep(self) -> None:
        """Let the server free the memory of its weights and its cache."""
        await self._command("/sleep?level=2")

    async def _command(self, path: str, body: Any = None, detail: str = "") -> str:
        """Let the server do something that it need not try again if it fails, and return its answer.

        Raises MegatrainError, whose message has `detail`.
        """
        status, text = await self._answer("POST", path, body)
        if status == 503:
            raise _UnavailableError(f"{path}: status 503")
        if status >= 400:
            raise self._wrong(
                f"fails at {path}: status {status}: {_shown(text)}{detail}; see its log, and start a vLLM of 0.18 or "
                "later on model.path as in docs/post_training.md#a-server"
            )
        return text

    async def _complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        choice = await self._choice(prompt, sampling, 0)
        ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if choice.get("finish_reason") == "abort":  # by a pause or a sleep of the server
            raise _UnavailableError("aborted a completion")
        if not ids:
            raise self._wrong("returns no token_ids: vLLM does from version 0.10.2 on")
        if logprobs is None or len(logprobs) != len(ids) or None in logprobs:
            raise self._wrong("returns no log-probability for each token")
        ended = ids[-1] in sampling.ends
        if not ended and len(ids) != sampling.max_new_tokens:
            raise self._wrong(
                f"ended a completion at token {ids[-1]}, number {len(ids)} of {sampling.max_new_tokens}, which is no "
                f"end of an answer ({', '.join(map(str, sampling.ends))}): start it with --generation-config vllm"
            )
        return Completion(ids, logprobs, ended)

    async def _likeliest(self, prompt: Prompt, temperature: float) -> float:
        """Return the log-probability that the server reports of the token that is likeliest after a prompt."""
        choice = await self._choice(prompt, SamplingParams(1, temperature), 1)
        return max(map(float, choice["logprobs"]["top_logprobs"][0].values()))

    async def _choice(self, prompt: Prompt, sampling: SamplingParams, num_top: int) -> dict[str, Any]:
        """Return what the server says of one completion, with so many of the likeliest tokens at each place."""
        body = {
            "model": self._model, "prompt": list(prompt.ids), "seed": prompt.seed,
            "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.ends), "ignore_eos": True,  # else it has further ends
            "logprobs": num_top, "return_token_ids": True, **NEUTRAL,
        }  # fmt: skip
        choice: dict[str, Any] = (await self._ask("POST", "/v1/completions", body))["choices"][0]
        return choice

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer. Raises _UnavailableError for a failure that may pass, else _RefusedError."""
        status, text = await self._answer(method, path, body)
        if status == 429 or status >= 500:
            raise _UnavailableError(f"{path}: status {status}: {_shown(text)}")
        if status >= 400:
            raise _RefusedError(self._says(f"refuses {path}: status {status}: {_shown(text)}"))
        try:
            return json.loads(text or "null")
        except ValueError:
            raise self._wrong(f"answers {path} by no JSON: {_shown(text)}") from None

    async def _answer(self, method: str, path: str, body: Any) -> tuple[int, str]:
        try:
            async with self._http.request(method, path, json=body) as response:
                return response.status, await response.text()
        except self._failures as error:
            raise _UnavailableError(str(error) or type(error).__name__) from None

    def _wrong(self, what: str) -> MegatrainError:
        return MegatrainError(self._says(what))

    def _says(self, what: str) -> str:
        return f"train.rollouts.server: {self._settings.url} {what}"


class _RefusedError(MegatrainError):
    """Reports that the server refuses a request as such."""


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
