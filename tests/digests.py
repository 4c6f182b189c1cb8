"""Tells whether two trees train to the same bits: weights, optimizer state and metrics of many small runs on 1 and 2 ranks.

    python -P tests/digests.py --record before.json             # in the one tree
    python -P tests/digests.py --compare before.json grpo nft   # in the other; without names every run

A line per run and number of ranks says equal, DIFFERS (and what), or what it raised; the exit code is 0 if all are equal.
Bits depend on processor and libraries, so a record belongs to one machine. The runs are in helpers/digest_cases.py; a record
knows them by name alone, so that the settings of a run may be written in another way.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # before torch reads them
sys.path[:0] = [str(Path(__file__).parent / "shared")]

# What a run imports on first use is imported here, once for all forks.
import diffusers.optimization  # noqa: E402
import peft  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from helpers.digest_cases import Case, cases, prepare  # noqa: E402

from fluvial.engines import TrainConfig, Trainer, init_world  # noqa: E402
from fluvial.engines.run import train  # noqa: E402
from fluvial.engines.run.config import with_values  # noqa: E402
from fluvial.engines.sampling.config import ServersConfig  # noqa: E402
from fluvial.models.handwriting import BASE, Handwriting  # noqa: E402

WAIT = 90.0  # seconds that a rank waits for another, and a run for a server
TIMED = ("seconds", "speed", "memory", "time", "age")  # numbers of a record that are not the run's


class Result(NamedTuple):
    """What a run ended in."""

    weights: str  # digest
    state: str  # digest of weights, moments, moving average and followers, of every network that learns
    metrics: dict[str, str]  # of all rollouts in order; every float exactly

    def difference(self, other: "Result", *, metrics: bool = True) -> str:
        """Return which parts differ from those of another result, and the first metric that does; empty if none does."""
        parts = [part for part in ("weights", "state") if getattr(self, part) != getattr(other, part)]
        names = [name for name in {**self.metrics, **other.metrics} if self.metrics.get(name) != other.metrics.get(name)]
        if metrics and names:
            values = " -> ".join(show(result.metrics.get(names[0], "absent")) for result in (self, other))
            parts.append(f"metrics ({len(names)}, first {names[0]}: {values})")
        return ", ".join(parts)


def show(value: str) -> str:
    """Return a metric as a person reads it."""
    return repr(float.fromhex(value)) if re.fullmatch(r"-?0x[\d.a-fp+-]+", value) else value


def flatten(value: Any, name: str) -> dict[str, str]:
    """Return the leaves of a record by their path: floats in hexadecimal, all else as it is printed."""
    if isinstance(value, dict):
        pairs = [(str(key), each) for key, each in value.items() if key not in TIMED]
    elif isinstance(value, list | tuple):
        pairs = [(str(i), each) for i, each in enumerate(value)]
    else:
        return {name: value.hex() if isinstance(value, float) else str(value)}
    return {path: leaf for key, each in pairs for path, leaf in flatten(each, f"{name}.{key}").items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of names, types, shapes and bits of whole tensors; every rank must take part."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        whole = whole.detach().cpu().contiguous()
        found.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        found.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def result_of(trainer: Trainer, records: Sequence[dict[str, Any]]) -> Result:
    """Return what a run ended in, or stands at."""
    state = trainer.saver.state()
    weights = {name: tensor for name, tensor in state.items() if name.startswith("weight.")}
    metrics = {name: leaf for each in records for name, leaf in flatten(each, f"update {each['update']}").items()}
    return Result(digest(weights), digest(state), metrics)


def run(config: TrainConfig, case: Case, world: Any) -> Result:
    """Train a run to its end."""
    with Trainer(config, case.job(), world) as trainer:
        return result_of(trainer, list(trainer))


def resume(config: TrainConfig, case: Case, world: Any) -> Result:
    """Train a run, and continue it from the checkpoint after its first rollout in a new trainer."""
    with Trainer(config, case.job(), world) as trainer:
        records = [trainer.update()]
        trainer.save()
    newest = sorted((config.out / "checkpoints").glob("[0-9]*"))[-1]
    with Trainer(config, case.job(), world, resume_from=newest) as trainer:
        return result_of(trainer, [*records, *trainer])


def loop(config: TrainConfig, case: Case, world: Any) -> Result:
    """Run what the command does, with evaluations, checkpoints and exports; its digests are those of the run folder."""
    train(config, case.job())
    metrics = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    files = sorted((config.out / "weights").rglob("*.safetensors")) + sorted((config.out / "lora").rglob("*.safetensors"))
    hashed = {str(path.relative_to(config.out)): hashlib.sha256(path.read_bytes()).hexdigest()[:24] for path in files}
    exported = hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:24]
    return Result(exported, exported, {**flatten(metrics, "metrics"), **flatten(hashed, "files")})


def execute(case: Case, out: Path, address: str, world: Any) -> Result:
    """Make a run in its way; raise unless a second way ends as the run alone does."""
    config = replace(case.config, out=out)
    if case.way == "loop":
        return loop(config, case, world)
    if case.way == "served":
        config = with_values(config, {"rollout.source": "", "rollout.servers": ServersConfig()})
    first = run(config, case, world)
    if case.way == "alone":
        return first
    if case.way == "resumed":
        second = resume(config, case, world)
    elif case.way == "replayed":
        run(with_values(config, {"rollout.store": out / "stored"}), case, world)
        second = run(with_values(config, {"rollout.source": f"replayed:{out / 'stored'}"}), case, world)
    else:
        servers = case.config.rollout.servers
        second = run(with_values(config, {"rollout.source": address, "rollout.servers": servers}), case, world)
    if difference := first.difference(second, metrics=case.way == "resumed"):
        raise AssertionError(f"a run that is {case.way} differs from the run alone: {difference}")
    return second


def work(rank: int, ranks: int, port: int, folder: Path, address: str, names: Sequence[str], pipe: Any) -> None:
    """Make runs as one of the ranks, and send each result, until one of them raises."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_CPP_LOG_LEVEL="ERROR")
    warnings.simplefilter("ignore")  # within diffusers
    torch.set_num_threads(1)  # makes the fork's pool of threads, which threads of rewards would each begin to make
    known, name = cases(folder), ""
    try:
        diffusers.logging.set_verbosity_error()  # of what is experimental in it
        alone = contextlib.nullcontext() if known[names[0]].way == "loop" else init_world(timeout=WAIT)
        with alone as world:
            for name in names:
                started, out = time.perf_counter(), folder / "runs" / f"{name}-{ranks}"
                result = execute(known[name], out, address, world)
                if rank == 0:
                    pipe.send((name, result, time.perf_counter() - started))
                    shutil.rmtree(out, ignore_errors=True)
    except BaseException as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        pipe.send((name, f"{type(error).__name__}: {lines[0][:300]}", traceback.format_exc()))
        os._exit(1)


