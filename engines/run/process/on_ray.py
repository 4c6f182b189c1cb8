"""A training run on Ray: ranks are workers of Ray Train's torch backend, rollout servers are actors."""

import os
import subprocess
import sys
from collections.abc import Sequence

from fluvial.engines.errors import RunError
from fluvial.engines.run.process.launch import end_with_parent

FLUVIAL = (sys.executable, "-P", "-m", "fluvial.engines")
LIMIT = 1800.0  # seconds until the rollout servers have loaded their models


class ServerActor:
    """Actor with a rollout server; other machines can reach it if FLUVIAL_SERVE_KEY holds an API key."""

    def __init__(self, arguments: Sequence[str]) -> None:
        import ray

        host = ray.util.get_node_ip_address() if "FLUVIAL_SERVE_KEY" in os.environ else "127.0.0.1"
        command = [*FLUVIAL, "serve", *arguments, "--host", host, "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, encoding="utf-8", preexec_fn=end_with_parent
        )

    def wait_for_address(self) -> str | None:
        """Wait until the model is loaded, and return the server's address; None if the server ended."""
        line = next((line for line in self.process.stdout or () if line.startswith("serving ")), None)
        return None if line is None else line.split(" on ")[-1].split()[0]

    def stop(self) -> None:
        """End the server."""
        with self.process:
            self.process.terminate()


def run_rank(config: dict[str, Sequence[str]]) -> None:
    """Run one rank of a training run in a separate process, which finds the others through Ray Train's store."""
    environment = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store serves as torchrun's does
    if code := subprocess.Popen([*FLUVIAL, "train", *config["train"]], env=environment, preexec_fn=end_with_parent).wait():
        raise RuntimeError(f"exit code {code}")


def run(train: Sequence[str], serve: Sequence[str] = (), *, ranks: int, servers: int = 0, gpus: bool = True) -> None:
    """Run `fluvial train` on Ray, with a GPU for each rank and each rollout server unless `gpus` is False.

    Args:
        train, serve: arguments of these commands.

    Raises:
        RunError: a rank or a server ended; the message says how, in one line.
    """
    import ray
    from ray.train.torch import TorchConfig, TorchTrainer

    actors = [ray.remote(num_gpus=int(gpus))(ServerActor).remote(serve) for _ in range(servers)]
    try:
        if None in (addresses := ray.get([actor.wait_for_address.remote() for actor in actors], timeout=LIMIT)):
            raise RunError("a rollout server ended before it served: its own line says why")
        config = {"train": [*train, *(["--rollout.source", ",".join(addresses)] if addresses else [])]}
        scaling, torch = ray.train.ScalingConfig(num_workers=ranks, use_gpu=gpus), TorchConfig(backend="gloo")
        TorchTrainer(run_rank, train_loop_config=config, scaling_config=scaling, torch_config=torch).fit()
    except ray.exceptions.GetTimeoutError:
        raise RunError(f"no rollout server answered within {LIMIT:g} s: give Ray resources") from None
    except ray.train.TrainingFailedError as error:
        ends = getattr(error, "worker_failures", {"?": error}).items()
        raise RunError("; ".join(f"rank {i}: {str(end).splitlines()[0]}" for i, end in ends)) from None
    finally:
        ray.wait([actor.stop.remote() for actor in actors], num_returns=max(servers, 1))
