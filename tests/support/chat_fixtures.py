"""Holds chat templates of well-known families, each with a tiny tokenizer of the same kind as the family's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = ["the cat sat on the mat\n\n", "It is 4. Yes. Sure? 你好 [INST] [/INST] é", "  two  spaces \n and lines"] * 3


def as_written(content: str) -> str:
    return content


@dataclass(frozen=True)
class Family:
    """Describes a family's chat template and tokenizer.

    ending: the end mark of an answer.
    content: what the template makes of an answer.
    swallows: special tokens swallow the blanks after them.
    """

    name: str
    ending: str
    specials: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    content: Callable[[str], str] = as_written
    system: bool = True
    one_turn_each: bool = False
    swallows: bool = False
    metaspace: bool = False

    @property
    def source(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()

    def answer(self, content: str) -> str:
        """Return the text of an answer that is trained on."""
        return self.content(content) + self.ending + "\n" * self.swallows


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", "<|im_end|>", CHATML, eos="<|im_end|>"),
        Family("qwen2.5", "<|im_end|>", CHATML, eos="<|im_end|>"),
        Family(
            "qwen3",
            "<|im_end|>",
            (*CHATML, "<think>", "</think>"),
            eos="<|im_end|>",
            content=lambda text: "<think>\n\n</think>\n\n" + text.lstrip("\n"),
            one_turn_each=True,
        ),
        Family(
            "llama3",
            "<|eot_id|>",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            content=str.strip,
        ),
        Family(
            "mistral",
            "</s>",
            ("<s>", "</s>"),
            bos="<s>",
            eos="</s>",
            content=lambda text: " " + text,
            system=False,
            metaspace=True,
        ),
        Family("zephyr", "</s>", ("<s>", "</s>"), bos="<s>", eos="</s>"),
        Family(
            "gemma",
            "<end_of_turn>",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            bos="<bos>",
            eos="<eos>",
            content=str.strip,
            system=False,
        ),
        Family(
            "deepseek",
            "<｜end▁of▁sentence｜>",
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
        ),
        Family(
            "phi3",
            "<|end|>",
            ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
            bos="<s>",
            eos="<|endoftext|>",
            swallows=True,
        ),
        Family("olmo2", "<|endoftext|>", ("<|endoftext|>",), bos="<|endoftext|>", eos="<|endoftext|>"),
        Family("generation_tags", "<|im_end|>", CHATML, eos="<|im_end|>"),
    )
}


def build(folder: Path, family: Family) -> Path:
    """Write tokenizer.json, with a post-processor that would add the first token, and tokenizer_config.json."""
    tokenizer = _metaspace_bpe(family) if family.metaspace else _byte_level_bpe(family)
    tokenizer.add_special_tokens([AddedToken(s, special=True, rstrip=family.swallows) for s in family.specials])
    if family.bos:
        first = [(family.bos, tokenizer.token_to_id(family.bos))]
        adds = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=first)
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), adds])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": family.bos, "eos_token": {"content": family.eos, "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": family.source}))
    return folder


def _byte_level_bpe(family: Family) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def _metaspace_bpe(family: Family) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer with ▁ for spaces and <0x..> for bytes of unknown characters, as sentencepiece has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<unk>", *family.specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    return tokenizer
