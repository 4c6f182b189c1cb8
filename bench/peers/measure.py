"""Checks that fluvial and another project's code agree, and times them in turn in the same processes."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.bench.peers import clone
from fluvial.bench.peers.config import TRANSFORMER, Case, PeerRow, PeersConfig, Project
from fluvial.bench.peers.ours import Ours
from fluvial.bench.peers.pipeline import Passes, Peer
from fluvial.bench.peers.work import Stored, Work
from fluvial.engines.errors import RunError
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.plan.memory import LiveStorages

REST_ROUNDS = 9  # of rollouts and updates without the network's passes, which take milliseconds
TOLERANCE = 1e-5  # of log-probabilities, the loss and gradients, relative to their scale
ROOT = Path(__file__).resolve().parents[2]
# fluvial's ways by (what, pairs per pass), and the project's.
Phase = tuple[Mapping[tuple[str, int], Callable[[], object]], Callable[[], object]]


class Agreement(NamedTuple):
    """How far the two sides are apart, each relative to the scale of the project's numbers."""

    log_prob: float
    loss: float
    gradient: float


class Compared(NamedTuple):
    """Results of a comparison."""

    agreement: Agreement
    stored: Stored  # the rollout that both sides update on
    held: tuple[int, int]  # bytes that stay after the first update and did not exist before


def compare(ours: Ours, peer: Peer, work: Work, project: Project) -> Compared:
    """Make each side score the other's rollout and make its first update on fluvial's, and return what differs."""
    made = ours.rollout()
    x, x_next = made.x[:, :-1].contiguous(), made.x[:, 1:].contiguous()
    log_prob = _apart(made.log_prob, peer.log_prob(x, x_next))
    if project.samples:
        theirs = peer.rollout()
        log_prob = max(log_prob, _apart(ours.log_prob(theirs.x[:, :-1], theirs.x[:, 1:]), theirs.log_prob))
        del theirs
    old = made.log_prob if project.recomputes else work.old_log_prob(made.log_prob)
    stored, items = Stored(x, x_next, old, work.advantage), None
    before = live_bytes()
    loss = peer.update(stored)
    after = live_bytes()
    items = ours.items(stored)
    own = ours.update(items, pairs=work.samples).loss
    del items
    held = live_bytes() - after, after - before
    left, right = ours.gradients(), peer.gradients()
    if left.keys() != right.keys():
        raise RunError(f"the sides train other parameters: {sorted(left.keys() ^ right.keys())[:3]}")
    distance = torch.cat([(left[name] - right[name]).flatten() for name in right]).norm()
    norm = torch.cat([gradient.flatten() for gradient in right.values()]).norm()
    scale = float(work.advantage.abs().mean())
    return Compared(Agreement(log_prob, abs(own - loss) / scale, float(distance / norm)), stored, held)


def agreed(agreements: Sequence[Agreement]) -> Agreement:
    """Return the largest distances of all ranks, with the loss of rank 0, which alone logs it."""
    log_prob, gradient = (max(values) for values in ([a.log_prob for a in agreements], [a.gradient for a in agreements]))
    return Agreement(log_prob, agreements[0].loss, gradient)


def check_agreement(name: str, agreement: Agreement) -> None:
    """Raise RunError if the two sides do not compute the same thing: then their times say nothing."""
    for what, value in agreement._asdict().items():
        if not value <= TOLERANCE:  # NaN is refused too
            what = what.replace("_", "-")
            raise RunError(f"{name}: the {what} is {value:.2g} apart, expected at most {TOLERANCE:g}, so nothing was timed")


