"""Defines the settings of the data of a run.

Sizes are numbers of bytes after construction, however they were written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatrain_ray.config.values import (
    Count,
    Group,
    Names,
    Seed,
    Size,
    Sources,
    TemplateArguments,
    Text,
)  # fmt: skip


class DataConfig(Group):
    kind: Literal["pretrain", "sft", "tokens", "pairs", "unpaired", "rollouts", "prompts"] = "pretrain"
    """pretrain: texts; sft: chats, of which answers are learned; tokens: token ids; pairs: chosen and rejected answers;
    unpaired: answers that are labelled good or bad; rollouts: sampled answers with rewards;
    prompts: the run samples these itself (train.rollouts).
    Keys of other kinds are refused."""
    path: Sources
    """File, glob, folder, URL (s3://…), hub id (OWNER/NAME), a list of these, or a list of {path, weight} or {hub,
    name, split, revision, weight}. Formats: .jsonl, .json, .csv, .tsv (each also
    with .gz or .zst), .parquet, .arrow; texts: .txt as well; chats: dataset_info.json as well."""
    eval_path: Sources | None = None
    """Held-out data for eval_every, given like data.path."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """In place of data.eval_path: share of the records of data.path that are held out. A hash of each decides, so
    records that are added later change nothing for the others."""
    max_records: Count | None = None
    """Only the first records of each source (a list without weights is one), or of each data set of data.dataset, are
    used, held-out ones as well; null: all."""
    dataset: Names | None = None
    """sft, pairs, unpaired: names in the dataset_info.json that data.path is."""
    eval_dataset: Names | None = None
    """The same for data.eval_path."""
    chat_format: Literal["auto", "alpaca", "sharegpt", "messages", "prompt_completion"] = "auto"
    """sft, unpaired: format of the records; pairs: of their prompts; auto: by each record's keys."""
    chat_template: Text | None = None
    """Of chats: chatml, llama3, qwen, gemma, mistral, or a Jinja file; null: the tokenizer's own, else a plain one."""
    chat_template_args: TemplateArguments = {}  # noqa: RUF012, pydantic copies it
    """Variables of the template, such as {enable_thinking: false}."""
    images: bool = False
    """sft, pairs, unpaired: chats may hold images. The model's vision tower computes their features once, unless
    train.vision says otherwise."""
    learn: Literal["all", "last"] = "all"
    """sft: answers of a chat that are learned: all, or only the last."""
    learn_reasoning: bool = True
    """sft, pairs, unpaired: true: thoughts in answers are learned; false: answers are learned given their thoughts."""
    truncation: Literal["turn", "drop"] = "turn"
    """A longer chat is cut after an answer (turn) or left out (drop); token ids, pairs and rollouts are cut at the end
    or left out."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rollouts: an advantage is the reward - its group's mean, divided by the group's standard deviation (group), by
    that of all records of the source (batch), or not."""
    unfinished: Literal["learn", "drop"] = "learn"
    """rollouts: answers with `ended: false` are learned like others, or only their rewards count in their group."""
    text_field: Text = "text"
    """pretrain: JSON key or Parquet column of the text."""
    add_bos: bool | None = None
    """pretrain: begin each text with the tokenizer's bos token. null: if Transformers does, decided when a run
    begins."""
    add_eos: bool | None = None
    """pretrain without packing: end each text with the tokenizer's eos token, as packing does; sft with `bytes`: end
    each answer with id 256. null: if the model has that id, decided when a run begins."""
    bad_records: Literal["error", "skip"] = "error"
    """error: the first bad record ends the start; skip: bad records are counted."""
    tokenizer: Text | None = None
    """Folder with a tokenizer.json, hub id, or `bytes` (ids 0 to 255; 256 ends a document). null: model.path's own."""
    seq_len: Count
    """Inputs of a sequence, and as many targets, cut from windows of seq_len + 1 tokens."""
    stream: Size | None = None
    """pretrain, sft, tokens: fetch and tokenise the sources while training goes on, and keep at most so many bytes of
    them on disk, in run_dir/stream (20GB); null: sources are tokenised whole before it."""
    stream_portion: Size | None = None
    """Small files of a stream are fetched and tokenised up to so many bytes together; null: 256MB."""
    packing: bool = True
    """true: a row holds several documents, whole chats or pairs, which do not see one another; false: one, or one
    pair, of which each answer has half the row."""
    shuffle: bool = True
    """Order the windows anew each epoch."""
    seed: Seed = 0
    """Seed of the order."""

    def decided_marks(self, tokenizer: str) -> tuple[str, ...]:
        """Return the keys that are decided when a run begins: of texts, and of chats with the tokenizer `bytes`."""
        if self.kind == "pretrain":
            return "add_bos", "add_eos"
        return ("add_eos",) if self.has_chats and tokenizer == "bytes" else ()

    @property
    def held_out(self) -> HeldOutConfig | None:
        """Return the held-out data as a configuration of its own; None if there are none.

        They are read and cut like the training data.
        """
        own: dict[str, Any] = {}
        if self.eval_path is not None:
            own = {
                "path": self.eval_path, "dataset": self.eval_dataset, "eval_path": None, "eval_dataset": None,
                "stream": None,
            }  # fmt: skip
        elif self.eval_fraction is None:
            return None
        return HeldOutConfig.model_construct(**{**dict(self), **own})

    @property
    def key(self) -> str:
        """Return the key that names the files of these data."""
        return "data.path"

    @property
    def in_pairs(self) -> bool:
        """Return whether the data are preferences."""
        return self.kind == "pairs"

    @property
    def documents_per_record(self) -> int:
        """Return how many answers of a record the objective takes as wholes; 0: it is of single tokens."""
        return {"pairs": 2, "unpaired": 1, "rollouts": 1, "prompts": 1}.get(self.kind, 0)

    @property
    def has_chats(self) -> bool:
        """Return whether a chat template writes the data."""
        return self.kind in ("sft", "pairs", "unpaired", "rollouts", "prompts")

    @property
    def answers(self) -> Literal["learned", "preferred", "labelled"]:
        """Return what records say of their answers."""
        if self.is_labelled:
            return "labelled"
        return "preferred" if self.in_pairs else "learned"

    @property
    def is_labelled(self) -> bool:
        """Return whether the data are answers that are labelled good or bad."""
        return self.kind == "unpaired"

    @property
    def joins_documents(self) -> bool:
        """Return whether a window of the data may hold several documents. It holds one prompt."""
        return self.packing and self.kind != "prompts"

    def of_rollouts(self, file: Path) -> DataConfig:
        """Return how the answers to these prompts in a file are read."""
        return self.model_copy(update={"kind": "rollouts", "path": str(file), "shuffle": False})

    @property
    def hash_range(self) -> tuple[float, float]:
        """Return [start, stop): a record is one of these data if its hash, in [0, 1), is in that range."""
        return self.eval_fraction or 0.0, 1.0


class HeldOutConfig(DataConfig):
    """Describes held-out data as if they were training data."""

    @property
    def key(self) -> str:
        return "data.eval_path" if self.eval_fraction is None else "data.path"

    @property
    def hash_range(self) -> tuple[float, float]:
        return 0.0, self.eval_fraction or 1.0
