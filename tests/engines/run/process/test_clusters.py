"""Scripts of `engines/run/process/README.md` as their parsers read them, and runs on a local Ray."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from helpers import launch, wheels

from fluvial.engines.cli.parse import list_fields
from fluvial.engines.cli.serve import ServeConfig
from fluvial.engines.errors import RunError
from fluvial.engines.run import recipes
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.process import on_ray

ROOT = Path(__file__).parents[4]
README = ROOT / "engines" / "run" / "process" / "README.md"
RUNS = ROOT / "tests" / "shared" / "workers" / "ray_runs.py"
# SkyPilot's own parser. Packages that it imports for clouds and its server, and that are not installed, are stand-ins.
SKYPILOT = """
import sys
from helpers import wheels

sys.meta_path.append(wheels.StandIns(
    "aiohttp", "aiosqlite", "alembic", "cachetools", "casbin", "colorama", "fastapi", "httpx", "ijson", "paramiko",
    "passlib", "prettytable", "prometheus_client", "psycopg2", "sqlalchemy", "sqlalchemy_adapter",
))
from sky.exceptions import InvalidSkyPilotConfigError
from sky.task import Task
try:
    task = Task.from_yaml(sys.argv[1])
except (ValueError, InvalidSkyPilotConfigError) as error:
    sys.exit(f"refused: {error}")
(resources,) = task.resources
print(task.num_nodes, resources.cloud, resources.accelerators, task.volumes, [*task.envs])
"""


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the service and the job of Kubernetes' file."""
    service, job = yaml.safe_load_all(blocks("yaml")[1])
    return service, job


def scripts() -> list[str]:
    """Return all shell scripts: blocks, and the parts of SkyPilot's and Kubernetes' files."""
    task, (_, job) = yaml.safe_load(blocks("yaml")[0]), kubernetes()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return [*blocks("bash"), task["setup"], task["run"], *container["args"]]


