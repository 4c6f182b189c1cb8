"""The cost of served samples, with a tiny network: what is counted, and that both sides make the same bits."""

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import launch

from fluvial.bench import serving
from fluvial.bench.serving import ServingConfig
from fluvial.engines.errors import RunError
from fluvial.engines.sampling.source import InProcess

pytestmark = pytest.mark.long


PUSHES = [
    *(("adapter", way) for way in ("auto", "shared_memory", "broadcast")),
    *(("all", way) for way in ("disk", "shared_memory", "broadcast")),
]


class Forked:
    """`subprocess` with a `Popen` that forks the server from a process that is warm."""

    PIPE = -1

    def Popen(self, line: list[str], **options: Any) -> SimpleNamespace:
        """Start the command line, and return it when it has said where it listens."""
        program = launch.start(*line[line.index("fluvial.engines") + 1 :])
        until = time.monotonic() + 120
        while "\n" not in program.stdout and program.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        ended = {"kill": program.kill, "wait": lambda timeout: program.__exit__()}  # which also removes its folder
        return SimpleNamespace(stdout=io.StringIO(program.stdout), pid=program.pid, **ended)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "subprocess", Forked())


def test_bytes_and_latents_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At most two latents per recorded step: those before and after it, which steps in a row share."""
    step, window, every = serving.run(ServingConfig(samples=2, tiny=True, out=tmp_path))
    assert (window.recorded, every.recorded, window.steps, window.runs) == (2, 10, 10, 1)
    assert (step.recorded, step.latents_per_step) == (1, 2)
    assert window.latents_per_step == 3 / 2
    assert every.latents_per_step == 11 / 10
    # Eight more latents of 4 x 4 floats; names, indices and headers take some bytes.
    latents = 8 * 4 * 16
    assert latents <= every.bytes_per_sample - window.bytes_per_sample <= latents + 256
    image, kept = 4 * 3 * 32 * 32, 3 * 4 * 16
    assert image + kept <= window.bytes_per_sample <= image + kept + 2048
    assert all(row.inside_seconds > 0 for row in (window, every))
    lines = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 3 + 2 + len(PUSHES)
    sent = {(trained.strip(), way.strip()): float(size) for trained, way, size in lines[-len(PUSHES) :]}
    assert [*sent] == PUSHES
    assert sent["adapter", "auto"] == sent["adapter", "shared_memory"] == sent["adapter", "broadcast"]
    assert sent["adapter", "auto"] < sent["all", "disk"] == sent["all", "shared_memory"] == sent["all", "broadcast"]
    assert not list(tmp_path.iterdir())


def test_other_samples_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InProcess.generate

    def other(*args: Any, **options: Any) -> Any:
        for chunk in real(*args, **options):
            yield chunk._replace(images=chunk.images + 1e-7)

    monkeypatch.setattr(InProcess, "generate", other)
    with pytest.raises(RunError, match="makes other samples"):
        serving.run(ServingConfig(samples=2, tiny=True, out=tmp_path))


def test_a_server_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(stdout=io.StringIO(""), kill=lambda: None, wait=lambda timeout: 2)
    monkeypatch.setattr(serving, "subprocess", SimpleNamespace(PIPE=-1, Popen=lambda *args, **options: ended))
    with pytest.raises(RunError, match="has not started"), serving.open_server("TINY", 2):
        pytest.fail("it goes on")


def test_the_time_of_a_process_is_that_of_its_work() -> None:
    """User and system time as Python's own clock has it, to a few ticks."""
    before, start = serving.read_cpu_seconds(Path("/proc/self")), time.process_time()
    while time.process_time() - start < 0.1:
        pass
    spent = serving.read_cpu_seconds(Path("/proc/self")) - before
    assert abs(spent - (time.process_time() - start)) < 0.05
