"""Two runs on a local Ray: one of two ranks and a rollout server, and one whose second rank's worker is killed."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import ray

from fluvial.engines.errors import RunError
from fluvial.engines.run.process import on_ray

SECONDS = 60  # to wait for processes to end
SMALL = (
    "grpo --passes.minibatches 1 --micro-batch 4 --evaluation.every 0 --evaluation.samples 8 --final-samples 8 "
    "--sampling.prompts 2 --sampling.group 4 --sampling.steps 4 "
    "--sampling.window random --sampling.window.size 2 --sampling.window.high 3"
)


def processes(*folders: Path) -> list[psutil.Process]:
    """Return the processes whose command line names one of the folders as an argument, oldest first."""
    names = set(map(str, folders))
    found = [process for process in psutil.process_iter(["cmdline"]) if names & {*(process.info["cmdline"] or [])}]
    return sorted(found, key=lambda process: process.create_time())


def kill_a_worker(folder: Path) -> None:
    """Wait for the first update, and kill the Ray worker that holds one of the ranks."""
    records = folder / "metrics.jsonl"
    while not records.exists() or '"loss"' not in records.read_text():
        time.sleep(0.1)
    worker = processes(folder)[1].parent()
    assert worker is not None
    worker.send_signal(signal.SIGKILL)


def start() -> None:
    """Start Ray, which gives its own processes 30 seconds: on a busy machine again."""
    for left in (2, 1, 0):
        try:
            ray.init(num_cpus=4, include_dashboard=False)
            return
        except Exception:  # of no class of its own; the third one is raised
            ray.shutdown()
            if not left:
                raise


def main(out: Path) -> None:
    """Make both runs in a folder; Ray itself outlives them."""
    start()
    whole, killed, push = out / "whole", out / "killed", out / "push"
    push.mkdir()
    train = [*SMALL.split(), "--updates", "2", "--out", str(whole), "--rollout.servers.weights-folder", str(push)]
    on_ray.run(train, ["handwriting", "--weights-root", str(push)], ranks=2, servers=1, gpus=False)
    threading.Thread(target=kill_a_worker, args=(killed,), daemon=True).start()
    try:
        on_ray.run([*SMALL.split(), "--updates", "100000", "--out", str(killed)], ranks=2, gpus=False)
        line = ""
    except RunError as error:
        line = str(error)
    deadline = time.monotonic() + SECONDS
    while (left := processes(whole, killed, push)) and time.monotonic() < deadline:
        time.sleep(0.1)
    (out / "found.json").write_text(json.dumps({"line": line, "left": [process.cmdline() for process in left]}))


if __name__ == "__main__":
    # Ray would let its workers, and what they start, wait for every other process (nice 15).
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "CUDA_VISIBLE_DEVICES": ""})
    main(Path(sys.argv[1]))
