#!/usr/bin/env bash
# stop_run.sh RUN_DIR [SECONDS]: asks the run that uses RUN_DIR to save and end, and waits for that (600 s).
# Exit 0: nobody uses it any more. For hooks that run where the run's driver does (its PID namespace).
set -euo pipefail

lock=$1/lock
seconds=${2:-600}
[ -e "$lock" ] || exit 0
if ! flock --nonblock "$lock" true; then
    # The driver holds the lock and has written its process id into it; once more would end it without a save.
    kill -TERM "$(cut -d ' ' -f 1 "$lock")"
fi
flock --timeout "$seconds" "$lock" true
