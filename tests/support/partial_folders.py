"""Makes folders that a process was killed in the middle of writing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def killed_while_writing(out: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from megatrain_ray.io.files.partial_folder import complete_or_absent\n"
        "with complete_or_absent(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'deep').mkdir()\n    (folder / 'deep' / 'half').touch()\n    (folder / 'old').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
