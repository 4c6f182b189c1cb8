"""Checks that fluvial and another project's code agree, and alternating timings in the same processes."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fluvial.bench import harness
from fluvial.bench.peers import clone
from fluvial.bench.peers.config import TRANSFORMER, PeerCase, PeerRow, PeersConfig, Project
from fluvial.bench.peers.ours import Ours, Spent, start_clocks
from fluvial.bench.peers.pipeline import Peer, PeerPasses
from fluvial.bench.peers.work import PeerRollout, Work
from fluvial.engines.engine.world import World, init_world
from fluvial.engines.errors import RunError
from fluvial.engines.run.passes import micro_batch
from fluvial.engines.run.passes.storages import LiveStorages
from fluvial.engines.run.process.heap import keep_freed_memory

REST_ROUNDS = 9  # rounds of rollouts and updates without the network's passes, which take milliseconds
TOLERANCE = 1e-5  # of log-probabilities, the loss and gradients, relative to their scale
ROOT = Path(__file__).resolve().parents[2]
# A timed call, which returns the time of its phases.
Side = Callable[[], Mapping[str, Spent]]


class Agreement(NamedTuple):
    """Distances of the two sides, relative to the scale of the project's numbers."""

    log_prob: float
    loss: float
    gradient: float


class ComparisonResult(NamedTuple):
    """Results of a comparison."""

    agreement: Agreement
    stored: PeerRollout  # rollout for the updates of both sides
    held: tuple[int, int]  # new bytes that stay after the first update


def compare(ours: Ours, peer: Peer, work: Work, project: Project) -> ComparisonResult:
    """Compare log-probabilities of both sides' rollouts, and their first updates on fluvial's rollout."""
    rollout = ours.rollout()
    x, x_next = rollout.x[:, :-1].contiguous(), rollout.x[:, 1:].contiguous()
    log_prob = _find_distance(rollout.log_prob, peer.log_prob(x, x_next))
    if project.samples:
        theirs = peer.rollout()
        log_prob = max(log_prob, _find_distance(ours.log_prob(theirs.x[:, :-1], theirs.x[:, 1:]), theirs.log_prob))
        del theirs
    old = rollout.log_prob if project.recomputes else work.shift_log_prob(rollout.log_prob)
    stored, items = PeerRollout(x, x_next, old, work.advantage), None
    before = count_live_bytes()
    loss = peer.update(stored)
    after = count_live_bytes()
    items = ours.make_items(stored)
    our_loss = ours.update(items, pairs=work.samples).loss
    del items
    held = count_live_bytes() - after, after - before
    left, right = ours.read_gradients(), peer.read_gradients()
    if left.keys() != right.keys():
        raise RunError(f"the sides train other parameters: {sorted(left.keys() ^ right.keys())[:3]}")
    distance = torch.cat([(left[name] - right[name]).flatten() for name in right]).norm()
    norm = torch.cat([gradient.flatten() for gradient in right.values()]).norm()
    scale = float(work.advantage.abs().mean())
    return ComparisonResult(Agreement(log_prob, abs(our_loss - loss) / scale, float(distance / norm)), stored, held)


def merge_agreements(agreements: Sequence[Agreement]) -> Agreement:
    """Return the largest distances of all ranks, with the loss of rank 0, the only one that logs it."""
    log_prob, gradient = (max(values) for values in ([a.log_prob for a in agreements], [a.gradient for a in agreements]))
    return Agreement(log_prob, agreements[0].loss, gradient)


def check_agreement(name: str, agreement: Agreement) -> None:
    """Raise RunError if the two sides do not compute the same: their times would mean nothing."""
    for what, value in agreement._asdict().items():
        if not value <= TOLERANCE:  # NaN too
            what = what.replace("_", "-")
            raise RunError(f"{name}: the {what} is {value:.2g} apart, expected at most {TOLERANCE:g}, so nothing was timed")


def time_calls(device: torch.device, **calls: Callable[[], object]) -> Side:
    """Return a side that makes calls in order and times each by name, and the `whole` if there are several.

    Args:
        device: device of the calls.
        calls: calls to time.
    """

    def side() -> Mapping[str, Spent]:
        spent = dict[str, Spent]()
        for what, call in calls.items():
            stop = start_clocks(device)
            call()
            spent[what] = stop()
        total = Spent(*map(sum, zip(*spent.values(), strict=True)))
        return {**spent, "whole": total} if len(calls) > 1 else spent

    return side


