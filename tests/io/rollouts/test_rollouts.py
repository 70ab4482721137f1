"""Records of rollouts: what is learned of them, which advantages they have, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain_ray.config.data_groups import DataConfig
from megatrain_ray.data.data_worker import open_stream
from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.chat_template import load_chat_template
from megatrain_ray.io.records.read_records import RecordError, RecordOutcome
from megatrain_ray.io.rollouts import encode_rollouts
from megatrain_ray.io.rollouts.encode_rollouts import RolloutEncoder, advantages_of
from megatrain_ray.io.rollouts.read_rollout import read_rollout
from megatrain_ray.io.tokens.token_files import read_meta
from megatrain_ray.io.tokens.tokenizer import load_tokenizer
from tests.support.texts import tokens_of

IDS = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]}


def encoder(max_tokens: int = 100, **choices: Any) -> RolloutEncoder:
    return RolloutEncoder(load_tokenizer("bytes"), load_chat_template("bytes", ends_bytes=True), max_tokens, **choices)


def rewarded(*rewards: float | None, prompt: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt_ids": [prompt], "completion_ids": [2], "reward": reward, **more} for reward in rewards]


def test_advantages_are_of_groups() -> None:
    """The standard deviation has n - 1, as TRL's; that of one answer, or of equal ones, is 0 and makes no NaN."""
    records = rewarded(0, 1, 1, 4) + rewarded(3, prompt=2) + rewarded(5, 5, prompt=3)
    group = np.array([0, 1, 1, 4.0])
    expected = [*(group - 1.5) / (group.std(ddof=1) + 1e-4), 0, 0, 0]
    assert advantages_of(records, "group") == pytest.approx(expected, rel=1e-6)
    assert advantages_of(records, "none").tolist() == [-1.5, -0.5, -0.5, 2.5, 0, 0, 0]
    whole = np.array([0, 1, 1, 4, 3, 5, 5]).std(ddof=1) + 1e-4
    assert advantages_of(records, "batch") == pytest.approx(np.array([-1.5, -0.5, -0.5, 2.5, 0, 0, 0]) / whole)
    assert advantages_of(rewarded(3), "batch").tolist() == [0.0]
    equal = rewarded(*[0.1] * 3) + rewarded(*[0.7] * 7, prompt=2)  # of which no mean is one of them
    assert not advantages_of(equal, "group").any()


def test_groups_are_named_or_of_prompts_in_a_row() -> None:
    named = [record for pair in zip(rewarded(0, 2, group="a"), rewarded(4, 8, group=7), strict=True) for record in pair]
    assert advantages_of(named, "none").tolist() == [-1, -2, 1, 2]
    again = rewarded(0, 2) + rewarded(9, prompt=2) + rewarded(4, 8)  # the prompt comes back later: another group
    assert advantages_of(again, "none").tolist() == [-1, 1, 0, -2, 2]


def test_what_is_learned_of_an_answer() -> None:
    """All sampled tokens with their end mark are, those without a log-probability too; results of tools are not."""
    record = IDS | {"logprobs": [-1, None, -0.5], "mask": [1, 0, 1], "reward": 2.0}
    ((ids, learned, columns, *_),) = encoder()((record, 0.25)).kept
    assert columns is not None
    assert (ids.tolist(), learned.tolist()) == ([5, 6, 7, 8, 9], [0, 0, 1, 0, 1])
    assert columns[0].tolist() == [2.0, 0, 0.25, 0.25, 0.25]  # the reward in place of the first token's advantage
    assert np.array_equal(columns[1], [0, 0, -1, np.nan, -0.5], equal_nan=True)
    ((_, _, columns, *_),) = encoder()((IDS | {"advantage": [1, 2, 3.5]}, 0.0)).kept
    assert columns is not None
    assert columns[0, 2:].tolist() == [1, 2, 3.5] and np.isnan(columns[0, 0]) and np.isnan(columns[1, 2:]).all()


def test_texts_get_the_end_mark_of_the_template_unless_they_were_cut_off() -> None:
    def learned_of(**record: Any) -> list[int]:
        ((ids, learned, *_),) = encoder()((record, 0.0)).kept
        return list(ids[learned != 0].tolist())

    asked = {"prompt": [{"role": "user", "content": "Hi"}], "reward": 0}
    assert learned_of(**asked, completion="yes") == [*b"yes", 256]
    assert learned_of(**asked, completion="yes", ended=False) == [*b"yes"]
    assert learned_of(**asked, completion_ids=[*b"yes", 256]) == [*b"yes", 256]


def test_long_and_unfinished_answers() -> None:
    cut = encoder(4)((IDS | {"advantage": [1, 2, 3]}, 0.0))
    assert cut.outcomes == [RecordOutcome.CUT, RecordOutcome.UNSCORED]
    assert cut.kept[0].ids.tolist() == [5, 6, 7, 8] and cut.kept[0].columns is not None
    assert cut.kept[0].columns.shape == (2, 4)
    assert encoder(4, truncation="drop")((IDS | {"advantage": 1}, 0.0)).outcomes == [RecordOutcome.TOO_LONG]
    assert encoder(2)((IDS | {"advantage": 1}, 0.0)).outcomes == [RecordOutcome.TOO_LONG]
    unfinished = IDS | {"advantage": 1, "ended": False}
    assert encoder(drops_unfinished=True)((unfinished, 0.0)).outcomes == [RecordOutcome.UNFINISHED]
    assert encoder()((unfinished | {"mask": [0, 0, 0]}, 0.0)).outcomes == [RecordOutcome.NOTHING_LABELLED]
    alone = IDS | {"reward": 1, "logprobs": [-1, -1, -1]}
    assert encoder()((alone, 0.0)).outcomes == [RecordOutcome.NO_ADVANTAGE]
    assert encoder()((alone, 0.5)).outcomes == []
    assert encoder()((alone | {"logprobs": [-1, None, -1]}, 0.5)).outcomes == []
    assert encoder()((alone | {"logprobs": [None] * 3}, 0.5)).outcomes == [RecordOutcome.UNSCORED]