def results(ranks: int, folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Result | str, Any]]:
    """Yield name, result (or what was raised, in a line) and seconds (or the traceback) of each run on some ranks."""
    known, left = cases(folder), list(names)
    with contextlib.ExitStack() as stack:
        served = any(known[name].way == "served" for name in names)
        address = stack.enter_context(serving(folder)) if served else ""
        while left:
            loops = known[left[0]].way == "loop"  # which opens a process group of its own
            batch = left[:1] if loops else [name for name in left if known[name].way != "loop"]
            for name, found, more in make_together(ranks, folder, address, batch):
                left.remove(name)
                yield name, found, more


def make_together(ranks: int, folder: Path, address: str, names: Sequence[str]) -> Iterator[tuple[str, Result | str, Any]]:
    """Yield the results of runs that the same processes make, up to the first that raises on any rank."""
    context, port, left = multiprocessing.get_context("fork"), free_port(), list(names)
    group: dict[Any, Any] = {}  # process of each pipe
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        group[receiver] = context.Process(target=work, args=(rank, ranks, port, folder, address, names, sender))
        group[receiver].start()
        sender.close()
    found: Any = None
    try:
        while left and not isinstance(found, str):
            pipe: Any = wait([*group])[0]
            try:
                name, found, more = pipe.recv()
            except EOFError:
                process = group.pop(pipe)
                process.join()
                if not process.exitcode:
                    continue
                name, found, more = left[0], f"a rank ended with exit code {process.exitcode}", ""
            name = name if name in left else left[0]  # a rank may raise after the first has its result
            left.remove(name)
            yield name, found, more
    finally:
        for process in group.values():
            process.join(0 if isinstance(found, str) else 10)
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(folder: Path, said: Path) -> None:
    """Serve the built-in model, which writes its address to a file."""
    from fluvial.engines.cli.main import run as command

    with said.open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    root = folder / "served"
    os._exit(command(["serve", "handwriting", "--port", "0", "--micro-batch", "4", "--weights-root", str(root)]))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the address of a new server of samples."""
    said = folder / "server.txt"
    (folder / "served").mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=serve, args=(folder, said))
    process.start()
    try:
        until = time.monotonic() + WAIT
        while not (found := re.search(r" on (http://\S+)\n", said.read_text(encoding="utf-8") if said.exists() else "")):
            if not process.is_alive() or time.monotonic() > until:
                raise SystemExit(f"the server of samples does not start: {said.read_text(encoding='utf-8')}")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.kill()
        process.join()
        said.unlink()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("--record", type=Path, metavar="FILE", help="write the digests; those of other runs in it stay")
    file.add_argument("--compare", type=Path, metavar="FILE", help="compare with the digests of a file")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks, after the names")
    parser.add_argument("--verbose", action="store_true", help="show tracebacks")
    parser.add_argument("names", nargs="*", help="runs; by default all")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Record or compare, and return the exit code."""
    asked = parse(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path: Path = asked.record or asked.compare
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() or asked.compare else {}
    failed, count, started = 0, 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="digests-") as temporary:
        folder, os.environ["FLUVIAL_TEST_STORE"] = Path(temporary), temporary
        table = cases(folder)
        if unknown := [name for name in asked.names if name not in table]:
            raise SystemExit(f"no run is named {', '.join(unknown)}: {' '.join(table)}")
        Handwriting(BASE).build()  # whose classes are imported then
        prepare(folder, {Path(table[name].config.model).name for name in asked.names or table})
        for ranks in asked.ranks:
            names = [name for name in asked.names or table if ranks in table[name].ranks]
            for name, found, more in results(ranks, folder, names):
                if isinstance(found, str):
                    line, seconds = f"error: {found}", ""
                    if asked.verbose:
                        print(more)
                else:
                    seconds = f"{more:.1f} s"
                    if asked.record:
                        known[f"{name} {ranks}"], line = found, "recorded"
                    elif (before := known.get(f"{name} {ranks}")) is None:
                        line = "error: not in the record"
                    else:
                        difference = Result(*before).difference(found)
                        line = f"DIFFERS: {difference}" if difference else "equal"
                failed, count = failed + (line not in ("equal", "recorded")), count + 1
                print(f"{name:24} {ranks} {'rank ' if ranks == 1 else 'ranks'}  {line}  {seconds}".rstrip(), flush=True)
    if asked.record:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known), encoding="utf-8")
    print(f"{count - failed} of {count} {'recorded' if asked.record else 'equal'}, {time.perf_counter() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
