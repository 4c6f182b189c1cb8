"""kill -9 at ten random moments of a server and of the trainer: the run ends with the bits of one without."""

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import launch

UPDATES = 40
VICTIMS = ("server", "trainer") * 5
RUN = ("--updates", str(UPDATES), *launch.SMALL)


class Run:
    """A trainer and its server, as processes that are killed and started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.out, self.weights, self.stack, self.port = folder / "out", folder / "weights", stack, launch.free_port()
        self.weights.mkdir()
        self.processes: list[launch.Process] = []
        self.server = self.started_server()
        self.trainer = self.started_trainer()

    def started_server(self) -> launch.Process:
        options = ("--port", str(self.port), "--micro-batch", "4", "--weights-root", str(self.weights))
        process = self.started("serve", "handwriting", *options)
        process.address()
        return process

    def started_trainer(self) -> launch.Process:
        if (self.out / "config.json").exists():
            return self.started("train", "handwriting", "--out", str(self.out), "--resume")
        served = ("--rollout.source", f"http://127.0.0.1:{self.port}", "--rollout.servers.weights-folder", str(self.weights))
        return self.started("train", "handwriting", "--out", str(self.out), *RUN, *served)

    def started(self, *args: str) -> launch.Process:
        self.processes.append(self.stack.enter_context(launch.start(*args)))
        return self.processes[-1]

    @property
    def records(self) -> int:
        metrics = self.out / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait(self, records: int, seconds: float) -> None:
        """Wait for a number of records, and then some seconds; a trainer that ends in one line is resumed."""
        until = time.monotonic() + 240
        while self.records < records and time.monotonic() < until:
            self.resume()
            time.sleep(0.01)
        time.sleep(seconds)
        self.resume()

    def resume(self) -> None:
        if self.trainer.poll() not in (None, 0):
            assert self.trainer.returncode == 1, self.trainer.stderr
            launch.one_line(self.trainer.stderr)
            self.trainer = self.started_trainer()

    def kill(self, victim: str) -> None:
        process = self.server if victim == "server" else self.trainer
        process.kill()
        process.wait(30)
        if victim == "server":
            self.server = self.started_server()
        else:
            self.trainer = self.started_trainer()


@pytest.mark.long
def test_ten_kills_leave_the_bits_of_a_run_without(tmp_path: Path) -> None:
    """Within start-up, rollouts, pushes, updates and checkpoints; no process writes a traceback."""
    launch.train(tmp_path / "straight", *RUN)
    rng = random.Random(26)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    with ExitStack() as stack:
        run = Run(tmp_path, stack)
        for victim in victims:
            run.wait(run.records + rng.randrange(3), rng.uniform(0, 0.5))
            assert run.trainer.poll() is None, "the run has ended before the last moment"
            run.kill(victim)
        until = time.monotonic() + 240
        while run.trainer.poll() != 0:
            assert time.monotonic() < until, run.trainer.stderr
            run.resume()
            time.sleep(0.02)
        assert not [process.stderr for process in run.processes if "Traceback" in process.stderr]
        assert run.server.poll() is None
    assert launch.weights(run.out) == launch.weights(tmp_path / "straight")
    assert [*run.weights.iterdir()] == []
    updates = [
        [record["update"] for record in launch.records(out) if "loss" in record] for out in (run.out, tmp_path / "straight")
    ]
    assert updates[0] == updates[1] == [*range(1, UPDATES + 1)]
