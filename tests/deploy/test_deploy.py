"""deploy/, as far as that can be checked without a cluster: fields and types, names, paths, commands, scripts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import ray
import yaml

from megatrain_ray import cli
from megatrain_ray.config.yaml_file import load_config
from megatrain_ray.planning.stop_deadline import VARIABLE
from megatrain_ray.run.run_processes import wait_gone
from tests.support.manifests import DEPLOY, IMAGE, cluster_of, pod_of, read
from tests.support.runs import ROOT

SCRIPTS = [DEPLOY / "stop_run.sh", DEPLOY / "slurm" / "train.sbatch"]
PAGES = [ROOT / "README.md", DEPLOY / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_stop_leaves_its_save_the_time() -> None:
    """A hook is over before the pod is killed, and Ray waits as long as the hook."""
    [head] = pod_of("kuberay/rayjob.yaml")["containers"]
    script, run_dir, seconds = head["lifecycle"]["preStop"]["exec"]["command"]
    assert f"run_dir={run_dir}" in read("kuberay/rayjob.yaml")["spec"]["entrypoint"]
    environment = {each["name"]: each["value"] for each in head["env"]}
    of_job = yaml.safe_load(read("kuberay/rayjob.yaml")["spec"]["runtimeEnvYAML"])["env_vars"]
    assert environment[VARIABLE] == of_job[VARIABLE] == seconds
    assert pod_of("kuberay/rayjob.yaml")["terminationGracePeriodSeconds"] >= int(seconds) + 30
    assert int(read("runtime_env.yaml")["env_vars"][VARIABLE]) == 600
    assert f"{VARIABLE}=600" in " ".join(read("ray-up/cluster.yaml")["head_start_ray_commands"])
    assert re.search(rf"{VARIABLE}=600$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert "\n#SBATCH --signal=B:TERM@600\n" in SCRIPTS[1].read_text()
    assert "\nTimeoutStopSec=600\n" in (DEPLOY / "systemd" / "megatrain.service").read_text()
    assert f"COPY --chmod=0755 deploy/stop_run.sh {script}\n" in (DEPLOY / "Dockerfile").read_text()


def test_the_cluster_file_is_what_ray_up_takes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(read("ray-up/cluster.yaml"), schema)
    assert read("ray-up/cluster.yaml")["docker"]["image"] == IMAGE
    make_token, start = read("ray-up/cluster.yaml")["head_start_ray_commands"]  # it listens on all addresses
    assert "ray get-auth-token --generate" in make_token
    assert start.startswith("RAY_AUTH_MODE=token ")


def test_the_image_is_pinned_and_not_roots() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    words = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    [base] = [rest for first, *rest in words if first == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.\d\d", base[0])
    assert [rest for first, *rest in words if first == "USER"] == [["megatrain"]]
    assert words.index(["USER", "megatrain"]) < [first for first, *_ in words].index("CMD")
    for first, *rest in words:
        if first == "COPY":
            *sources, _ = [word for word in rest if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), rest
            assert all(is_sent(source) for source in sources), f"{rest}: .dockerignore keeps it away"


def is_sent(source: str) -> bool:
    return f"!{source.partition('/')[0]}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_every_dependency_is_pinned_for_the_image() -> None:
    tables = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^    "([\w-]+)(?:\[\w+\])?>=', tables.partition("[project.optional")[0], re.MULTILINE)
    pins = re.findall(r"^([\w-]+)==[\w.]+$", (DEPLOY / "constraints.txt").read_text(), re.MULTILINE)
    assert len(needed) > 10
    assert {name.lower() for name in needed} | {"nvidia-ml-py"} == set(pins)
    assert f"ray=={cluster_of('kuberay/rayjob.yaml')['rayVersion']}\n" in (DEPLOY / "constraints.txt").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_the_unit_is_one(tmp_path: Path) -> None:
    """systemd accepts the unit, with a program and a user that are here."""
    unit = (DEPLOY / "systemd" / "megatrain.service").read_text()
    unit = unit.replace("/opt/megatrain/bin/megatrain", sys.executable).replace("User=megatrain", "User=root")
    (tmp_path / "megatrain.service").write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / "megatrain.service"], capture_output=True, text=True)
    assert "megatrain.service" not in done.stderr, done.stderr


# A run that a signal stops after a save: 130. It tells the test when it listens.
STAND_IN = """#!/usr/bin/env python3
import signal, sys
from pathlib import Path
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
Path(sys.argv[-1]).write_text(" ".join(sys.argv[1:]))
while not heard:
    signal.pause()
