"""Stands in for vLLM's server: it speaks the same protocol, and samples by the plain Transformers model on the CPU.

Tests run without vLLM by it. `benchmarks/vllm_server.py` runs the same protocol with a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Json = dict[str, Any]
SLEEP = ("/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache")


@dataclass
class StandIn:
    """Holds the model, what was asked, and the folders of weights that were loaded.

    Tests change what it does by its fields.

    folder: of the model that it starts with.
    processed: log-probabilities are those after the temperature, as with --logprobs-mode processed_logprobs.
    in_dev_mode: it has the endpoints for weights.
    keeps_weights: it says that it has loaded new weights, and goes on with the old ones.
    num_busy: resets of the cache to refuse, as vLLM does while it answers others.
    max_model_len: what it says of it.
    change: is called with each completion, and may change it.
    answering: set unless completions are to wait.
    fault: is called with each path and the number of requests for it so far; returns a status to fail with, or None.
    """

    folder: Path
    url: str = ""
    processed: bool = False
    in_dev_mode: bool = True
    keeps_weights: bool = False
    num_busy: int = 0
    max_model_len: int = 256
    fault: Callable[[str, int], int | None] = lambda path, count: None
    change: Callable[[Json], None] = lambda choice: None
    asked: list[str] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    answering: threading.Event = field(default_factory=threading.Event)
    loaded: list[Path] = field(default_factory=list)
    awake: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})

    def __post_init__(self) -> None:
        self.answering.set()
        self._turn = threading.Lock()
        self._model: Any = _load(self.folder)

    def answer(self, path: str, body: Json) -> tuple[int, Json]:
        if path == "/v1/completions":
            self.answering.wait()
        with self._turn:
            self.asked.append(path)
            if status := self.fault(path, self.asked.count(path)):
                return status, {"error": "the engine is dead"}
            if path.startswith("/wake_up?tags="):
                self.awake.add(path.partition("=")[2])
            elif path == "/sleep?level=2":
                self.awake.clear()
                self._model = None
            answers: dict[str, Callable[[], tuple[int, Json]]] = {
                "/v1/models": lambda: (200, {"data": [{"id": "stand-in", "max_model_len": self.max_model_len}]}),
                "/is_sleeping": lambda: (200, {"is_sleeping": len(self.awake) < 2}),
                "/v1/completions": lambda: self._complete(body),
                "/collective_rpc": lambda: self._reload(body),
                "/reset_prefix_cache": self._reset,
                **dict.fromkeys(("/health", *SLEEP), lambda: (200, {})),
            }
            return answers[path]() if path in answers else (404, {"detail": "Not Found"})

    def _reload(self, body: Json) -> tuple[int, Json]:
        if not self.in_dev_mode:
            return 404, {"detail": "Not Found"}
        if "method" not in body:
            return 400, {"detail": "Missing 'method' in request body"}
        assert body["method"] == "reload_weights" and "weights" in self.awake
        self.loaded.append(Path(body["kwargs"]["weights_path"]))
        model = _load(self.loaded[-1])
        if self._model is not None and model.config.vocab_size != self._model.config.vocab_size:
            return 500, {"error": "AssertionError: shapes differ"}
        if not self.keeps_weights:
            self._model = model
        return 200, {"results": [None]}

    def _reset(self) -> tuple[int, Json]:
        self.num_busy -= 1
        return 200, {"success": self.num_busy < 0}

    def _complete(self, body: Json) -> tuple[int, Json]:
        self.bodies.append(body)
        assert self.awake == {"weights", "kv_cache"} and body["model"] == "stand-in"
        prompt = body["prompt"]
        if max(prompt) >= self._model.config.vocab_size:
            return 400, {"error": f"Token id {max(prompt)} is out of vocabulary"}
        if not 0 <= body["temperature"] <= 2:
            return 400, {"error": f"temperature must be in [0, 2], got {body['temperature']}"}
        choice = self._sample(prompt, body)
        self.change(choice)
        return 200, {"choices": [choice]}

    @torch.no_grad()
    def _sample(self, prompt: list[int], body: Json) -> Json:
        generator = torch.Generator().manual_seed(body["seed"])
        ids: list[int] = []
        reported: list[torch.Tensor] = []
        while len(ids) < body["max_tokens"] and not {*ids[-1:]} & {*body["stop_token_ids"]}:
            scores = self._model(torch.tensor([prompt + ids])).logits[0, -1].float()
            hot = scores / body["temperature"]
            ids.append(int(torch.multinomial(hot.softmax(-1), 1, generator=generator)))
            reported.append((hot if self.processed else scores).log_softmax(-1))
        logprobs = [float(values[token]) for token, values in zip(ids, reported, strict=True)]
        ended = ids[-1] in body["stop_token_ids"]
        return {
            "token_ids": ids, "finish_reason": "stop" if ended else "length",
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": [{"top": float(v.max())} for v in reported]},
        }  # fmt: skip


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@contextmanager
def stand_in(folder: Path, **changes: Any) -> Iterator[StandIn]:
    """Serve a model at a free port of this machine for the block."""
    found = StandIn(folder, **changes)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self._answer(json.loads(self.rfile.read(length)) if length else {})

        def _answer(self, body: Json) -> None:
            status, tree = found.answer(self.path, body)
            content = json.dumps(tree).encode()
            with suppress(ConnectionError):  # nobody waits for it any more
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # those that answer have ended when it is closed
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            found.answering.set()
            server.shutdown()
            thread.join()