def test_scripts_are_read_by_bash(tmp_path: Path) -> None:
    found = scripts()
    assert len(found) == 5
    for script in found:
        (tmp_path / "script").write_text(script)
        done = subprocess.run(["bash", "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_flags_in_scripts_are_fluvials() -> None:
    """Those after `fluvial serve` and `fluvial.engines train grpo`, up to the end of the command."""
    flags = {"serve": list_fields(ServeConfig()), "train": list_fields(recipes.grpo("handwriting"))}
    known = {name: {f"--{each.replace('_', '-')}" for each in names} | {"--rollout.ahead"} for name, names in flags.items()}
    counted = 0
    for script in scripts():
        text = script.replace("\\\n", " ")
        for command, rest in re.findall(r"(?:fluvial|fluvial\.engines) (serve|train)\b([^\n&]*)", text):
            used = {word for word in re.split(r"[\s'\"]+", rest) if word.startswith("--")}
            assert used <= known[command]
            counted += len(used)
    assert counted >= 20


@pytest.mark.long
def test_slurms_options_are_sbatchs() -> None:
    """Known to simple_slurm, which has the names of sbatch's options, and placed where sbatch reads them."""
    (slurm,) = (script for script in blocks("bash") if "#SBATCH" in script)
    lines = slurm.splitlines()
    options = [re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line) for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert all(line.startswith("#SBATCH") for line in lines[1 : 1 + len(options)])  # none is read after the first command
    names = wheels.install("simple_slurm", "0.3.6") / "simple_slurm" / "arguments.txt"
    known = {line.split(",")[0].replace("_", "-") for line in names.read_text().split()}
    assert {option[1] if option else None for option in options} <= known


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift 2; done
echo $$ >> "$STEPS"
exec setsid "$@"
"""


@pytest.mark.long
def test_slurms_script_saves_the_newest_update_and_is_requeued(tmp_path: Path) -> None:
    """The servers and the trainer get SIGTERM at once, as with --signal; a job of the same `RUN` passes over damage.

    `srun` starts its command in a process group of this machine, which Slurm would signal as the step.
    """
    (slurm,) = (script for script in blocks("bash") if "#SBATCH" in script)
    port, store = str(launch.free_port()), str(launch.free_port())
    flags = " ".join([*launch.SMALL, "--updates", "500", "--checkpoint.every", "1000"])
    for known, here in (
        (" 0 1 2 3 4 5 6 7", f" {port[-1]}"),
        ("3000", port[:-1]),
        (":29500", f":{store}"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("train grpo ", f"train grpo {flags} "),
        ("--host 0.0.0.0", "--host 127.0.0.1"),
    ):
        assert known in slurm
        slurm = slurm.replace(known, here)
    tools, steps, out = tmp_path / "bin", tmp_path / "steps", tmp_path / "run"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf '127.0.0.1\\n127.0.0.1\\n'\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "job").write_text(slurm)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    named = {"PATH": path, "MODEL": "handwriting", "RUN": str(out), "STEPS": str(steps)}
    environment = launch.environment() | named | {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x"}
    metrics, log = out / "metrics.jsonl", tmp_path / "log"

    def written() -> str:
        return log.read_text() + (metrics.read_text() if metrics.exists() else "")

    def run(reaches: str) -> str:
        """Signal a job once it has written some text, and return all that it wrote."""
        steps.unlink(missing_ok=True)
        with log.open("w") as file:
            job = subprocess.Popen(["bash", "job"], env=environment, cwd=tmp_path, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + 600
            while not re.search(reaches, written()):
                assert job.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            for step in steps.read_text().split():
                os.killpg(int(step), signal.SIGTERM)
            job.wait(300)
        finally:
            for step in steps.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(step), signal.SIGKILL)
            job.kill()
        return log.read_text()

    text = run('"update": 2, ')
    done = max(record["update"] for record in launch.records(out))
    assert [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")] == [f"{done:06d}"], text
    assert f"SIGTERM: stopped after update {done}, all saved" in text
    damaged = shutil.copytree(out / "checkpoints" / f"{done:06d}", out / "checkpoints" / "000999")
    (damaged / "manifest.json").write_text("{")
    text = run(f"resumed .* after update {done}")
    assert "skipped: checkpoint" in text
    assert "Traceback" not in "".join(line for line in text.splitlines() if line.startswith("fluvial"))


NODES = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "127.0.0.1\nlocalhost",
    "SKYPILOT_NODE_RANK": "RANK",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    "JOB_COMPLETION_INDEX": "RANK",
}


@pytest.mark.long
def test_the_scripts_of_two_nodes_train_and_continue(tmp_path: Path) -> None:
    """SkyPilot's run, and Kubernetes' pods, which find its folder and resume it: a process per node, all on this machine."""
    (container,) = kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    texts = {2: yaml.safe_load(blocks("yaml")[0])["run"], 4: container["args"][0]}
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for updates, text in texts.items():
        flags = " ".join([*launch.SMALL, "--updates", str(updates)])
        here = {"/runs/a": str(tmp_path / "run"), "train grpo ": f"train grpo {flags} ", "29500": str(launch.free_port())}
        here |= {"fluvial-0.fluvial": "127.0.0.1", "--nproc-per-node 8": "--nproc-per-node 1"}
        for known, local in here.items():
            text = text.replace(known, local)
        with contextlib.ExitStack() as stack:
            nodes = []
            for rank in "01":
                own = {name: value.replace("RANK", rank) for name, value in NODES.items()}
                environment = launch.environment() | own | {"PATH": tools, "MODEL": "handwriting"}
                options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                nodes.append(subprocess.Popen(["bash", "-c", text], env=environment, cwd=tmp_path, **options))
                stack.enter_context(nodes[-1])
                stack.callback(nodes[-1].terminate)
            said = [node.communicate(timeout=300)[0] for node in nodes]
            assert [node.returncode for node in nodes] == [0, 0], said
    assert "resumed" in said[0]
    assert [record["update"] for record in launch.records(tmp_path / "run") if "loss" in record] == [2, 4]


@pytest.mark.long
def test_skypilots_file_is_a_task(tmp_path: Path) -> None:
    """As `sky launch` reads it, and a field that it does not know is refused."""
    folder = wheels.install("skypilot", "0.14.1", "sky")
    paths = os.pathsep.join(map(str, (folder, Path(wheels.__file__).parents[1], *sys.path[1:])))
    environment = {**os.environ, "PYTHONPATH": paths, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    (right, wrong), text = (tmp_path / "right.yaml", tmp_path / "wrong.yaml"), blocks("yaml")[0]
    right.write_text(text)
    wrong.write_text(text.replace("num_nodes", "nodes"))
    command = [sys.executable, "-P", "-W", "ignore", "-c", SKYPILOT]
    read, refused = (
        subprocess.run([*command, str(path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        for path in (right, wrong)
    )
    expected = "2 Kubernetes {'H100': 8} {'/runs': 'fluvial-runs'} ['MODEL']"
    assert (read.returncode, read.stdout.splitlines()[-1:]) == (0, [expected]), read.stderr[-2000:]
    assert (refused.returncode, "nodes" in refused.stderr) == (1, True), refused.stderr[-2000:]


@pytest.mark.long
def test_kubernetes_file_has_the_fields_of_its_api() -> None:
    """Models of Kubernetes' own Python client, which accept no other field and no other type."""
    pydantic = pytest.importorskip("pydantic")
    wheels.empty_packages(wheels.install("kubernetes", "37.0.2"), ("kubernetes", "kubernetes.client"))
    models = wheels.module("kubernetes.client.models")
    service, job = kubernetes()
    assert models.V1Service.model_validate(service).spec.cluster_ip == "None"  # headless
    pods = models.V1Job.model_validate(job).spec.template.spec
    assert (pods.subdomain, service["spec"]["selector"]["job-name"]) == (
        service["metadata"]["name"],
        job["metadata"]["name"],
    )
    assert {mount.name for mount in pods.containers[0].volume_mounts} == {volume.name for volume in pods.volumes}
    job["spec"]["paralellism"] = job["spec"].pop("parallelism")
    with pytest.raises(pydantic.ValidationError, match="paralellism"):
        models.V1Job.model_validate(job)


@pytest.mark.long
def test_runs_on_a_local_ray(tmp_path: Path) -> None:
    """Two ranks train on samples of a server, whose log-probs are the trainer's; a killed worker ends a run in one line."""
    pytest.importorskip("ray.train")
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-P", str(RUNS), str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((out / "whole" / "summary.json").read_text())
    assert (summary["updates"], summary["train_samples"], summary["first_pass_max_abs_log_ratio"]) == (2, 16, 0.0)
    assert "http://127.0.0.1:" in (out / "whole" / "config.json").read_text()
    assert not (out / "whole" / "warnings.txt").exists()
    found = json.loads((out / "found.json").read_text())
    assert re.fullmatch(r"rank [01]: .+", found["line"])  # a line: `.` is no line break
    assert found["left"] == []


def test_servers_that_ray_cannot_place_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their addresses are waited for with a limit; an actor that is never placed would hold the run for ever."""
    late = type("GetTimeoutError", (Exception,), {})
    train = SimpleNamespace(TrainingFailedError=type("TrainingFailedError", (Exception,), {}))
    ray = mock.MagicMock(train=train, exceptions=SimpleNamespace(GetTimeoutError=late))
    ray.get.side_effect = late
    modules = {"ray": ray, "ray.train": train, "ray.train.torch": mock.MagicMock()}
    monkeypatch.setattr(on_ray, "LIMIT", 7.0)
    with mock.patch.dict(sys.modules, modules), pytest.raises(RunError, match="no rollout server answered within 7 s"):
        on_ray.run(["grpo"], ["MODEL"], ranks=1, servers=2, gpus=False)
    assert ray.get.call_args.kwargs == {"timeout": 7.0}


@pytest.mark.long
def test_no_rank_outlives_its_worker(tmp_path: Path) -> None:
    """The worker dies with kill -9, and its rank gets SIGTERM, on which it saves its run."""
    said = tmp_path / "pid"
    rank = f"import os, pathlib, time; pathlib.Path({str(said)!r}).write_text(str(os.getpid())); time.sleep(600)"
    worker = f"from fluvial.engines.run.process import on_ray; on_ray.FLUVIAL = ({sys.executable!r}, '-c', {rank!r}); "
    process = subprocess.Popen([sys.executable, "-P", "-c", worker + "on_ray.run_rank({'train': []})"])
    until = time.monotonic() + 120
    while not (said.exists() and said.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait()
    state = Path("/proc", said.read_text(), "stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the rank goes on without its worker"
        time.sleep(0.05)
