"""Runs the command line on two ranks under torchrun's agent, which forks them instead of starting interpreters."""

import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fluvial.engines.cli import main as cli


def run(pids: str, restarts: int, *args: str) -> None:
    """Run the command line as `torchrun --standalone` does; the file RANK in the folder `pids` holds a rank's process id."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=str(uuid.uuid4()),
        max_restarts=restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=1.0,  # time for a rank to say that it lost another, before the agent tells it to stop
    )
    elastic_launch(config, rank)(pids, args)


def rank(pids: str, args: tuple[str, ...]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # not the agent's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    code = cli.run([*args])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
