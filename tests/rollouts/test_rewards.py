"""Reward functions: what each gives, and what becomes of those that fail, hang or die."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain_ray.engine.step.sampler import Completion
from megatrain_ray.errors import ConfigError, DeadlineError, MegatrainError
from megatrain_ray.io.rollouts.encode_rollouts import advantages_of
from megatrain_ray.rollouts.reward_functions import find_rewards
from megatrain_ray.rollouts.reward_process import RewardProcess
from megatrain_ray.rollouts.rollout_records import rollout_record, summary_of, total_rewards

OWN = """
import os, time

def length(prompts, completions, answer, **columns):
    return [len(text) + len(prompt) + right for prompt, text, right in zip(prompts, completions, answer)]

def short(prompts, completions):
    return [1] * len(completions)

def of_answers(prompts, completions, completion_ids, answer):
    return answer

def partly(completions, **columns):
    return [None if "skip" in text else 1 for text in completions]

def fails(completions, **columns):
    if completions == ["fine"]:
        return [1]
    if completions == ["huge"]:
        return [1e39]
    if completions == ["exit"]:
        raise SystemExit("enough")
    if completions == ["die"]:
        os._exit(3)
    while completions == ["hang"]:
        time.sleep(0.01)
    return [columns["level"][0] / 0]
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_rewards.py"
    file.write_text(OWN)
    return file


def test_named_functions() -> None:
    functions = find_rewards(["exact", "format", {"regex": r"####\s*(\S+)"}, {"regex": "x+y"}])
    assert list(functions) == ["exact", "format", "regex", "regex_2"]
    texts = ["42", " 42\n", "<think>hm\n</think>\n#### 42", "#### 7 no, #### 42 ", "xxy <think>a</think>", "#### 7"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for completions in (texts, chats):
        given = {"completions": completions, "prompts": [""] * 6, "answer": ["42"] * 4 + [42.0, 42]}
        assert functions["exact"](**given) == [1, 1, 0, 0, 0, 0]
        assert functions["format"](**given) == [0, 0, 1, 0, 0, 0]
        assert functions["regex"](**given) == [0, 0, 1, 1, 0, 0]
        assert functions["regex_2"](**given) == [0, 0, 0, 0, 1, 0]


def test_math_is_compared_by_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "math_verify", None)
        with pytest.raises(
            ConfigError, match=r"rewards\.0: math needs math-verify: pip install 'megatrain-ray\[math\]'"
        ):
            find_rewards(["math"])
    math = find_rewards(["math"])["math"]
    cases = {
        "0.5": ("so it is 0.50", "it is 2"),
        0.5: ("1/2", "2"),
        42.0: ("it is 42", "it is 420"),
        r"\sqrt{2}": (r"so $\sqrt{2}$", "2"),
        r"2\sqrt{3}": (r"\boxed{\sqrt{12}}", "2"),
        "x+1": ("$1 + x$", "$x - 1$"),
        "(1,2)": ("$(1, 2)$", "$(2, 1)$"),
        "1,234": ("1234 in all", "1"),
        "It has 3 parts of 4.\n#### 12": ("12", "3"),
        r"so $\frac{1}{2}$": (r"\boxed{0.5}", r"\boxed{2}"),
    }
    for answer, (right, wrong) in cases.items():
        assert math(completions=[right, wrong], answer=[answer] * 2) == [1, 0], answer
    assert math(completions=["42"], answer=["It has no answer"]) == [None]
    assert math(completions=["9^{9^{9^9}}", "2"], answer=["2", "9^{9^{9^9}}"]) == [0, 0], "within seconds"


def test_own_functions(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    Path("ends.py").write_text("raise SystemExit(3)")
    for name in (str(own), "own_rewards.py", "own_rewards"):
        assert find_rewards([f"{name}:length"])["length"](prompts=["ab"], completions=["c"], answer=[10]) == [13]
    for given, message in (
        ("own_rewards:none", "rewards.0: own_rewards has no function none"),
        ("own_rewards:short", r"rewards.0: short takes no completion_ids; .*: add \*\*columns to its parameters"),
        ("ends.py:f", "rewards.0: ends.py cannot be imported: SystemExit: 3"),
        ("absent.py:f", "rewards.0: no such file: absent.py"),
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_rewards([given])
    assert list(find_rewards(["own_rewards:of_answers"])) == ["of_answers"], "it names every column"


@pytest.fixture(scope="module")
def process(own: Path) -> Iterator[RewardProcess]:
    started = RewardProcess([f"{own}:partly", f"{own}:fails"], 60.0)
    yield started
    started.close()


def answered(process: RewardProcess, completions: list[str]) -> object:
    process.ask([""] * len(completions), completions, {"level": [1] * len(completions)})
    while (found := process.answer(0.1)) is None:
        pass
    return found


def test_the_process_answers_fails_hangs_and_dies(process: RewardProcess) -> None:
    assert process.names == ("partly", "fails")
    assert answered(process, ["fine"]) == {"partly": [1.0], "fails": [1.0]}
    with pytest.raises(
        MegatrainError, match=r"fails failed: ZeroDivisionError: division by zero \(.*own_rewards.py:27\)"
    ):
        answered(process, ["skip"])
    with pytest.raises(
        MegatrainError, match=r"fails failed: ValueError: expected None or finite numbers of at most 3.*1e\+39; mend"
    ):
        answered(process, ["huge"])
    with pytest.raises(MegatrainError, match=r"fails failed: SystemExit: enough \(.*own_rewards.py:22\)"):
        answered(process, ["exit"])
    assert answered(process, ["fine"]) == {"partly": [1.0], "fails": [1.0]}, "it goes on after a failure"
    process.ask([""], ["skip"], {"level": [2]})  # by an attempt at a run that ends before the answer
    assert answered(process, ["fine"]) == {"partly": [1.0], "fails": [1.0]}, "what was asked before is discarded"
    process._limit_s = 0.2
    with pytest.raises(DeadlineError, match=r"longer than train.rollouts.timeout_s: 0.2"):
        answered(process, ["hang"])


def test_a_process_that_dies(own: Path) -> None:
    process = RewardProcess([f"{own}:fails"], 60.0)
    with pytest.raises(MegatrainError, match=r"died \(exit code 3\)"):
        answered(process, ["die"])
    process.close()
    with pytest.raises(ConfigError, match="has no function gone"):
        RewardProcess([f"{own}:gone"], 60.0)


def test_an_answer_that_no_function_judges_has_no_reward() -> None:
    """It teaches nothing, and the others are compared without it."""
    scores = {"a": [1.0, None, None, 3.0], "b": [None, 2.0, None, 1.0]}
    totals = total_rewards(scores, [1.0, 0.5])
    assert totals == [1.0, 1.0, None, 3.5]
    with pytest.raises(MegatrainError, match=r"all reward functions \(a, b\) returned None for each of 2 answers"):
        total_rewards({"a": [None, None], "b": [None, None]}, [1.0, 0.5])
    completion = Completion([7], [-1.0], True)
    records = [
        rollout_record([5], 0, completion, "", {name: found[k] for name, found in scores.items()}, total)
        for k, total in enumerate(totals)
    ]
    assert advantages_of(records, "none") == pytest.approx([-5 / 6, -5 / 6, 0, 5 / 3])
    found = summary_of(records)
    assert (found["reward"], found["reward/a"], found["reward/b"]) == (pytest.approx(5.5 / 3), 2.0, 1.5)