sys.exit(130)
"""


@contextmanager
def batch(tmp_path: Path, program: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Yield the batch script as a process, with stand-ins for the run and for Slurm."""
    for name, text in (("megatrain", program), ("scontrol", f'#!/bin/sh\necho "$@" > {tmp_path}/requeued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    command = ["bash", SCRIPTS[1], "my.yaml", str(tmp_path / "listens")]
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a stand-in that heard nothing


def test_slurm_hands_its_signal_on_and_requeues_what_was_saved(tmp_path: Path) -> None:
    with batch(tmp_path, STAND_IN) as process:
        while not (tmp_path / "listens").exists() or not (tmp_path / "listens").read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "listens").read_text().startswith("train my.yaml ")


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_slurm_has_the_exit_code_of_a_run_that_ended_by_itself(tmp_path: Path, code: int) -> None:
    with batch(tmp_path, f"#!/bin/sh\nexit {code}\n") as process:
        assert process.wait(30) == code
    assert not (tmp_path / "requeued").exists()


# Ray and Slurm on two nodes: what they were asked, and nodes that have joined.
RAY_STAND_IN = """#!/bin/sh
if [ "$1" = status ]; then
    while [ "$(cat FOLDER/asked | wc -l)" -lt 2 ]; do :; done
    printf 'Active:\\n 1 node_a\\n 1 node_b\\nPending:\\n (no pending nodes)\\n'
    exit
fi
echo $$ >> FOLDER/pids
echo "$(basename "$0") $* token=${#RAY_AUTH_TOKEN}" >> FOLDER/asked
exec sleep 1000
"""


def test_slurm_starts_ray_on_every_node_of_a_job_and_ends_it(tmp_path: Path) -> None:
    for name in ("ray", "srun"):
        (tmp_path / name).write_text(RAY_STAND_IN.replace("FOLDER", str(tmp_path)))
    (tmp_path / "hostname").write_text("#!/bin/sh\necho '10.0.0.1 172.17.0.1 '\n")
    for name in ("ray", "srun", "hostname"):
        (tmp_path / name).chmod(0o755)
    said = tmp_path / "said"
    nodes = {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "first", "SLURM_GPUS_ON_NODE": "8"}
    with batch(tmp_path, f'#!/bin/sh\necho "$RAY_ADDRESS $*" > {said}\nexit 3\n', **nodes) as process:
        assert process.wait(60) == 3
    for pid in (tmp_path / "pids").read_text().split():
        wait_gone(int(pid), 30.0)
    arguments = f"train my.yaml {tmp_path / 'listens'} hardware.num_hosts=2"
    assert said.read_text() == f"10.0.0.1:20007 {arguments}\n"
    options = "--block --disable-usage-stats --num-gpus=8 --object-store-memory=134217728 token=64"
    head, others = sorted((tmp_path / "asked").read_text().splitlines())
    assert head == f"ray start --head --node-ip-address=10.0.0.1 --port=20007 --include-dashboard=false {options}"
    once_each = "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpu-bind=none --exclude=first"
    assert others == f"srun --overlap {once_each} ray start --address=10.0.0.1:20007 {options}"


HOLDER = """
import signal, sys
from pathlib import Path
from megatrain_ray.run.run_lock import hold_lock
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
with hold_lock(Path(sys.argv[1])):
    print("held", flush=True)
    while not heard:
        signal.pause()
    Path(sys.argv[1], "saved").touch()
"""


def test_the_hook_asks_the_run_that_holds_the_lock_and_waits_for_it(tmp_path: Path) -> None:
    hook = ["bash", SCRIPTS[0], tmp_path / "run", "30"]
    done = subprocess.run(hook, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"{tmp_path / 'run'} holds no run: nothing to stop\n")
    command = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert subprocess.run(hook).returncode == 0
        assert (tmp_path / "run" / "saved").exists()
    assert holder.returncode == 0
    assert subprocess.run(hook).returncode == 0  # nobody holds it


def test_the_hook_says_when_its_time_was_too_short(tmp_path: Path) -> None:
    deaf = [sys.executable, "-c", HOLDER.replace("while not heard", "while True"), tmp_path / "run"]
    with subprocess.Popen(deaf, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        done = subprocess.run(["bash", SCRIPTS[0], tmp_path / "run", "0"], capture_output=True, text=True)
        holder.kill()
    assert done.returncode == 1
    assert "still in use after 0 s" in done.stderr


def test_the_hook_does_without_a_process_that_has_ended(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        (tmp_path / "run" / "lock").write_text(f"{ended.pid} gone\n")
        done = subprocess.run(["bash", SCRIPTS[0], tmp_path / "run", "0"], capture_output=True, text=True)
        holder.kill()
    assert done.returncode == 1
    assert "still in use after 0 s" in done.stderr


def test_the_hook_says_how_it_is_called() -> None:
    done = subprocess.run(["bash", SCRIPTS[0]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "usage: stop_run.sh RUN_DIR [SECONDS]\n")


BEFORE_A_COMMAND = {"&&", "||", "|", "nohup", "--", "sudo", "time"}
AFTER_A_COMMAND = {"&&", "||", "|", "&", ">", ">>", "2>&1", "2>"}


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of every `megatrain` and `python -m megatrain_ray` in shell blocks."""
    for block in re.findall(r"^```(?:bash|sh|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for at, word in enumerate(words):
                begins = at == 0 or words[at - 1] in BEFORE_A_COMMAND or all("=" in each for each in words[:at])
                if (begins and Path(word).name == "megatrain") or words[at - 1 : at + 1] == ["-m", "megatrain_ray"]:
                    rest = words[at + 1 :]
                    ends = [n for n, each in enumerate(rest) if each in AFTER_A_COMMAND]
                    yield rest[: min(ends, default=len(rest))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_commands_of_pages_are_commands(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands have options that there are, and settings that load where the file is in the repository."""
    monkeypatch.setattr(cli, "COMMANDS", dict.fromkeys(cli.COMMANDS, lambda options: 0))
    for arguments in commands(page.read_text()):
        assert cli.main(arguments) == 0, arguments
        words = [word for word in arguments[1:] if not word.startswith("-")]
        if arguments[0] in ("train", "plan") and words and (ROOT / words[0]).is_file():
            load_config(ROOT / words[0], [word for word in words[1:] if "=" in word])


def test_there_are_commands_and_a_made_up_one_is_noticed() -> None:
    assert sum(len(list(commands(page.read_text()))) for page in PAGES) > 20
    with pytest.raises(SystemExit):
        cli.main(["train", "x.yaml", "--made-up"])


def test_commands_of_recipes_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", dict.fromkeys(cli.COMMANDS, lambda options: 0))
    entrypoint = shlex.split(read("kuberay/rayjob.yaml")["spec"]["entrypoint"])
    [start] = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "systemd" / "megatrain.service").read_text(), re.MULTILINE)
    [cmd] = re.findall(r"^CMD (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for program, *arguments in (entrypoint, shlex.split(start), json.loads(cmd)):
        assert Path(program).name == "megatrain"
        assert cli.main(arguments) == 0


@pytest.mark.parametrize("page", [DEPLOY / "README.md", ROOT / "docs" / "bare_metal.md"], ids=lambda page: page.stem)
def test_files_that_commands_name_are_there(page: Path) -> None:
    named = re.findall(r"\b(?:deploy|examples)/[\w./-]+\.\w+", page.read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
