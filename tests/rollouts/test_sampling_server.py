"""A server that samples: what it must have, what it is asked, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain_ray.config.train_groups import ServerConfig
from megatrain_ray.engine.step.sampler import Completion, Prompt, SamplingParams
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.rollouts import sampling_server
from megatrain_ray.rollouts.sampling_server import SamplingServer
from tests.support.sampling_stand_in import Json, StandIn, stand_in
from tests.support.tiny import VOCAB_SIZE, build_tiny

PROMPTS = [Prompt([number, 7, 8], 2**63 - 1 - number) for number in range(6)]
HOT = SamplingParams(4, temperature=1.5, top_p=0.9, ends=(256,))
HAND_OVER = ["/health", "/v1/models", "/collective_rpc", "/reset_prefix_cache"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("served"), num_layers=1)


@pytest.fixture
def server(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(sampling_server, "RETRY_S", 0.01)
    with stand_in(model) as found:
        yield found


def settings_of(server: StandIn, **changes: Any) -> ServerConfig:
    return ServerConfig(url=server.url, **{"timeout_s": 30.0} | changes)


def check(server: StandIn, sampling: SamplingParams = HOT, vocab_size: int = VOCAB_SIZE, **changes: Any) -> None:
    async def run() -> None:
        async with SamplingServer(settings_of(server, **changes)) as client:
            await client.check(sampling, 64, vocab_size)

    asyncio.run(run())


def sample(server: StandIn, weights: Path, **changes: Any) -> list[Completion]:
    async def run() -> list[Completion]:
        async with SamplingServer(settings_of(server, **changes)) as client:
            return await client.sample(PROMPTS, HOT, weights)

    return asyncio.run(run())


def test_prompts_are_asked_with_all_that_the_server_would_else_choose(server: StandIn, model: Path) -> None:
    check(server)
    server.asked.clear(), server.bodies.clear()
    completions = sample(server, model)
    assert server.asked == [*HAND_OVER, *["/v1/completions"] * len(PROMPTS)]
    assert sorted(body["prompt"] for body in server.bodies) == [prompt.ids for prompt in PROMPTS]
    assert sorted(body["seed"] for body in server.bodies) == sorted(prompt.seed for prompt in PROMPTS)
    (other,) = {
        repr({key: value for key, value in body.items() if key not in ("prompt", "seed")}) for body in server.bodies
    }
    assert other == repr({
        "model": "stand-in", "max_tokens": 4, "temperature": 1.5, "top_p": 0.9, "stop_token_ids": [256],
        "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "top_k": -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    })  # fmt: skip
    assert all(len(one.ids) == len(one.logprobs) == 4 and not one.ended for one in completions)
    assert sample(server, model) == completions, "by the same weights and seeds"


def without(key: str) -> Callable[[Json], None]:
    return lambda choice: choice.pop(key)


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "short": ({"max_model_len": 63}, {}, "takes 63 tokens, and data.seq_len is 64: start it with --max-model-len 64"),
    "no endpoints": (
        {"in_dev_mode": False},
        {},
        "has no endpoint for new weights: start it with VLLM_SERVER_DEV_MODE=1",
    ),
    "vocabulary": (
        {},
        {"vocab_size": 300},
        "refuses /v1/completions: status 400: .*299 is out of vocabulary.*does it serve model",
    ),
    "logprobs": ({"change": without("logprobs")}, {}, "returns no log-probability for each token"),
    "ids": ({"change": without("token_ids")}, {}, "returns no token_ids: vLLM does from version 0.10.2 on"),
    "temperature": (
        {},
        {"sampling": replace(HOT, temperature=2.5)},
        "refuses /v1/completions: .*in \\[0, 2\\], got 2.5",
    ),
    "asleep": ({"awake": {"weights"}}, {}, "is asleep: start it again, or set .*sleeps: true"),
    "processed": ({"processed": True}, {}, "reports .*: start it with --logprobs-mode raw_logprobs"),
    "failing": ({"fault": lambda path, count: 500}, {}, "/v1/models: status 500: .*the engine is dead"),
    "protocol": ({"fault": lambda path, count: 404}, {}, "refuses /v1/models: status 404"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_server_that_lacks_something_is_refused_before_the_run(server: StandIn, case: str) -> None:
    of_server, of_check, message = WRONG[case]
    for name, value in of_server.items():
        setattr(server, name, value)
    with pytest.raises(ConfigError, match=rf"^train\.rollouts\.server: {server.url} {message}"):
        check(server, **of_check)


def test_processed_logprobs_are_the_models_at_temperature_1(server: StandIn) -> None:
    server.processed = True
    check(server, SamplingParams(4, ends=(256,)))


def test_no_server_is_refused_before_the_run_and_ends_one(server: StandIn, model: Path) -> None:
    server.url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match=r"Cannot connect to host 127\.0\.0\.1:1.*is vLLM running there\?"):
        check(server)
    with pytest.raises(
        MegatrainError, match=r"answered nothing for timeout_s: 0\.1, with 6 of 6 .*Cannot connect.*start it again"
    ):
        sample(server, model, timeout_s=0.1)


def test_a_server_that_fails_gets_the_weights_again_and_what_is_left(server: StandIn, model: Path) -> None:
    whole = sample(server, model)
    server.asked.clear()
    server.fault = lambda path, count: 503 if path == "/v1/completions" and count in (3, 8) else None
    server.num_busy = 1  # others' requests hold the cache of the former weights
    assert sample(server, model) == whole
    assert server.asked.count("/collective_rpc") == 4
    server.fault = lambda path, count: 500 if path == "/v1/completions" else None
    with pytest.raises(MegatrainError, match=r"timeout_s: 0\.3, with 6 of 6 completions left: .*status 500.*is dead"):
        sample(server, model, timeout_s=0.3)
    server.fault = lambda path, count: 500 if path == "/collective_rpc" else None
    with pytest.raises(MegatrainError, match=rf"fails at /collective_rpc: status 500: .* find {model}\?; see its log"):
        sample(server, model)


def test_completions_that_the_server_ends_by_itself_are_not_learned(server: StandIn, model: Path) -> None:
    def cut(choice: Json) -> None:
        choice["token_ids"] = choice["token_ids"][:2]
        choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:2]

    server.change = cut
    with pytest.raises(MegatrainError, match=r"ended a completion at token \d+, number 2 of 4, .*--generation-config"):
        sample(server, model)


def test_a_silent_server_ends_the_run(server: StandIn, model: Path) -> None:
    server.answering.clear()
    try:
        with pytest.raises(MegatrainError, match=r"answered nothing for timeout_s: 0\.2"):
            sample(server, model, timeout_s=0.2)
    finally:
        server.answering.set()


def test_a_server_on_the_same_gpu_sleeps_while_the_run_trains(server: StandIn, model: Path) -> None:
    check(server, sleeps=True)
    assert (server.asked[-1], server.awake) == ("/sleep?level=2", set())
    server.asked.clear()
    check(server, sleeps=True)
    assert server.asked[-1] == "/is_sleeping", "one that sleeps has no weights to answer with"
    server.asked.clear()
    sample(server, model, sleeps=True)
    order = [path for path in server.asked if path != "/v1/completions"]
    assert order == [
        "/health", "/v1/models", "/wake_up?tags=weights", "/collective_rpc", "/reset_prefix_cache",
        "/wake_up?tags=kv_cache", "/sleep?level=2",
    ]  # fmt: skip


def test_a_silence_that_ends_while_the_server_fails_ends_the_sampling(
    server: StandIn, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation reaches requests that have failed in the same moment, and their failure takes its place."""

    tries = list[None]()

    async def fail_once_cancelled(*_: object) -> None:
        tries.append(None)
        assert len(tries) == 1, "it is tried again, and would be for ever"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise sampling_server._UnavailableError("status 500") from None

    monkeypatch.setattr(SamplingServer, "_complete_all", fail_once_cancelled)

    async def run() -> None:
        async with SamplingServer(settings_of(server, timeout_s=0.5)) as client:
            await client.sample(PROMPTS, HOT, model)

    with pytest.raises(MegatrainError, match=r"answered nothing for timeout_s: 0\.5, with 6 of 6 .*: status 500"):
        asyncio.run(run())
