"""Runs when something around them fails: a process that dies or hangs, a restart, a full disk, a stop."""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from helpers import handwriting_jobs, launch
from helpers.marks import long
from helpers.refusals import fails, refuses
from rich.console import Console
from torch.distributed import DistBackendError, DistStoreError, distributed_c10d
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.engines.cli import main as cli
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World, init_world, leave
from fluvial.engines.errors import LostProcessError, RunError
from fluvial.engines.run import train, training
from fluvial.engines.run.checkpoint import checkpoint
from fluvial.engines.run.checkpoint.storage import PROBE, Draft, RemoteStore
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.process import run_folder
from fluvial.engines.run.process.stop import catch_stop_signals
from fluvial.engines.run.run import Run
from fluvial.engines.run.trainer import Trainer

FLAGS = ["--updates", "7", "--optimizer.ema-decay", "0.9"]
TIMED = {"seconds", "speed", "memory"}
LOST = "lost another process ({}); earlier checkpoints are unchanged, continue with --resume --out {}"


class Launched:
    """A run on two ranks under torchrun's agent that is still going on."""

    def __init__(self, process: launch.Process, out: Path, pids: Path) -> None:
        self.process, self.out, self.pids = process, out, pids

    def worker(self, rank: int) -> int:
        """Return the process id of a rank."""
        return int((self.pids / str(rank)).read_text())

    def reaches(self, update: int) -> None:
        """Wait until an update is recorded."""
        metrics = self.out / "metrics.jsonl"
        self._wait(lambda: metrics.exists() and f'{{"update": {update}, ' in metrics.read_text(), 180)

    def complains(self, rank: int, *, within: float) -> None:
        """Wait until a rank has its line on stderr."""
        self._wait(lambda: any(line.startswith(f"fluvial: rank {rank}: ") for line in self.lines()), within)

    def ends(self) -> list[str]:
        """Wait for the end of all ranks, and return our lines on stderr, which are all that may be ours."""
        self.process.wait(60)
        assert "engines/run/trainer.py" not in self.process.stderr, "a traceback"
        return self.lines()

    def lines(self) -> list[str]:
        """Return our lines on stderr; the agent has more of its own."""
        said = (line for line in self.process.stderr.splitlines() if line.startswith("fluvial: "))
        return sorted(line for line in said if not launch.WAITS.fullmatch(line))

    def _wait(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, "the run ended too early: " + self.process.stderr
            assert time.monotonic() < deadline, "the run is too slow: " + self.process.stderr
            time.sleep(0.02)


@contextmanager
def launched(out: Path, *args: str, restarts: int = 0) -> Iterator[Launched]:
    """Start a run on two ranks, which torchrun's agent forks; none of its processes is left behind.

    Args:
        out: folder of the run.
        args: further arguments of the command line.
        restarts: number of times that the agent starts lost ranks again.
    """
    typed = ["train", "handwriting", "--out", str(out), *args]
    pids = out.with_name(f"{out.name}.pids")
    pids.mkdir(exist_ok=True)
    with launch.Process("workers.elastic_ranks:run", pids, restarts, *typed, environment=launch.environment()) as process:
        run = Launched(process, out, pids)
        try:
            yield run
        finally:
            if process.poll() is None:
                for rank in range(2):
                    os.kill(run.worker(rank), signal.SIGKILL)
                process.kill()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing happened to."""
    out = tmp_path_factory.mktemp("straight") / "run"
    launch.train(out, *FLAGS, ranks=2)
    return out


def expect_same(out: Path, straight: Path) -> None:
    """The same bits and records, but for their times."""
    assert launch.weights(out) == launch.weights(straight)
    timeless = [
        [{key: value for key, value in record.items() if key not in TIMED} for record in launch.records(path)]
        for path in (out, straight)
    ]
    assert timeless[0] == timeless[1]


def expect_whole(out: Path) -> None:
    """Every checkpoint that is listed is whole."""
    listed = checkpoint.list_checkpoints(out / "checkpoints")
    assert listed
    for path in listed:
        checkpoint.verify(path)


@pytest.mark.slow
@pytest.mark.long
def test_killed_ranks(tmp_path: Path, straight: Path) -> None:
    """One kill -9 is answered by torchrun's restart and one by a person's: the same bits, and one line of the other rank."""
    out = tmp_path / "run"
    with launched(out, *launch.SMALL, *FLAGS, restarts=1) as run:
        run.reaches(3)
        os.kill(run.worker(1), signal.SIGKILL)
        run.reaches(5)  # by itself
        os.kill(run.worker(0), signal.SIGKILL)
        assert run.ends() == [f"fluvial: rank {rank}: {LOST.format('its connection is closed', out)}" for rank in (0, 1)]
        assert run.process.returncode == 1
        assert run.process.stdout.count("before training") == 1
        assert "resumed" in run.process.stdout
    assert not (out / "summary.json").exists()
    expect_whole(out)
    done = launch.fluvial("train", "handwriting", "--out", str(out), "--resume", ranks=2)
    assert done.returncode == 0, done.stderr
    expect_same(out, straight)


@pytest.mark.long
def test_a_stop_and_a_full_disk(tmp_path: Path, straight: Path) -> None:
    """SIGTERM to torchrun saves; a disk that is full for one rank ends both in one line; what comes after has the same bits.

    A limit on the size of one process's files is its full disk.
    """
    out = tmp_path / "run"
    with launched(out, *launch.SMALL, *FLAGS, "--checkpoint.every", "100") as run:
        run.reaches(2)
        run.process.send_signal(signal.SIGTERM)
        assert run.ends() == []
        said = run.process.stdout
    saved = [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")]
    assert len(saved) == 1
    stopped = int(saved[0])
    assert 2 <= stopped < 6
    assert f"SIGTERM: stopped after update {stopped}, all saved" in said

    with launched(out, "--resume", "--checkpoint.every", "2") as run:
        run.reaches(stopped + 1)
        resource.prlimit(run.worker(1), resource.RLIMIT_FSIZE, (100_000, 100_000))
        (line,) = run.ends()
    assert run.process.returncode == 1
    assert "could not be saved: " in line
    assert line.endswith("; earlier checkpoints are unchanged")
    assert [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")] == saved
    expect_whole(out)

    done = launch.fluvial("train", "handwriting", "--out", str(out), "--resume", ranks=2)
    assert done.returncode == 0, done.stderr
    expect_same(out, straight)


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """The other gives up in time; the one that hung, once it goes on, finds the other gone and ends at once, stop or not."""
    out, seconds = tmp_path / "run", 4
    flags = ["--updates", "500", "--engine.timeout", str(seconds)]
    with launched(out, *launch.SMALL, *flags) as run:
        run.reaches(3)
        hangs = run.worker(1)
        os.kill(hangs, signal.SIGSTOP)
        run.complains(0, within=2 * seconds)
        time.sleep(1)  # torchrun has told rank 1 to stop
        os.kill(hangs, signal.SIGCONT)
        lines = run.ends()  # two, of which torchrun would leave one if it had to kill the rank
    assert run.process.returncode == 1
    silent, gone = (LOST.format(reason, out) for reason in (f"no answer within {seconds} s", "its connection is closed"))
    assert lines[0] == f"fluvial: rank 0: {silent}"
    # Its own wait is over too by now, if it was in a collective when it was stopped.
    assert lines[1:] in ([f"fluvial: rank 1: {gone}"], [f"fluvial: rank 1: {silent}"])
    expect_whole(out)


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"


SILENT, GONE = "no answer within 7 s", "its connection is closed"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:22439. This is"), GONE),
        (RuntimeError(f"{GLOO}pair.cc:537] Read error [127.0.0.1]:17843: Connection reset by peer. This is"), GONE),
        (RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 7000ms for recv operation to complete"), SILENT),
        (RuntimeError(f"{GLOO}pair.cc:1] Application timeout caused pair closure"), SILENT),
        (DistStoreError("wait timeout after 7000ms, keys: /default_pg/0//cpu//0/0"), SILENT),
        (
            DistBackendError("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"),
            GONE,
        ),
        (DistBackendError("ncclInvalidUsage: Duplicate GPU detected : rank 0 and rank 1"), None),
        (RuntimeError("the socket to the reward server timed out: connection closed by peer"), None),
        (RuntimeError(f"{GLOO}pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 8"), None),
        (ValueError(f"{GLOO}pair.cc:553] Connection closed by peer"), None),
    ],
)
def test_that_a_process_is_lost_is_said_in_plain_words(error: Exception, reason: str | None) -> None:
    """Without a traceback. Errors of the program, of other connections and of wrong tensors stay what they are."""
    with pytest.raises(LostProcessError if reason else type(error)) as raised, init_world(timeout=7):
        raise error
    assert raised.value is error if reason is None else str(raised.value) == f"rank 0: lost another process ({reason})"


def test_a_failure_on_a_gpu_waits_for_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only all ranks together can destroy NCCL's communicators, and after a failure the others may wait for this one."""
    calls = list[str]()
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("end"))
    for device, failed in (("cuda", True), ("cuda", False), ("cpu", True)):
        leave(torch.device(device), failed=failed)
    assert calls == ["abort", "end", "end"]


