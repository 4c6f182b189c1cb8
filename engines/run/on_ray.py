"""A training run on Ray: its ranks are workers of Ray Train's torch backend, its rollout servers are actors."""

import os
import subprocess
import sys
from collections.abc import Sequence

FLUVIAL = (sys.executable, "-P", "-m", "fluvial.engines")


class Server:
    """An actor that holds a rollout server, which other machines reach if FLUVIAL_SERVE_KEY holds an API key."""

    def __init__(self, arguments: Sequence[str]) -> None:
        from ray.util import get_node_ip_address

        host = get_node_ip_address() if "FLUVIAL_SERVE_KEY" in os.environ else "127.0.0.1"
        command = [*FLUVIAL, "serve", *arguments, "--host", host, "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def address(self) -> str:
        """Wait until the model is loaded, and return the server's address."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving "):
                return line.split(" on ")[-1].split()[0]
        raise RuntimeError(f"fluvial serve ended with exit code {self.process.wait()}")

    def stop(self) -> int:
        """End the server, and return its exit code."""
        self.process.terminate()
        return self.process.wait()


def rank(config: dict[str, Sequence[str]]) -> None:
    """Run one rank of a training run in a process of its own, which finds the others through Ray Train's store."""
    environment = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store serves as torchrun's does
    code = subprocess.run([*FLUVIAL, "train", *config["train"]], env=environment, check=False).returncode
    if code:
        raise RuntimeError(f"rank {os.environ['RANK']} ended with exit code {code}")


def run(train: Sequence[str], serve: Sequence[str] = (), *, ranks: int, servers: int = 0, gpus: bool = True) -> None:
    """Run `fluvial train` on Ray, with a GPU for each rank and each rollout server unless `gpus` is False.

    Args:
        train, serve: arguments of `fluvial train` and `fluvial serve`; those of addresses are added.
        ranks, servers: number of ranks, and of rollout servers; without servers the ranks sample.
    """
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    actors = [ray.remote(num_gpus=int(gpus))(Server).remote(serve) for _ in range(servers)]
    addresses = ray.get([actor.address.remote() for actor in actors])
    config = {"train": [*train, *(["--rollout.source", ",".join(addresses)] if addresses else [])]}
    scaling, torch = ScalingConfig(num_workers=ranks, use_gpu=gpus), TorchConfig(backend="gloo")
    TorchTrainer(rank, train_loop_config=config, scaling_config=scaling, torch_config=torch).fit()
    ray.get([actor.stop.remote() for actor in actors])