LOGPROBS = "logprobs: expected finite log-probabilities of 0 and less, or null where none is known; token"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": None, "reward": 1}, "expected either prompt or prompt_ids, got neither (keys: 'prompt': null, 'r"),
        (IDS | {"prompt": "a", "reward": 1}, "expected either prompt or prompt_ids, got both"),
        ({"prompt_ids": [1], "completion": "a", "reward": 1}, "completion: goes with a prompt; with prompt_ids give"),
        (IDS, "expected a reward or an advantage, got neither"),
        (IDS | {"reward": True}, "reward: expected a number, got True"),
        (IDS | {"reward": float("nan")}, "reward: expected a number, got nan"),
        (IDS | {"advantage": [1, float("inf"), 0]}, "advantage: expected finite numbers, token 1 of the ans"),
        (IDS | {"advantage": [1, 0, 1e39]}, "advantage: expected finite numbers, token 2 of the ans"),
        (IDS | {"reward": 1, "logprob": [-1]}, "unknown key 'logprob'; did you mean 'logprobs'?"),
        (IDS | {"reward": 1, "logprobs": [-1, 1.0, 0]}, f"{LOGPROBS} 1 has 1.0"),
        (IDS | {"reward": 1, "logprobs": [None, 0, float("nan")]}, f"{LOGPROBS} 2 has nan"),
        (IDS | {"reward": 1, "logprobs": [-1, None, -1e39]}, f"{LOGPROBS} 2 has -1e+39"),
        (IDS | {"reward": 1, "mask": [0, 2, 1]}, "mask: expected 0 and 1, got 0 to 2"),
        (IDS | {"reward": 1, "group": [1]}, "group: expected a text or a number, got [1]"),
        (IDS | {"reward": 1, "ended": "no"}, "ended: expected true or false, got 'no'"),
        ({"prompt_ids": [], "completion_ids": [1], "reward": 1}, "prompt_ids: expected ids, got none"),
        ({"prompt_ids": [1], "completion_ids": ["1"], "reward": 1}, "completion_ids: expected a list of integers, got"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecordError) as caught:
        read_rollout(record)
    assert str(caught.value).startswith(problem)


def test_numbers_for_other_tokens_are_refused() -> None:
    found = encoder()((IDS | {"reward": 1, "logprobs": [-1, -2]}, 0.0)).problem
    assert found == "logprobs: has 2 numbers, and the answer 3 tokens; expected as many"
    found = encoder()(({"prompt": "a", "completion": "b", "reward": 1, "mask": [1]}, 0.0)).problem
    assert found is not None and found.startswith("mask: has 1 number, and the answer 2 tokens; expected as many")
    assert found.endswith("completion_ids says which tokens were sampled")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, line = tmp_path / "rollouts.jsonl", json.dumps(IDS | {"reward": 1}) + "\n"
    file.write_text(line)

    def growing(*given: Any) -> Any:
        file.write_text(2 * line)
        return advantages_of(*given)

    monkeypatch.setattr(encode_rollouts, "advantages_of", growing)
    data = DataConfig.model_validate({"kind": "rollouts", "path": str(file), "tokenizer": "bytes", "seq_len": 5})
    with pytest.raises(ConfigError, match="files changed while they were read"):
        tokens_of(data, tmp_path)


def test_batches_have_the_numbers_of_their_targets(tmp_path: Path) -> None:
    """Dropped answers count in their group. Of each target a batch has the numbers, whatever the row.

    A model may sample ids that its tokenizer lacks, here of more than 16 bits.
    """
    ids = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 70_000]}
    records = [ids | {"reward": reward, "logprobs": [-0.1, -0.2, -0.3]} for reward in (1, 0)]
    records.append({"prompt_ids": [5, 6], "completion_ids": [9], "reward": 5, "ended": False, "logprobs": [-0.4]})
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {
        "kind": "rollouts", "path": str(tmp_path / "rollouts.jsonl"), "tokenizer": "bytes", "seq_len": 5,
        "shuffle": False, "unfinished": "drop", "scale_rewards": "none",
    }  # fmt: skip
    data = DataConfig.model_validate(settings)
    (folder,) = tokens_of(data, tmp_path, 80_000)
    meta = read_meta(folder)
    assert meta is not None and (meta.num_records, meta.num_dropped) == (3, 1)
    batch = open_stream(data, (folder,), 80_000, 2).next_batch()
    assert batch.counts == (2, 6) and batch.num_tokens == 10  # a full row's last token is an input as well
    assert batch.targets.tolist() == [[-100, 7, 8, 70_000, -100]] * 2
    assert batch.columns["advantage"].tolist() == [[0, -1, -1, -1, 0], [0, -2, -2, -2, 0]]
    assert batch.columns["sampler_logprob"][0] == pytest.approx([0, -0.1, -0.2, -0.3, 0])
    assert batch.rewards is not None and batch.rewards.tolist() == [1, 0]
    assert batch.means == {"reward": (1.0, 2), "answer_tokens": (6, 2)}