def test_cudnns_attention_is_left_out_unless_it_is_asked_for() -> None:
    """Its backward pass fails in blocks of FLUX; other programs of the process keep it."""
    with init_world():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):  # as diffusers' backend _native_cudnn does
            assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_all_groups_wait_alike() -> None:
    """The timeout reaches the group of all and those of meshes, which torch would let wait for half an hour."""
    with init_world(timeout=7) as world:
        meshes = [world.mesh, world.new_mesh((1, 1), ("replicate", "shard"))]
        for group in (torch.distributed.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())):
            assert group is not None
            assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7


def test_a_repeated_sigterm_is_one_request() -> None:
    """As torchrun and a scheduler may both send it; a second Ctrl-C still stops at once."""
    with catch_stop_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        assert stop.name == "SIGTERM"


def config(out: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a run of four updates of eight samples, with two checkpoints."""
    return handwriting_jobs.config(out, **{"updates": 4, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nothing happened to."""
    train(config(out := tmp_path_factory.mktemp("alone") / "run"))
    return out


def continued(config: TrainConfig, world: World) -> TrainConfig:
    """Return the run as a restart by torchrun goes on with it."""
    return training._resume_restarted(config, world)


def attempt(monkeypatch: pytest.MonkeyPatch, count: int, name: str = "none") -> None:
    """Make this process one that torchrun has started before, `count` times."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))


def test_what_a_restart_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing, the beginning of a run that is there, or what a person named, while there is no checkpoint.

    A run that its first attempt was refused stays refused, also if an earlier torchrun had the same name.
    """
    out, refused = tmp_path / "run", tmp_path / "refused"
    asked = config(out, **{"checkpoint.resume_from": tmp_path / "other" / "000020"})
    attempt(monkeypatch, 0, "earlier")
    run_folder.claim(refused, resume=False)
    (refused / "config.json").write_text("{}")
    attempt(monkeypatch, 0)
    with init_world() as world:
        assert continued(config(out), world) == config(out)
        attempt(monkeypatch, 1)
        assert continued(config(out), world) == config(out)  # it died before it claimed the folder
        run_folder.claim(out, resume=False)
        assert continued(config(out), world) == config(out)  # or before it began the run
        (out / "config.json").write_text("{}")
        assert continued(config(out), world) == config(out, resume=True)
        assert continued(asked, world) == replace(asked, resume=True)
        attempt(monkeypatch, 0)
        assert continued(config(out), world) == config(out)
        for name, count in product(("later", "earlier"), range(3)):
            attempt(monkeypatch, count, name)
            assert continued(config(refused), world) == config(refused)
            refuses("already holds a run", run_folder.claim, refused, resume=False)


def test_storage_that_cannot_be_written_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is missing, a place that refuses, and one of another run; the run can be started again."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setattr(training, "Trainer", lambda *args, **options: pytest.fail("the run was built"))
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "000040").mkdir(parents=True)
    places = {"s3://bucket/run": "cannot be used: Install s3fs", f"{tmp_path}/file/run": "cannot be written"}
    places[f"{tmp_path}/taken"] = "checkpoints of another run, such as .*/taken/000040, which a new run would remove"
    for place, says in places.items():
        refuses(says, train, config(tmp_path / "run", **{"checkpoint.folder": place}))
        assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("background", [False, long(True)])