def time_in_turn(runs: int, sides: Sequence[Side], world: World | None = None) -> list[dict[str, list[Spent]]]:
    """Time the sides in turn, and return their times by phase, one per round; the order rotates from round to round.

    CPU time is compared, because machines are shared, and waits for a core do not count in it. Wall time is recorded too.

    Args:
        runs: number of rounds, after a warm-up round.
        sides: sides to time.
        world: processes, whose CPU times are summed, and whose longest wall time counts; None is this process alone.
    """
    times: list[dict[str, list[Spent]]] = [{} for _ in sides]
    for run in range(-1, runs):
        for offset in range(len(sides)):
            side = (run + offset) % len(sides)
            if world is not None and world.size > 1:
                dist.barrier()
            for what, spent in sides[side]().items():
                row = torch.tensor([spent], dtype=torch.float64)
                table = row if world is None else world.gather(row)
                if run >= 0:
                    times[side].setdefault(what, []).append(Spent(float(table[:, 0].sum()), float(table[:, 1].max())))
    return times


def _list_tensors() -> Iterator[Tensor]:
    return (tensor for tensor in gc.get_objects() if type(tensor) in (Tensor, nn.Parameter))


def count_live_bytes() -> int:
    """Count the bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in _list_tensors())}
    return sum(storage.nbytes() for storage in storages.values() if storage.device.type != "meta")


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak of a call's tensors, in bytes, beyond those that exist before."""
    with LiveStorages(list(_list_tensors())) as memory:
        call()
    return memory.peak


@contextmanager
def replace_passes(*modules: Any) -> Iterator[None]:
    """Replace the forward pass of networks by a cheap product with all trained parameters.

    Every parameter then has a gradient, so that clipping and AdamW have their usual work.
    """

    def empty_forward(module: nn.Module) -> Callable[..., tuple[Tensor]]:
        # Walked once, because it takes milliseconds. Dictionaries are kept, because fluvial's engine replaces parameters.
        parameters = [(owner._parameters, name) for owner in module.modules() for name in owner._parameters]
        trained = [(table, name) for table, name in parameters if getattr(table[name], "requires_grad", False)]

        def forward(hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor]:
            first = torch.stack([cast(Tensor, table[name]).reshape(-1)[0] for table, name in trained])
            return (hidden_states * (1 + 0 * first.sum()),)

        return forward

    with ExitStack() as replaced:
        for module in modules:
            replaced.enter_context(patch.object(module, "forward", empty_forward(module)))
        yield


def measure(
    name: str, project: Project, folder: Path, case: PeerCase, config: PeersConfig, world: World
) -> Iterator[PeerRow]:
    """Measure a case, and yield its rows one by one; all ranks call it.

    Raises:
        RunError: the two sides disagree, or the clone lacks the code that runs here.
    """
    halves = project.gradient(folder)
    work = case.build_work(config, rank=world.rank, gradient=halves, kl_weight=project.kl, device=world.device)
    start = count_live_bytes()
    ours = Ours(work, world)
    built = count_live_bytes()
    peer = project.build(folder, work)
    held = built - start, count_live_bytes() - built
    compared = compare(ours, peer, work, project)
    agreement, stored = merge_agreements(world.gather_items(compared.agreement)), compared.stored
    check_agreement(name, agreement)
    held = held[0] + compared.held[0], held[1] + compared.held[1]
    items = ours.make_items(stored)
    clocks = partial(time_calls, world.device)

    def update_peer(samples: int) -> float:
        if project.micro_batches:
            peer.set_micro_batch(samples)
        return peer.update(stored)

    fewer = micro_batch.list_sizes(work.samples)[:-1] if project.micro_batches else []
    updates = {samples: partial(update_peer, samples) for samples in (work.samples, *fewer)}
    others = {samples: clocks(update=update) for samples, update in updates.items()}
    if project.samples:
        others[work.samples] = clocks(rollout=peer.rollout, update=updates[work.samples])
    numbers = [pairs for pairs in case.list_pairs(config) if pairs != ours.pairs]
    sides: dict[int | None, Side] = {None: ours.step}
    sides |= {pairs: clocks(update=partial(ours.update, items, pairs=pairs)) for pairs in numbers}
    calls: dict[str, Callable[[], object]] = {
        "rollout": ours.rollout,
        "update": partial(ours.update, items),
        "whole": ours.step,
    }
    peaks: dict[tuple[str, int | None], int] = {(what, None): measure_peak_bytes(call) for what, call in calls.items()}
    peaks |= {("update", pairs): measure_peak_bytes(partial(ours.update, items, pairs=pairs)) for pairs in numbers}
    other_peaks = {("update", samples): measure_peak_bytes(update) for samples, update in updates.items()}
    other_peaks["rollout", work.samples] = measure_peak_bytes(peer.rollout) if project.samples else 0
    other_peaks["whole", work.samples] = max(other_peaks.values())
    common = list_common_columns(case, clone.read_commit(folder), agreement, held, config)
    # A project that wraps its network for several processes would not call the replaced forward pass.
    modules = (ours.parts.engine.module, peer.module) if world.size == 1 else ()
    measured = _MeasuredSides(sides, others, peaks, other_peaks, ours.pairs)
    yield from _list_rows(measured, common, config, world, modules)


