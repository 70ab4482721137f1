#!/usr/bin/env bash
# stop_run.sh RUN_DIR [SECONDS]: asks the run that uses RUN_DIR to save and end, and waits for that (600 s).
# Exit 0: nobody uses it any more. For hooks that run where the run's driver does (its PID namespace). Once only: asked
# again while it saves, the run ends without that save.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: stop_run.sh RUN_DIR [SECONDS]" >&2
    exit 2
fi
lock=$1/lock
seconds=${2:-600}
if [ ! -e "$lock" ]; then
    echo "$1 holds no run: nothing to stop" >&2
    exit 0
fi
if ! flock --nonblock "$lock" true; then
    # The driver holds the lock and has written its process id into it; once more would end it without a save.
    kill -TERM "$(cut -d ' ' -f 1 "$lock")" || true # it has ended meanwhile, or the wait below says who has not
fi
if ! flock --timeout "$seconds" "$lock" true; then
    echo "$1 is still in use after $seconds s: it saves, or hangs; wait for it, a second signal ends it without that save" >&2
    exit 1
fi