def test_a_storage_that_fails_later_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Path, background: bool
) -> None:
    """Weights and state go to the run folder, which a line says, and a resumption takes the newest of both."""
    out, url = tmp_path / "run", f"memory://{tmp_path.name}/checkpoints"
    asked = config(out, updates=2, **{"checkpoint.folder": url, "checkpoint.background": background})
    create, failing, console = RemoteStore.create, True, Console(file=StringIO(), width=500)

    def create_or_fail(store: RemoteStore, draft: Draft, file: str) -> Any:
        if failing and draft != PROBE:
            raise OSError("the bucket is gone")
        return create(store, draft, file)

    monkeypatch.setattr(RemoteStore, "create", create_or_fail)
    train(asked, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"the bucket is gone; earlier checkpoints are unchanged; weights and state are in {out}/checkpoints/" in text
    assert checkpoint.list_newest_first(asked.checkpoint_folders) == [out / "checkpoints" / "000002"]
    failing = False
    train(replace(asked, updates=4, resume=True))
    assert checkpoint.list_newest_first(asked.checkpoint_folders) == [f"{url}/000004"]
    assert launch.weights(out) == launch.weights(alone)
    elsewhere = config(out, updates=4, resume=True, **{"checkpoint.folder": f"{tmp_path}/elsewhere"})
    refuses(f"elsewhere': it holds no checkpoint, and the run has saved {url}/000004: copy its", train, elsewhere)
    MemoryFileSystem().rm("/", recursive=True)


@pytest.mark.parametrize(
    ("phase", "error", "says"),
    [
        ("update", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "(CUDA out of memory. Tried"),
        long("rollout", MemoryError(), "in the phase rollout"),
    ],
)
def test_a_run_that_is_out_of_memory_saves_its_newest_update_and_says_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Path, phase: str, error: Exception, says: str
) -> None:
    """In the middle of the third update; what a resumption makes of it has the bits of a run that was not interrupted."""
    out, (where, name) = tmp_path / "run", (Engine, "update") if phase == "update" else (Run, "sample")
    original, calls = getattr(where, name), list[int]()

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(*args, **options)

    asked = config(out, **{"checkpoint.every": 100})
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(RunError, match=rf"^out of memory.*in the phase {phase}: ") as raised:
            train(asked)
    assert says in str(raised.value)
    assert re.search(r"hold the most \(\d+\.\d\d of \d+\.\d\d GiB\); lower it by \w", str(raised.value))
    assert [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")] == ["000002"]
    train(replace(asked, resume=True))
    assert launch.weights(out) == launch.weights(alone)


def test_an_error_within_an_optimizer_step_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is of no update then."""
    monkeypatch.setattr(Engine, "_update_average", lambda engine: (_ for _ in ()).throw(MemoryError()))
    fails("out of memory in the phase update", train, config(tmp_path / "run"))
    assert checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints") == []


def test_an_error_of_the_machine_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; other errors of the program stay what they are."""
    noted = RuntimeError("NCCL error: unhandled cuda error\nlast error: x")
    noted.add_note("in the phase update")
    for error, line in (
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "out of memory (CUDA out of memory.): make passes smaller"),
        (MemoryError(), "out of memory: make passes smaller"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"), "out of memory ("),
        (noted, "a collective of the processes failed in the phase update (NCCL error: unhandled cuda error); NCCL_DEBUG"),
        (DistBackendError("ncclInvalidUsage: x"), "a collective of the processes failed (ncclInvalid"),
    ):
        assert cli.run([], lambda args, error=error: (_ for _ in ()).throw(error)) == 1  # type: ignore[misc]
        assert launch.one_line(capfd.readouterr().err).startswith(f"fluvial: {line}")
    with pytest.raises(RuntimeError, match="a fault"):
        cli.run([], lambda args: (_ for _ in ()).throw(RuntimeError("a fault")))


def test_a_stop_before_the_first_update_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run is built: it is not evaluated first."""
    console, build = Console(file=StringIO(), width=500), Trainer.__init__

    def stopped(trainer: Trainer, *args: Any, **options: Any) -> None:
        build(trainer, *args, **options)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "__init__", stopped)
    assert train(config(tmp_path / "run"), console=console) == {}
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "SIGTERM: stopped before the first update; continue with --resume" in text
    assert "before training" not in text