def time_in_turn(runs: int, sides: Sequence[Callable[[], object]], world: World | None = None) -> list[list[float]]:
    """Return the CPU seconds of each side, `[sides][runs]`, run in turn; who is first changes from round to round.

    CPU time, because machines are shared: a process that has to wait for a core is not slower for it.

    Args:
        runs: number of rounds, after one that is not counted.
        sides: what is timed.
        world: processes whose times are added; None is this one.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for run in range(-1, runs):
        for place in range(len(sides)):
            side = (run + place) % len(sides)
            if world is not None and world.size > 1:
                dist.barrier()
            start = time.process_time()
            sides[side]()
            spent = torch.tensor([time.process_time() - start], dtype=torch.float64)
            if run >= 0:
                seconds[side].append(float((spent if world is None else world.gather(spent)).sum()))
    return seconds


def _tensors() -> Iterator[Tensor]:
    return (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter))


def live_bytes() -> int:
    """Return the bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in _tensors())}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type != "meta")


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the largest sum of bytes of the tensors that a call makes, beyond those that exist before it."""
    with LiveStorages(list(_tensors())) as memory:
        call()
    return memory.peak


@contextmanager
def without_passes(*modules: Any) -> Iterator[None]:
    """Replace the forward pass of networks by a product with one of their trained parameters, which costs little."""

    def emptied(module: nn.Module) -> Callable[..., tuple[Tensor]]:
        def forward(hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor]:
            parameter = next(p for p in module.parameters() if p.requires_grad)
            return (hidden_states * (1 + 0 * parameter.reshape(-1)[0]),)

        return forward

    with ExitStack() as replaced:
        for module in modules:
            replaced.enter_context(patch.object(module, "forward", emptied(module)))
        yield


def measure(name: str, project: Project, folder: Path, case: Case, config: PeersConfig, world: World) -> Iterator[PeerRow]:
    """Yield the rows of a case as they are known; every rank must take part.

    Raises:
        RunError: the two sides disagree, or the clone does not have the code that runs here.
    """
    work = case.of(config, rank=world.rank, gradient=project.gradient)
    start = live_bytes()
    ours = Ours(work, world)
    built = live_bytes()
    peer = project.build(folder, work)
    held = built - start, live_bytes() - built
    compared = compare(ours, peer, work, project)
    agreement, stored = agreed(world.gather_items(compared.agreement)), compared.stored
    check_agreement(name, agreement)
    held = held[0] + compared.held[0], held[1] + compared.held[1]
    items = ours.items(stored)
    updates = {("update", pairs): partial(ours.update, items, pairs=pairs) for pairs in case.pairs(config)}
    phases = list[Phase]()
    if project.samples:
        phases.append(({("rollout", config.samples): ours.rollout}, peer.rollout))
    phases.append((updates, partial(peer.update, stored)))
    common = common_columns(case, clone.commit(folder), agreement, held, config)
    # DDP wants a gradient of every parameter, which a network without passes does not give.
    modules = (ours.parts.engine.module, peer.module) if world.size == 1 else ()
    yield from _rows(phases, common, config, world, modules)


def measure_alone(case: Case, config: PeersConfig, world: World) -> Iterator[PeerRow]:
    """Yield the rows of the transformer's passes alone: what both sides have to compute whatever is around them."""
    work = case.of(config, rank=world.rank)
    own, other = Passes(work, peft=False), Passes(work, peft=True)
    log_prob = _apart(own.predict(work.samples).detach(), other.predict(work.samples).detach())
    check_agreement(TRANSFORMER, Agreement(log_prob, 0.0, 0.0))
    updates = {("update", pairs): partial(own.passes, pairs) for pairs in case.pairs(config)}
    phases: list[Phase] = [
        ({("rollout", config.samples): own.rollout}, other.rollout),
        (updates, partial(other.passes, work.samples)),
    ]
    common = common_columns(case, "peft", Agreement(log_prob, 0.0, 0.0), (0, 0), config)
    yield from _rows(phases, common, config, world)


def common_columns(
    case: Case, commit: str, agreement: Agreement, held: tuple[int, int], config: PeersConfig
) -> dict[str, Any]:
    """Return what all rows of a case have in common, by the names of `PeerRow`.

    Args:
        case: the case.
        commit: commit of the project.
        agreement: distances of the two sides.
        held: bytes that stay between calls, of fluvial and of the project.
        config: settings of the benchmark.
    """
    return {
        **case._asdict(),
        "commit": commit,
        "fluvial": clone.commit(ROOT),
        "samples": config.samples,
        "steps": config.steps,
        "peer_pairs": config.samples,
        "held_bytes": held[0],
        "peer_held_bytes": held[1],
        "log_prob_distance": agreement.log_prob,
        "gradient_distance": agreement.gradient,
        **harness.facts(PeerRow),
    }


def _rows(
    phases: Sequence[Phase],
    common: Mapping[str, Any],
    config: PeersConfig,
    world: World,
    modules: Sequence[Any] = (),
) -> Iterator[PeerRow]:
    for mine, theirs in phases:
        sides = [*mine.values(), theirs]
        *seconds, other = time_in_turn(config.runs, sides, world)
        peaks = [max(world.gather_items(peak_bytes(call))) for call in sides]
        rests = [[0.0] for _ in sides]
        if modules:
            with without_passes(*modules):
                rests = time_in_turn(REST_ROUNDS, sides)
        for (what, pairs), own, peak, rest in zip(mine, seconds, peaks, rests, strict=False):
            yield row(common, what, pairs, (own, other), (peak, peaks[-1]), (rest, rests[-1]))


def row(
    common: Mapping[str, Any],
    what: str,
    pairs: int,
    seconds: tuple[list[float], list[float]],
    peaks: tuple[int, int],
    rests: tuple[list[float], list[float]],
) -> PeerRow:
    """Return the row of one comparison."""
    own, other = (torch.tensor(times, dtype=torch.float64) for times in seconds)
    p20, p50, p80 = harness.spread(own / other)
    rest, other_rest = (min(times) for times in rests)  # short, so that the least is the undisturbed one
    return PeerRow(
        what=what,
        pairs=pairs,
        runs=len(own),
        p20=p20,
        p50=p50,
        p80=p80,
        seconds=float(own.median()),
        peer_seconds=float(other.median()),
        rest_seconds=rest,
        peer_rest_seconds=other_rest,
        peak_bytes=peaks[0],
        peer_peak_bytes=peaks[1],
        **common,
    )


def rows_of(case: Case, config: PeersConfig, projects: Mapping[str, Project], world: World) -> Iterator[PeerRow]:
    """Yield the rows of a case as they are known; every rank must take part."""
    if case.peer == TRANSFORMER:
        yield from measure_alone(case, config, world)
    else:
        project = projects[case.peer]
        yield from measure(case.peer, project, config.clones / project.folder, case, config, world)
    gc.collect()  # hooks hold modules in reference cycles


def measure_cases(cases: Sequence[Case], config: PeersConfig, projects: Mapping[str, Project]) -> None:
    """Append the rows of cases to peers.csv as they are known; every rank must take part."""
    torch.set_num_threads(config.threads)
    with init_world() as world:
        for case in cases:
            for measured in rows_of(case, config, projects, world):
                if world.is_main:
                    harness.append(config.out / "peers.csv", [measured], PeerRow)


def _apart(left: Tensor, right: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest value on the right."""
    return float((left - right).abs().max() / right.abs().max())
