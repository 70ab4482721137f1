"""`megatrain generate` with a model whose next token is known: each token has one successor."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain_ray.export.export import load_exported
from megatrain_ray.generate import answer, load_model
from megatrain_ray.io.tokens.byte_tokenizer import write_byte_tokenizer
from tests.support.runs import cli_here
from tests.support.settings import settings

VOCAB_SIZE, END = 257, 256
# An answer ends with the text `#~`, for which the tokenizer has no mark.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + '>' + m.content + ('#~' if m.role == 'assistant' else '') + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
ANSWER = "yes é漢."  # each byte once
CHAIN = [*f"={ANSWER}#~!!".encode()]  # after the end of an answer it would go on for ever
TEXT = [*b"pqr", END]  # a text that ends
HUB_ID = "no/such-model"


@pytest.fixture(autouse=True)
def quiet_about_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the warning of machines with a GPU that torch does not see, which is tested elsewhere."""
    monkeypatch.setattr("megatrain_ray.generate.load_model.unused_gpu", lambda hardware: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a folder with a Llama whose blocks add nothing and whose head knows the successors."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=VOCAB_SIZE - 1, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in llama.model.layers.parameters():
            parameter.zero_()
        embedding = llama.model.embed_tokens.weight
        embedding.zero_()[: VOCAB_SIZE - 1] = torch.eye(VOCAB_SIZE - 1)
        llama.lm_head.weight.zero_()
        for before, after in {**dict(pairwise(CHAIN)), **dict(pairwise(TEXT))}.items():
            llama.lm_head.weight[after, before] = 1
    llama.generation_config.eos_token_id = END
    llama.save_pretrained(folder)
    write_byte_tokenizer(folder, vocab_size=VOCAB_SIZE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_a_text_goes_on_to_its_end(model: str) -> None:
    done = cli_here("generate", model, "p")
    hint = f"({model} has a chat template: --chat asks it by that)\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "qr\n", hint)


def test_an_answer_comes_in_words_and_ends_at_the_templates_end(model: str) -> None:
    done = cli_here("generate", model, "Is it?", "--chat", "--system", "Be brief.")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ANSWER}\n", "")


def test_what_was_cut_is_told(model: str) -> None:
    done = cli_here("generate", model, "--chat", "Is it?", "--max-new-tokens", "3")
    assert (done.returncode, done.stdout) == (0, "yes\n")
    assert (
        done.stderr
        == "(stopped after 3 tokens; --max-new-tokens allows more, and --temperature 0.7 or --repetition-penalty 1.1 "
        "helps against repetition)\n"
    )


def test_a_seed_gives_the_same_text_again(model: str) -> None:
    arguments = ("generate", model, "p", "--temperature", "9", "--top-p", "0.9", "--max-new-tokens", "20", "--seed")
    first, again, other = (cli_here(*arguments, seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other


def test_prompts_of_a_file_are_answered_in_batches_and_in_order(model: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Is it, in all this?"}, {"role": "assistant", "content": "no"}]
    records = [
        {"messages": messages, "id": 7}, {"prompt": "Is it?"}, {"instruction": "Is it", "output": "no"},
        {"prompt": messages[:1], "chosen": messages[1:], "rejected": "yes"},
    ]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = cli_here("generate", model, "--chat", "--prompts", str(tmp_path / "chats.jsonl"), "--batch-size", "2")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [{**record, "answer": ANSWER, "ended": True} for record in records]
    (tmp_path / "texts.jsonl").write_text('{"prompt": "p"}\n{"prompt": "="}\n')
    done = cli_here("generate", model, "--prompts", str(tmp_path / "texts.jsonl"), "--max-new-tokens", "3")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["answer"], row["ended"]) for row in found] == [("qr", True), ("yes", False)]
    assert "has a chat template: --chat asks it by that" in done.stderr


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let these lines be typed in a terminal, and Ctrl-D after them."""
    left: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)


def test_what_has_no_room_is_moved_there_for_each_token(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_little_memory(folder: Path, **options: Any) -> Any:
        return load_exported(folder, max_memory={"cpu": "1MB"}, **options)

    monkeypatch.setattr(load_model, "load_exported", in_little_memory)
    done = cli_here("generate", model, "p")
    assert (done.returncode, done.stdout) == (0, "qr\n")
    assert "parameters have no room in the host's memory: they are copied there again for every token" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("end", [(), ("/exit", "never read")])
def test_a_chat_in_a_terminal_keeps_its_history(
    model: str, monkeypatch: pytest.MonkeyPatch, end: tuple[str, ...]
) -> None:
    prompts: list[answer.EncodedPrompt] = []
    generate = answer.generate
    monkeypatch.setattr(answer, "generate", lambda *arguments: prompts.extend(arguments[1]) or generate(*arguments))
    typed(monkeypatch, "a?", "  ", "b?", *end)
    done = cli_here("generate", model, "--chat")
    assert done.returncode == 0
    assert done.stdout.split() == [*ANSWER.split(), *ANSWER.split()]
    assert bytes(prompts[1].ids).decode() == f"u>a?\na>{ANSWER}#~\nu>b?\na="


def test_ctrl_c_ends_an_answer_and_not_the_chat(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, asked = answer.generate, []

    def interrupted_once(*arguments: Any) -> Any:
        asked.append(bytes(arguments[1][0].ids).decode())
        if len(asked) == 1:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(answer, "generate", interrupted_once)
    typed(monkeypatch, "a?", "b?")
    done = cli_here("generate", model, "--chat")
    assert (done.returncode, done.stdout.split()) == (0, ANSWER.split())
    assert asked[1] == "u>b?\na="
    assert "this question and its answer are left out" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}"], "no prompt: give a text, - to read it from standard input, or --prompts FILE"),
        (["{model}", "--chat"], "no prompt: give a text"),
        (["{model}", "p", "--system", "s"], "--system is a chat's first turn: give --chat with it"),
        (["{model}", "p", "--image", "x"], "--image belongs to a chat's first question: give --chat with it"),
        (["{model}", "p", "--chat", "--image", "{here}/x"], "--image: cannot read {here}/x: No such file"),
        (["{model}", "p", "--chat", "--image", "{model}/config.json"], "this llama model is asked with texts only"),
        (["{model}", "p", "--prompts", "x"], "a prompt and --prompts are both given"),
        (["{model}", ""], "the prompt is empty"),
        (["{model}", "p" * 64], "the prompt has 64 tokens, and the model 64 positions: shorten it"),
        (["{here}", "p"], "is neither a run directory nor a model's folder: it has no config.json"),
        (
            ["{model}/config.json", "p"],
            "config.json is a file; expected the directory of a run, which holds a config.yaml",
        ),
        ([HUB_ID, "p"], f"RUN_OR_FOLDER: {HUB_ID}: no such folder"),
        (["{bare}", "p"], "has no tokenizer.json, so texts cannot be turned into its token ids"),
        (["{plain}", "p", "--chat"], "has no chat template: leave --chat out"),
        (["{adapter}", "p"], "holds adapters without their model: name the run, or export it with --merge"),
        (["{broken}", "p"], "Transformers cannot load"),
        (["{run}", "p"], "holds no save yet"),
        (["{model}", "p", "--best"], "--step and --best name a save of a run, and {model} is no run directory"),
    ],
)
def test_bad_input(model: str, tmp_path: Path, arguments: list[str], message: str) -> None:
    for name in ("bare", "plain", "adapter", "broken", "run"):
        (tmp_path / name).mkdir()
    for name in ("bare", "plain", "broken"):
        (tmp_path / name / "config.json").write_text((Path(model) / "config.json").read_text())
    for name in ("plain", "broken"):
        write_byte_tokenizer(tmp_path / name, vocab_size=VOCAB_SIZE)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings(run_dir=str(tmp_path / "run"))))
    named = {name: str(tmp_path / name) for name in ("bare", "plain", "adapter", "broken", "run")}
    done = cli_here("generate", *(text.format(model=model, here=tmp_path, **named) for text in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message.replace("{model}", model).replace("{here}", str(tmp_path)) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "run").glob(".export-*"))
