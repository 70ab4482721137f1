"""Implements `megatrain generate`: goes on from a prompt, answers a chat, or the prompts of a file."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain_ray.console.logs import print_lines, show
from megatrain_ray.console.startup import spinner
from megatrain_ray.errors import ConfigError
from megatrain_ray.escapes import escaped
from megatrain_ray.io.images.image_parts import IMAGE, read_image
from megatrain_ray.io.records.read_records import RecordError
from megatrain_ray.run.run_files import RunFiles

if TYPE_CHECKING:
    from megatrain_ray.generate.answer import EncodedPrompt, Sampling
    from megatrain_ray.generate.load_model import LoadedModel
    from megatrain_ray.io.chat.chat_template import Message
    from megatrain_ray.io.tokens.image_files import StoredImage


def generate_text(options: Namespace) -> None:
    """Load the model and print what it generates. Raises ConfigError for options that do not go together."""
    prompt, images = _prompt(options), _read_images(options.image)
    with spinner("importing PyTorch and Transformers"):
        from transformers import set_seed

        from megatrain_ray.generate.answer import Sampling, encode_text
        from megatrain_ray.generate.load_model import loaded
        from megatrain_ray.generate.prompts_file import answer_file

    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, options.repetition_penalty)
    with loaded(options.source, chat=options.chat, step=options.step) as model:
        if options.seed is not None:
            set_seed(options.seed)
        if options.prompts is not None:
            records = answer_file(model, options.prompts, sampling, chat=options.chat, batch_size=options.batch_size)
            for record in records:
                print_lines(json.dumps(record, ensure_ascii=False, default=str))  # a table may hold times
        elif options.chat:
            turns = iter([prompt]) if prompt is not None else _typed(options.source)
            _chat(model, sampling, options.system, turns, images, is_typed=prompt is None)
        else:
            _stream(model, encode_text(model, prompt or ""), sampling)
        if model.template.is_own and not options.chat and not RunFiles(Path(options.source).absolute()).holds_run:
            show(f"({options.source} has a chat template: --chat asks it by that)", stream=sys.stderr)


def _prompt(options: Namespace) -> str | None:
    """Return the prompt; None: each turn of the chat is typed, or the prompts are in a file. Raises ConfigError."""
    if options.system is not None and (not options.chat or options.prompts is not None):
        raise ConfigError("--system is a chat's first turn: give --chat with it, and no --prompts")
    if options.image and (not options.chat or options.prompts is not None):
        raise ConfigError("--image belongs to a chat's first question: give --chat with it, and no --prompts")
    if options.prompts is not None:
        if options.prompt is not None:
            raise ConfigError("a prompt and --prompts are both given; leave one of them out")
        return None
    if options.prompt == "-":
        return sys.stdin.read().removesuffix("\n")
    if options.prompt is None and not (options.chat and sys.stdin.isatty()):
        raise ConfigError(
            "no prompt: give a text, - to read it from standard input, or --prompts FILE; --chat without a prompt "
            "begins a chat in a terminal"
        )
    return options.prompt  # type: ignore[no-any-return]


def _read_images(files: Sequence[Path]) -> list[StoredImage]:
    try:
        return [read_image(str(file), Path()) for file in files]
    except RecordError as error:
        raise ConfigError(f"--image: {error}") from None


def _typed(source: str) -> Iterator[str]:
    """Yield what somebody types, a line each, until /exit or Ctrl-D."""
    import readline  # noqa: F401 - lets `input` edit lines

    show(f"chat with {source}; /exit or Ctrl-D ends it", stream=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print_lines("")
            return
        if text == "/exit":
            return
        if text.startswith("/") and text[1:].isalpha():
            show(f"{text} is no command; /exit or Ctrl-D ends the chat", stream=sys.stderr)
        elif text:
            yield text


def _chat(
    model: LoadedModel, sampling: Sampling, system: str | None, turns: Iterator[str], images: Sequence[StoredImage],
    *, is_typed: bool,
) -> None:  # fmt: skip
    """Answer the user's turns. Ctrl-C ends the answer to a typed one, and else the command.

    images: of the first turn, before its text.
    """
    from megatrain_ray.generate.answer import encode_chat

    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for text in turns:
        marks = "" if any(message["role"] == "user" for message in messages) else IMAGE * len(images)
        asked: list[Message] = [*messages, {"role": "user", "content": marks + text}]
        try:
            answer = _stream(model, encode_chat(model, asked, images=images), sampling)
        except KeyboardInterrupt:
            if not is_typed:
                raise
            left_out = "(interrupted: this question and its answer are left out; /exit ends the chat)"
            show("", left_out, stream=sys.stderr)
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _stream(model: LoadedModel, prompt: EncodedPrompt, sampling: Sampling) -> str:
    """Print an answer as it comes, and return it."""
    from megatrain_ray.generate.answer import generate, text_streamer

    streamer = text_streamer(model, lambda text: print(escaped(text, keep="\n"), end="", flush=True))
    [answer] = generate(model, [prompt], sampling, streamer)
    print_lines("")
    if not answer.ended:
        show(
            f"(stopped after {sampling.max_new_tokens} tokens; --max-new-tokens allows more, and "
            "--temperature 0.7 or --repetition-penalty 1.1 helps against repetition)",
            stream=sys.stderr,
        )
    return answer.text