def measure_alone(case: PeerCase, config: PeersConfig, world: World) -> Iterator[PeerRow]:
    """Measure only the transformer's passes, which both sides must compute, and yield the rows."""
    work = case.build_work(config, rank=world.rank, device=world.device)
    alone, other = PeerPasses(work, peft=False), PeerPasses(work, peft=True)
    log_prob = _find_distance(alone.predict(work.samples).detach(), other.predict(work.samples).detach())
    check_agreement(TRANSFORMER, Agreement(log_prob, 0.0, 0.0))
    pairs, clocks = case.list_pairs(config), partial(time_calls, world.device)
    sides: dict[int | None, Side] = {None: clocks(rollout=alone.rollout)}
    sides |= {number: clocks(update=partial(alone.run_passes, number)) for number in pairs}
    peaks: dict[tuple[str, int | None], int] = {("rollout", None): measure_peak_bytes(alone.rollout)}
    peaks |= {("update", number): measure_peak_bytes(partial(alone.run_passes, number)) for number in pairs}
    theirs = partial(other.run_passes, work.samples)
    others = {work.samples: clocks(rollout=other.rollout, update=theirs)}
    other_peaks = {
        ("rollout", work.samples): measure_peak_bytes(other.rollout),
        ("update", work.samples): measure_peak_bytes(theirs),
    }
    common = list_common_columns(case, "peft", Agreement(log_prob, 0.0, 0.0), (0, 0), config)
    measured = _MeasuredSides(sides, others, peaks, other_peaks, work.samples)
    yield from _list_rows(measured, common, config, world)


