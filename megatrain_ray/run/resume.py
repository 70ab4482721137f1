"""Finds the save that a run goes on from, and tells the user what going on means."""

from __future__ import annotations

from contextlib import suppress

from megatrain_ray.console.logs import say
from megatrain_ray.errors import DamagedSaveError, MegatrainError
from megatrain_ray.io.saves.manifest import Manifest
from megatrain_ray.io.saves.save_folder import clean_unfinished, list_saves, load_manifest, set_aside
from megatrain_ray.run.run_dir import RunDir


def newest_save(run: RunDir) -> Manifest | None:
    """Return the manifest of the newest save that can be read; None if there is no save.

    Raises DamagedSaveError if there are saves and none of them can be read, ConfigError for a save of another run.
    """
    for step in reversed(list_saves(run.saves)):
        try:
            manifest = load_manifest(run.saves, step)
        except DamagedSaveError as damage:
            fall_back(run, step, damage)
        else:
            run.check_save(step, manifest)
            return manifest
    return None


def fall_back(run: RunDir, step: int, damage: DamagedSaveError) -> None:
    """Set a damaged save aside, so that training goes on from the one before. Raises DamagedSaveError if none is."""
    earlier = [saved for saved in list_saves(run.saves) if saved < step]
    if not earlier:
        raise DamagedSaveError(
            f"{damage}; there is no earlier save to go back to: repair it, or delete {run.saves} to start from step 0"
        )
    aside = set_aside(run.saves, step)
    say(f"warning: {damage}; it is kept as {aside.name}, training goes on from the save of step {earlier[-1]}")


def clean_after_end(run: RunDir) -> None:
    """Delete unfinished saves. Call it when every process has ended, so that nobody writes them."""
    with suppress(MegatrainError, OSError):  # the error that ended the run must be reported
        clean_unfinished(run.saves, run.token)


def tell_of_resume(run: RunDir, step: int) -> None:
    num_again = sum(row["step"] > step for row in run.rows())
    again = f"; {num_again} steps that were not saved are made again" if num_again else ""
    say(f"resuming from the save of step {step}{again}")
    if missing := run.missing_rows(step):
        say(
            f"warning: metrics.jsonl has no rows of {len(missing)} of the {step} steps up to that save, the first of "
            f"them step {missing[0]}: they were deleted; training is not changed by it"
        )
    for kept in run.kept_saves():
        say(f"note: {kept}; save_keep does not count it")
    before, now = run.read_config().train, run.config.train
    if before.steps != now.steps and now.schedule != "constant":
        say(f"train.steps was {before.steps}: from here on the learning rate follows the schedule of {now.steps} steps")
