"""Measures what a mirror of the saves costs a training run: step times with and without one, and the driver's work.

    python -m benchmarks.mirror_cost OUT.json CONFIG [--save-every 10] [--saves 2] [--repeats 2] [--sink-cores 1]
        [--tls] [--commit ID] [key=value …]

The mirror goes to s3_sink.py on loopback, a process with cores of its own, which forgets what it gets. So blobs are
uploaded as fast as this machine can, which is the worst case for the steps meanwhile; a network is slower, and costs
the same work over a longer time. The run has the other cores. Runs with and without a mirror alternate. Compared are
the steps in which the mirrored runs uploaded (rows whose `mirror_lag` shows that the last save was still on its way),
with the same steps of the others, which save as well: all of them (`cost_then`), and those in which no save was begun
or written (`cost_of_upload`). 12 GB in two saves, on a GPU machine:

    python -m benchmarks.mirror_cost OUT.json benchmarks/configs/speed/qwen2.5_0.5b.yaml hardware.hbm_layers=0

`driver_cpu_s_per_gb` is the CPU time that the driver of mirrored runs had more than that of the others, and
`driver_peak_bytes` the largest resident memory of each. `--tls`: the sink speaks TLS with a certificate of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain_ray.io.saves.save_folder import list_saves, load_manifest
from megatrain_ray.machine.environment import commit, hardware, versions
from tests.support.runs import command, plan_of, rows

POLL_S = 0.1
FIRST_STEPS = 2  # not counted: memory is touched and kernels are loaded in them
SENT = re.compile(r"mirrored the save of step (\d+): .* in ([\d.]+) s")
ENDED = re.compile(r": (saved )?step (\d+)(?:: |  )")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Holds what one run gave.

    step_s, mirror_lag: of each step; the lag is 0 in runs without a mirror.
    upload_s: seconds that each save took to be mirrored, by step.
    saving: steps in which a save was begun or written.
    driver_cpu_s: user and system time of the driver's process.
    """

    is_mirrored: bool
    step_s: list[float]
    mirror_lag: list[int]
    upload_s: dict[int, float]
    saving: list[int]
    save_bytes: int
    driver_cpu_s: float
    driver_peak_bytes: int


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("config")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sink-cores", type=int, default=1)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--commit")
    options = parser.parse_intermixed_args(argv)
    every = options.save_every
    steps = every * options.saves + every - 1  # the last save, after the last step, is uploaded when no step is left
    settings = [f"save_every={every}", f"train.steps={steps}", *options.settings]
    with tempfile.TemporaryDirectory(prefix="mirror_cost-", dir=".") as place, sink(options, Path(place)) as url:
        found = []
        for number in range(options.repeats):
            for mirror in (None, url.replace("NAME", str(number))):
                found.append(run(Path(place) / "run", options.config, settings, mirror))
                print(
                    f"{'mirrored' if mirror else 'plain'}: {statistics.median(found[-1].step_s):.4f} s a step",
                    flush=True,
                )
        device = plan_of(Path(place) / "run").device
    report = {
        "commit": options.commit or commit(),
        "hardware": hardware(device),
        "versions": versions(),
        "config": options.config,
        "settings": settings,
        "tls": options.tls,
        "sink_cores": options.sink_cores,
        "summary": compare(found, every),
        "runs": [asdict(each) for each in found],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


@contextmanager
def sink(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Start the sink on the last cores, leave the others to this process, and yield a URL in which to put a NAME."""
    cores = sorted(os.sched_getaffinity(0))
    its_own = cores[-options.sink_cores :]
    arguments = [sys.executable, "-m", "benchmarks.s3_sink", f"--cores={','.join(map(str, its_own))}"]
    query = "scheme=http"
    if options.tls:
        certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
        names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
        subprocess.run([*make, *names], check=True, capture_output=True)
        arguments += ["--tls", certificate, key]
        query = f"scheme=https&tls_ca_file_path={Path(certificate).resolve()}"
    os.environ.update(CREDENTIALS)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        port = int(process.stdout.readline())
        os.sched_setaffinity(0, set(cores) - set(its_own))
        yield f"s3://bucket/NAME?endpoint_override=127.0.0.1:{port}&{query}"
    finally:
        process.kill()
        process.wait()


def run(run_dir: Path, config: str, settings: Sequence[str], mirror: str | None) -> Found:
    """Train in a directory, in place of the run that it holds."""
    shutil.rmtree(run_dir, ignore_errors=True)
    more = [f"save_mirror={mirror}"] if mirror else []
    log = run_dir.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command("train", config, *settings, f"run_dir={run_dir}", *more), stdout=file, stderr=subprocess.STDOUT
        )
        driver_cpu_s, driver_peak_bytes = 0.0, 0
        while process.poll() is None:
            with suppress(OSError, IndexError):  # it has just ended
                cpu_s, peak_bytes = usage(process.pid)
                driver_cpu_s, driver_peak_bytes = max(driver_cpu_s, cpu_s), max(driver_peak_bytes, peak_bytes)
            time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(settings)}: exit {process.returncode}\n{log.read_text()[-4000:]}")
    lines = "".join(file.read_text() for file in sorted((run_dir / "logs").glob("driver*")))
    saves = run_dir / "saves"
    return Found(
        is_mirrored=mirror is not None,
        step_s=[row["step_s"] for row in rows(run_dir)],
        mirror_lag=[row.get("mirror_lag", 0) for row in rows(run_dir)],
        upload_s={int(match[1]): float(match[2]) for match in SENT.finditer(lines)},
        saving=list(while_saving(lines)),
        save_bytes=sum(blob.nbytes for blob in load_manifest(saves, list_saves(saves)[-1]).blobs()),
        driver_cpu_s=driver_cpu_s,
        driver_peak_bytes=driver_peak_bytes,
    )


def usage(pid: int) -> tuple[float, int]:
    """Return the CPU time of a process in seconds, and its largest resident memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), int(peak[1]) * 1024 if peak else 0


def compare(found: Sequence[Found], every: int) -> dict[str, Any]:
    """Return what a mirror cost. `found`: runs without one and with one in turns."""
    plain, mirrored = [each for each in found if not each.is_mirrored], [each for each in found if each.is_mirrored]
    chosen = [(each, step) for each in mirrored for step in while_uploading(each, every)]
    alone = [(each, step) for each, step in chosen if step not in each.saving]
    num_bytes = statistics.mean(len(each.upload_s) * each.save_bytes for each in mirrored)
    cpu_s = statistics.mean(e.driver_cpu_s for e in mirrored) - statistics.mean(e.driver_cpu_s for e in plain)
    seconds = [each.upload_s[step] for each in mirrored for step in each.upload_s]
    whole = [statistics.mean(s for e in group for s in e.step_s[FIRST_STEPS:]) for group in (plain, mirrored)]
    return {
        "save_gb": mirrored[0].save_bytes / 1e9,
        "upload_gb_per_s": mirrored[0].save_bytes / 1e9 / statistics.median(seconds),
        **cost("then", chosen, plain),
        **cost("of_upload", alone, plain),
        "cost_of_all_steps": whole[1] / whole[0] - 1,
        "driver_cpu_s_per_gb": cpu_s / (num_bytes / 1e9),
        "driver_peak_gib": [max(e.driver_peak_bytes for e in group) / 2**30 for group in (plain, mirrored)],
    }


def cost(name: str, chosen: Sequence[tuple[Found, int]], plain: Sequence[Found]) -> dict[str, Any]:
    """Return how many steps are compared, their mean seconds with and without a mirror, and their relative cost.

    chosen: steps of mirrored runs.
    """
    times = [(each.step_s[step - 1], other.step_s[step - 1]) for each, step in chosen for other in plain]
    if not times:
        return {f"steps_{name}": 0}
    beside, without = map(statistics.mean, zip(*times, strict=True))
    return {f"steps_{name}": len(chosen), f"step_s_{name}": [beside, without], f"cost_{name}": beside / without - 1}


def while_saving(lines: str) -> Iterator[int]:
    """Yield the steps in which a save was begun or written: from the saved one to the one that ran at the commit.

    lines: of the driver's log.
    """
    step = 0
    for match in ENDED.finditer(lines):
        if match[1]:
            yield from range(int(match[2]), step + 2)
        else:
            step = int(match[2])


def while_uploading(found: Found, every: int) -> Iterator[int]:
    """Yield the steps after which the save before them was not in the mirror yet."""
    for step, lag in enumerate(found.mirror_lag, 1):
        saved = (step - 1) // every * every
        if saved > 0 and lag > step - saved:
            yield step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