def list_common_columns(
    case: PeerCase, commit: str, agreement: Agreement, held: tuple[int, int], config: PeersConfig
) -> dict[str, Any]:
    """Return the columns that all rows of a case share, by the names of `PeerRow`.

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
        "fluvial": clone.read_commit(ROOT),
        "samples": config.samples,
        "steps": config.steps,
        "kl": 0.0 if case.peer == TRANSFORMER else config.kl,
        "held_bytes": held[0],
        "peer_held_bytes": held[1],
        "log_prob_distance": agreement.log_prob,
        "gradient_distance": agreement.gradient,
        **harness.collect_facts(PeerRow),
    }


class _MeasuredSides(NamedTuple):
    """Sides to time of a case, and their bytes."""

    sides: Mapping[int | None, Side]  # fluvial's, by pairs per pass; None is the chosen number
    others: Mapping[int, Side]  # the project's, by samples per pass of an update; the first is its default
    peaks: Mapping[tuple[str, int | None], int]  # by phase and pairs per pass
    other_peaks: Mapping[tuple[str, int], int]
    chosen: int  # pairs per pass


def _list_rows(
    measured: _MeasuredSides, common: Mapping[str, Any], config: PeersConfig, world: World, modules: Sequence[Any] = ()
) -> Iterator[PeerRow]:
    """Yield a row for each of fluvial's sides beside the project's default, and one for the fastest updates of both."""
    sides = [*measured.sides.values(), *measured.others.values()]
    times = time_in_turn(config.runs, sides, world)
    mine, theirs = times[: len(measured.sides)], dict(zip(measured.others, times[len(measured.sides) :], strict=True))
    default, *_ = theirs
    rests = [dict[str, list[Spent]]() for _ in sides]
    if modules:
        with replace_passes(*modules):
            rests = time_in_turn(REST_ROUNDS, sides)
    our_times, own_rests = (dict(zip(measured.sides, spent, strict=False)) for spent in (mine, rests))
    their_rests = dict(zip(measured.others, rests[len(mine) :], strict=True))
    compared = [(what, pairs, default) for pairs, table in our_times.items() for what in table if what in theirs[default]]
    best, their_best = _find_fastest(our_times), _find_fastest(theirs)
    compared += [("update", best, their_best)] * (their_best != default)
    for what, pairs, samples in compared:
        per_pass = config.samples if what == "rollout" else measured.chosen if pairs is None else pairs
        peaks = measured.peaks[what, pairs], measured.other_peaks[what, samples]
        peaks = max(world.gather_items(peaks[0])), max(world.gather_items(peaks[1]))
        spent = our_times[pairs][what], theirs[samples][what]
        least = own_rests[pairs].get(what), their_rests[samples].get(what)
        yield make_row(common, what, (per_pass, samples), spent, peaks, least)


def _find_fastest(sides: Mapping[Any, Mapping[str, Sequence[Spent]]]) -> Any:
    """Return the name of the side with the fastest update."""
    updates = {name: median(spent.cpu for spent in side["update"]) for name, side in sides.items() if "update" in side}
    return min(updates, key=updates.__getitem__)


def make_row(
    common: Mapping[str, Any],
    what: str,
    pairs: tuple[int, int],
    times: tuple[Sequence[Spent], Sequence[Spent]],
    peaks: tuple[int, int],
    rests: tuple[Sequence[Spent] | None, Sequence[Spent] | None] = (None, None),
) -> PeerRow:
    """Make the row of one comparison.

    Args:
        common: see `list_common_columns`.
        what: phase.
        pairs: pairs per pass of fluvial and of the project; all further arguments are of both, too.
        times: seconds of each round.
        peaks: bytes.
        rests: seconds without the network's passes.
    """
    ours, other = (torch.tensor([*spent], dtype=torch.float64) for spent in times)
    p20, p50, p80 = harness.compute_spread(ours[:, 0] / other[:, 0])
    # These are short, so the minimum is an undisturbed one.
    rest, other_rest = (min((spent.cpu for spent in spans or ()), default=0.0) for spans in rests)
    return PeerRow(
        what=what,
        pairs=pairs[0],
        peer_pairs=pairs[1],
        runs=len(ours),
        p20=p20,
        p50=p50,
        p80=p80,
        seconds=float(ours[:, 0].median()),
        peer_seconds=float(other[:, 0].median()),
        rest_seconds=rest,
        peer_rest_seconds=other_rest,
        peak_bytes=peaks[0],
        peer_peak_bytes=peaks[1],
        wall_p50=float((ours[:, 1] / other[:, 1]).median()),
        wall_seconds=float(ours[:, 1].median()),
        peer_wall_seconds=float(other[:, 1].median()),
        **common,
    )


def measure_cases(cases: Sequence[PeerCase], config: PeersConfig, projects: Mapping[str, Project]) -> None:
    """Measure cases, and append each row to peers.csv at once; all ranks call it.

    Both sides run in one process, which keeps freed memory as `fluvial train` does.
    """
    keep_freed_memory()
    torch.set_num_threads(config.threads)
    with init_world() as world:
        for case in cases:
            if case.peer == TRANSFORMER:
                rows = measure_alone(case, config, world)
            else:
                project = projects[case.peer]
                rows = measure(case.peer, project, config.clones / project.folder, case, config, world)
            for measured in rows:
                if world.is_main:
                    harness.append(config.out / "peers.csv", [measured], PeerRow)
            gc.collect()  # hooks hold modules in reference cycles


def _find_distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference, as a fraction of the largest value on the right."""
    return float((left - right).abs().max() / right.abs().max())
