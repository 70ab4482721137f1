"""Batches of a run's own rollouts: those of the newest sampling before the step, in their order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain_ray.config.schema import TrainConfig
from megatrain_ray.data.data_worker import DataWorker
from megatrain_ray.data.rollout_stream import RolloutFiles
from megatrain_ray.data.tokenize_data import tokenize, tokenize_rollouts
from megatrain_ray.errors import ConfigError, MegatrainError
from megatrain_ray.io.batching.corpus import open_corpus
from megatrain_ray.rollouts.prompts import Prompts

NUM_PROMPTS, GROUP, STEPS, VOCAB = 3, 2, 2, 257


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    records: list[dict[str, object]] = [
        {"prompt": "one", "answer": 1},
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"}], "answer": 2},
        {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "3"}], "answer": 3},
        {"prompt": "four", "answer": 4},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rollouts = {"rewards": ["exact"], "group_size": GROUP, "steps": STEPS, "max_new_tokens": 8}
    return TrainConfig.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "kind": "prompts",
                "path": str(tmp_path / "prompts.jsonl"),
                "tokenizer": "bytes",
                "seq_len": 128,
                "add_eos": True,
            },
            "train": {"steps": 6, "batch_size": GROUP, "objective": "grpo", "rollouts": rollouts},
            "run_dir": str(tmp_path / "run"),
        }
    )


def test_a_step_has_the_batch_of_its_sampling_whatever_was_asked_before(tmp_path: Path, config: TrainConfig) -> None:
    tokens = tokenize(config.data, "bytes", VOCAB, tmp_path)
    files = RolloutFiles(tmp_path, STEPS, STEPS * GROUP // GROUP)

    def worker(step: int = 0, position: object = None, **changes: object) -> DataWorker:
        data = config.data.model_copy(update=changes)
        return DataWorker(data, tokens, VOCAB, GROUP, step, position, rollouts=files, micro_batch_size=3)  # type: ignore[arg-type]

    ours, ids = worker(), iter(range(100, 200))
    with pytest.raises(MegatrainError, match=r"cannot read .*step_0.jsonl"):
        ours.batch(1)
    files.file(0).write_text(json.dumps({"prompt_ids": [7], "completion_ids": [9], "reward": 0}) + "\n")
    tokenize_rollouts(config, files.file(0), VOCAB, files.tokens(0))
    files.file(0).write_text("")
    with pytest.raises(MegatrainError, match=r"the tokens of step_0.jsonl are missing, or it has changed"):
        ours.batch(1)
    for first in (0, 2, 4):
        sampled = [
            {"prompt_ids": [7, 8], "completion_ids": [next(ids), 256], "reward": k, "group": k // 2}
            for k in range(STEPS * GROUP)
        ]
        files.file(first).write_text("".join(json.dumps(record) + "\n" for record in sampled))
        tokenize_rollouts(config, files.file(first), VOCAB, files.tokens(first))
    assert files.steps() == [0, 2, 4]
    for asked in (1, 2, 3, 3, 2, 6, 4, 1, 5):
        batch, alone = ours.batch(asked), worker(packing=False).batch(asked)
        answers = [98 + GROUP * asked, 99 + GROUP * asked]
        assert batch.input_ids[0, [2, 6]].tolist() == alone.input_ids[:GROUP, 2].tolist() == answers
        assert batch.num_documents == alone.num_documents == GROUP
        assert batch.real is not None and batch.real.any(1).tolist() == [True, False, False], "rows fill a micro-batch"
        position = ours.position_after(asked)
        assert (position["step"], position["cursor"]) == (asked, asked // STEPS * STEPS % 4)
        resumed = worker(asked, position)
        if asked < 6:
            assert np.array_equal(resumed.batch(asked + 1).input_ids, worker().batch(asked + 1).input_ids)


def test_prompts_are_drawn_epoch_after_epoch_with_their_columns(tmp_path: Path, config: TrainConfig) -> None:
    (folder,) = tokenize(config.data, "bytes", VOCAB, tmp_path)
    prompts = Prompts(config.data, open_corpus("prompts", folder, VOCAB))
    drawn = [prompt for iteration in range(4) for prompt in prompts.draw(iteration, NUM_PROMPTS)]
    for epoch in range(3):
        part = drawn[4 * epoch : 4 * epoch + 4]
        assert sorted(prompt.columns["answer"] for prompt in part) == [1, 2, 3, 4]
    assert len({tuple(prompt.columns["answer"] for prompt in drawn[k : k + 4]) for k in (0, 4, 8)}) > 1, "shuffled"
    texts = {prompt.columns["answer"]: bytes(i for i in prompt.ids if i < 256).decode() for prompt in drawn}
    assert texts[3] == texts[1].replace("one", "three"), "an answer that a record has is left out"
    assert "Be brief." in texts[2] and texts[2].endswith(texts[1].partition("one")[2])
    assert drawn[0].prompt == prompts.draw(0, 1)[0].prompt
    prompts.check_columns("answer")
    with pytest.raises(ConfigError, match=r"which record 1 of data\.path lacks; its keys are 'prompt', 'answer'"):
        prompts.check_columns("solution")
