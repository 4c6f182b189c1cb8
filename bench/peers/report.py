"""The benchmark `peers`: times fluvial beside other projects' code, appends ratios to peers.csv, and prints tables.

python -P -m fluvial.bench peers --clones FOLDER

FOLDER has the clones under the names of their repositories: flow_grpo, Flow-Factory, UniRL, verl-omni.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fluvial.bench import harness
from fluvial.bench.peers import clone
from fluvial.bench.peers.config import KNOWN, PROJECTS, TRANSFORMER, PeerCase, PeerRow, PeersConfig, Project
from fluvial.bench.peers.measure import ROOT, measure_cases
from fluvial.engines.errors import UsageError
from fluvial.models.device import find_default_device, is_accelerator

NAMES = {
    "flow_grpo": "Flow-GRPO",
    "flow_factory": "Flow-Factory",
    "unirl": "UniRL",
    "verl_omni": "verl-omni, stored log-probabilities",
    "verl_omni_default": "verl-omni, default",
}
Key = tuple[str, str, int, int, int, float]  # peer, size, ranks, window, steps, weight of the KL
Rows = dict[tuple[str, int, int], PeerRow]  # by phase and pairs per pass, of fluvial and of the project


def run(config: PeersConfig, projects: Mapping[str, Project] = PROJECTS) -> Sequence[PeerRow]:
    """Measure every project with a clone, append to peers.csv and print a table.

    Raises:
        UsageError: there is no clone, or none of a project that runs on this machine's accelerator.
        RunError: two sides disagree, or processes failed.
    """
    path = config.out / "peers.csv"
    before = harness.read(path, PeerRow)
    if config.table:
        print(format_markdown(before))
        return []
    chosen = list_cases(config, projects)
    if config.skip_done:
        chosen = [case for case in chosen if not is_done(case, config, projects, before)]
    for ranks in config.ranks:
        together = [case for case in chosen if case.ranks == ranks]
        if ranks > 1 and together:
            harness.run_in_processes(measure_cases, together, config, projects, ranks=ranks, threads=config.threads)
        elif together:
            measure_cases(together, config, projects)
    rows = harness.read(path, PeerRow)[len(before) :]
    show(rows)
    return rows


def list_cases(config: PeersConfig, projects: Mapping[str, Project]) -> list[PeerCase]:
    """Return the cases to compare, in order; UsageError if there is no clone."""
    present, on_host = [], not is_accelerator(find_default_device())
    for name in config.peers:
        if name != TRANSFORMER and not (on_host or projects[name].accelerators):
            print(f"{name}: skipped, it runs on the CPU alone here: hide the accelerator with CUDA_VISIBLE_DEVICES=")
        elif name != TRANSFORMER and config.kl and projects[name].kl is None:
            print(f"{name}: skipped, its loss has no KL term here")
        elif name == TRANSFORMER or (config.clones / projects[name].folder).is_dir():
            present.append(name)
        else:
            print(f"{name}: skipped, {config.clones / projects[name].folder} is not a folder")
    if not present or (present == [TRANSFORMER] and config.peers != (TRANSFORMER,)):
        folders = dict.fromkeys(projects[name].folder for name in config.peers if name != TRANSFORMER)
        raise UsageError(f"peers: {config.clones} holds no clone: expected {', '.join(folders)}")
    return [
        PeerCase(name, size, ranks, window)
        for ranks in config.ranks
        for size in config.sizes
        for window in config.windows
        for name in present
        if ranks == 1 or (name != TRANSFORMER and projects[name].ranks)
    ]


def is_done(case: PeerCase, config: PeersConfig, projects: Mapping[str, Project], rows: Sequence[PeerRow]) -> bool:
    """Return whether `rows` has all rows of a case for these commits, with at least as many rounds."""
    alone = case.peer == TRANSFORMER
    commit = "peft" if alone else clone.read_commit(config.clones / projects[case.peer].folder)
    same = [
        row
        for row in rows
        if (row.peer, row.size, row.ranks, row.window) == case
        and (row.commit, row.fluvial) == (commit, clone.read_commit(ROOT))
        and (row.samples, row.steps, row.kl) == (config.samples, config.steps, 0.0 if alone else config.kl)
        and row.runs >= config.runs
    ]
    expected = {("update", number) for number in case.list_pairs(config)}
    if alone or projects[case.peer].samples:
        expected.add(("rollout", config.samples))
    phases = () if alone else ("update", "whole") if projects[case.peer].samples else ("update",)
    return expected <= {(row.what, row.pairs) for row in same} and {*phases} <= {row.what for row in same}


def show(rows: Sequence[PeerRow]) -> None:
    """Print rows as a table."""
    lines = [
        {
            "peer": row.peer,
            "size": row.size,
            "ranks": str(row.ranks),
            "window": str(row.window or "all"),
            "KL": f"{row.kl:g}",
            "what": row.what,
            "pairs per pass": str(row.pairs),
            "theirs": str(row.peer_pairs),
            **{name: f"{getattr(row, name):.2f}" for name in ("p20", "p50", "p80")},
            "wall": f"{row.wall_p50:.2f}",
            "MB": f"{(row.held_bytes + row.peak_bytes) / 1e6:.1f}",
            "theirs, MB": f"{(row.peer_held_bytes + row.peer_peak_bytes) / 1e6:.1f}",
            "log-probs apart": f"{row.log_prob_distance:.1g}",
            "gradients apart": f"{row.gradient_distance:.1g}",
        }
        for row in rows
    ]
    harness.show_table("CPU time of fluvial, as a multiple of the project's; below 1 fluvial is faster", lines, left=5)


def format_markdown(rows: Sequence[PeerRow]) -> str:
    """Format tables of each case at its newest commit of fluvial: ratios, the transformer's share, and memory.

    Among rows with the same peer, size, processes, window, phase and pairs the last one counts.
    """
    by_case: dict[Key, Rows] = {}
    last = {_make_key(row): row.fluvial for row in rows}
    newest = [row for row in rows if row.fluvial == last[_make_key(row)]]
    for row in newest:
        by_case.setdefault(_make_key(row), {})[row.what, row.pairs, row.peer_pairs] = row
    order = sorted((key for key in by_case if key[0] != TRANSFORMER), key=_order)
    cases = [(key, by_case[key], by_case.get((TRANSFORMER, key[1], 1, *key[3:5], 0.0), {})) for key in order]
    if not cases:
        return "peers.csv has no row of a project"
    ratios = [_format_head(key) | _format_ratios(phase_rows) | {"fluvial": last[key]} for key, phase_rows, _ in cases]
    shares = [
        _format_head(key) | _format_shares(phase_rows, alone) for key, phase_rows, alone in cases if key[2] == 1 and alone
    ]
    memory = [_format_head(key) | _format_memory(phase_rows) for key, phase_rows, _ in cases]
    measured = {(row.peer, row.commit) for row in newest if row.peer != TRANSFORMER}
    projects = sorted(measured, key=lambda pair: KNOWN.index(pair[0]))
    commits = ", ".join(f"{NAMES[peer]} at `{commit}`" for peer, commit in projects)
    origin = f"{commits}; medians of {_format_span(row.runs for row in newest)} rounds."
    distances = (
        f"Log-probabilities are {max(row.log_prob_distance for row in newest):.0e} apart at most, gradients "
        f"{max(row.gradient_distance for row in newest):.0e}."
    )
    tables = [harness.format_markdown(table) for table in (ratios, shares, memory) if table]
    return "\n\n".join([origin, distances, *tables])


def _make_key(row: PeerRow) -> Key:
    return row.peer, row.size, row.ranks, row.window, row.steps, row.kl


def _order(key: Key) -> tuple[int, int, int, float, str, int]:
    peer, size, ranks, window, steps, kl = key
    return ranks, window, steps, kl, {"tiny": "0", "small": "1"}.get(size, size), KNOWN.index(peer)


def _format_head(key: Key) -> dict[str, str]:
    peer, size, ranks, window, steps, kl = key
    return {
        "project": NAMES[peer],
        "size": size,
        "processes": str(ranks),
        "steps with noise": f"{window or steps} of {steps}",
        "KL": f"{kl:g}" if kl else "no",
    }


class _Phases(NamedTuple):
    """Rows of a case for its tables."""

    rollout: PeerRow | None
    equal: PeerRow | None  # update with as many pairs per pass on both sides
    default: PeerRow | None  # update with each side's default
    best: PeerRow | None  # update with each side's fastest number of pairs per pass

    @classmethod
    def select(cls, rows: Rows) -> "_Phases":
        """Select the rows of a case, which are in the order of their measurement."""
        rollout = next((row for (what, *_), row in rows.items() if what == "rollout"), None)
        updates = [row for (what, *_), row in rows.items() if what == "update"]
        equal = next((row for row in updates if row.pairs == row.peer_pairs == row.samples), None)
        # A row has another number of the project's pairs than its default only if the project is faster with it.
        best = [row for row in updates if row.peer_pairs != row.samples] or updates
        return cls(rollout, equal, next(iter(updates), None), min(best, key=lambda row: row.p50, default=None))


def _format_ratios(rows: Rows) -> dict[str, str]:
    phases = _Phases.select(rows)
    whole = next((row for (what, *_), row in rows.items() if what == "whole"), None)
    return {
        "rollout": _format_ratio(phases.rollout),
        "update, equal pairs per pass": _format_ratio(phases.equal),
        "update, defaults": _format_with_pairs(phases.default),
        "update, each side's best pairs per pass": _format_with_pairs(phases.best),
        "whole, defaults": _format_ratio(whole),
        "whole, wall time": "-" if whole is None else f"{whole.wall_p50:.2f}",
    }


def _format_with_pairs(row: PeerRow | None) -> str:
    return "-" if row is None else f"{row.pairs} and {row.peer_pairs}: {_format_ratio(row)}"


def _format_ratio(row: PeerRow | None) -> str:
    return "-" if row is None else f"{row.p50:.2f} ({row.p20:.2f} to {row.p80:.2f})"


def _format_shares(rows: Rows, alone: Rows) -> dict[str, str]:
    """Return three cells per phase, for equal pairs per pass on both sides.

    They are the share of the transformer's passes in the project's time; the ratio if fluvial made only its passes; and the
    time of both sides without the passes. Only ratios within a round and times without passes are used, because the speed
    of a machine drifts between cases.
    """
    cells = dict[str, str]()
    for phase, row, bare in zip(("rollout", "update"), _Phases.select(rows), _Phases.select(alone), strict=False):
        share, least, rests = "-", "-", "-"
        if row is not None and bare is not None:
            passes = 1 - row.peer_rest_seconds / row.peer_seconds
            share, least = f"{passes:.2f}", f"{passes * bare.p50:.2f}"
            rests = f"{1000 * row.rest_seconds:.0f}, {1000 * row.peer_rest_seconds:.0f} of {1000 * row.peer_seconds:.0f} ms"
        cells |= {f"{phase}: passes": share, f"{phase}: least ratio": least, f"{phase}: the rest": rests}
    return cells


def _format_memory(phases: Rows) -> dict[str, str]:
    names = "peak, rollout", "peak, update, equal pairs", "peak, update, defaults", "peak, update, each side's best"
    rows = dict(zip(names, _Phases.select(phases), strict=True))
    held = next(iter(phases.values()))
    return {
        "held": _format_megabytes(held.held_bytes, held.peer_held_bytes),
        **{
            name: "-" if row is None else _format_megabytes(row.peak_bytes, row.peer_peak_bytes)
            for name, row in rows.items()
        },
    }


def _format_megabytes(ours: int, other: int) -> str:
    return f"{ours / 1e6:.1f} MB, {other / 1e6:.1f} MB"


def _format_span(numbers: Iterable[int]) -> str:
    sizes = sorted(set(numbers))
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
