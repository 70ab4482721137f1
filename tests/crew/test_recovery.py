"""What follows from a failure, row by row of the decision table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain_ray.crew.recovery import (
    Decision,
    Failure,
    FailureBudget,
    ProcessKind,
    RecoveryAction,
    decide,
    decide_restart,
)
from megatrain_ray.errors import LostProcessError, MegatrainError

SHARD = Failure("optimizer shard 1", ProcessKind.SHARED_STATE, "it was killed")
OWNER = Failure("arena owner", ProcessKind.SHARED_STATE, "it was killed")
DATA = Failure("data", ProcessKind.DATA, "it was killed")
GPU = Failure("GPU worker", ProcessKind.GPU, "an illegal memory access")
RAYS = Failure("one of Ray's", ProcessKind.UNKNOWN, "it was killed")
WITHIN = FailureBudget(limit=3, count=1)
OVER = FailureBudget(limit=3, count=4)


def raised(decision: Decision, kind: type[MegatrainError] = MegatrainError) -> str:
    assert type(decision.error) is kind
    return str(decision.error)


@pytest.mark.parametrize("failure", [SHARD, OWNER, DATA, GPU])
def test_a_process_that_could_not_start_ends_the_run(failure: Failure) -> None:
    failed = replace(failure, could_not_start=True, reason="The actor died\n\nTypeError: it takes no tokens\n")
    decision = decide(failed, WITHIN)
    assert decision.action is RecoveryAction.GIVE_UP
    assert raised(decision) == f"a process of the run ({failure.name}) could not start: TypeError: it takes no tokens"


@pytest.mark.parametrize("failure", [RAYS, replace(GPU, can_step=False), replace(DATA, can_step=False)])
def test_what_nothing_can_go_on_without_ends_the_run(failure: Failure) -> None:
    """One of Ray's own, and before the first step a GPU worker or the data process."""
    decision = decide(failure, WITHIN)
    assert decision.action is RecoveryAction.GIVE_UP
    assert raised(decision) == f"a process of the run died ({failure.name}); the same command resumes"


@pytest.mark.parametrize("failure", [SHARD, OWNER, DATA, GPU, replace(GPU, repeats_steps=False)])
def test_one_failure_more_than_allowed_ends_the_run(failure: Failure) -> None:
    for lost_hosts in ("", "the Ray node of host 1 of 2 is gone"):
        decision = decide(replace(failure, lost_hosts=lost_hosts), OVER)
        assert decision.action is RecoveryAction.GIVE_UP
        assert raised(decision) == (
            f"{failure.name} died, the run's failure number 4 (max_failures: 3); the same command resumes"
        )
    assert decide(failure, FailureBudget(limit=3, count=3)).action is not RecoveryAction.GIVE_UP


@pytest.mark.parametrize("failure", [SHARD, OWNER, DATA, GPU])
def test_who_died_with_its_host_is_started_again_with_all_others(failure: Failure) -> None:
    decision = decide(replace(failure, lost_hosts="the Ray node of host 1 of 2 is gone"), WITHIN)
    assert decision.action is RecoveryAction.RESTART
    assert raised(decision, LostProcessError) == "the Ray node of host 1 of 2 is gone"


def test_a_step_that_cannot_be_repeated_is_made_again_from_the_newest_save() -> None:
    """The plan has layers on the device, or updates begin in the backward."""
    decision = decide(replace(GPU, repeats_steps=False), WITHIN)
    assert decision.action is RecoveryAction.RESTART
    assert raised(decision, LostProcessError).startswith("the GPU worker died with what lives on the device")


def test_one_gpu_worker_is_replaced_with_all_others() -> None:
    assert decide(GPU, WITHIN).action is RecoveryAction.REPLACE_GPU_WORKERS


@pytest.mark.parametrize(
    "failure", [SHARD, OWNER, DATA, replace(SHARD, can_step=False), replace(SHARD, repeats_steps=False)]
)
def test_who_leaves_its_state_behind_is_replaced_alone(failure: Failure) -> None:
    decision = decide(failure, WITHIN)
    assert (decision.action, decision.error) == (RecoveryAction.REPLACE_ACTOR, None)


def test_a_restart_says_from_where_the_run_goes_on() -> None:
    decision = decide_restart("the node is gone", WITHIN, 8)
    assert decision.action is RecoveryAction.RESTART
    assert decision.why == "the node is gone; going on from the save of step 8 (failure 1 of at most 3)"
    decision = decide_restart("the node is gone", WITHIN, None)
    assert decision.why == "the node is gone; nothing is saved: beginning again (failure 1 of at most 3)"


def test_one_restart_more_than_allowed_ends_the_run() -> None:
    decision = decide_restart("the node is gone", OVER, 8)
    assert decision.action is RecoveryAction.GIVE_UP
    assert raised(decision) == (
        "the node is gone; a process of the run died, the run's failure number 4 (max_failures: 3); the same command "
        "resumes"
    )
