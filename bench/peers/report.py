"""Times fluvial beside other projects' code, appends the ratios to peers.csv, and prints tables.

python -P -m fluvial.bench peers --clones FOLDER

FOLDER holds the clones by the names of their repositories: flow_grpo, Flow-Factory, UniRL, verl-omni.
"""

from collections.abc import Mapping, Sequence

import torch

from fluvial.bench import harness
from fluvial.bench.peers import clone, table
from fluvial.bench.peers.config import PROJECTS, TRANSFORMER, Case, PeerRow, PeersConfig, Project
from fluvial.bench.peers.measure import ROOT, measure_cases
from fluvial.engines.errors import UsageError


def run(config: PeersConfig, projects: Mapping[str, Project] = PROJECTS) -> Sequence[PeerRow]:
    """Measure every project whose clone is there, append to peers.csv and print a table.

    Raises:
        UsageError: there is no clone, or a GPU, whose time CPU time does not hold.
        RunError: two sides disagree, or processes failed.
    """
    path = config.out / "peers.csv"
    before = harness.read(path, PeerRow)
    if config.table:
        print(table.markdown(before))
        return []
    if torch.cuda.is_available():
        raise UsageError("peers: CPU time says nothing of work on a GPU: hide it with CUDA_VISIBLE_DEVICES=")
    chosen = cases(config, projects)
    if config.skip_done:
        chosen = [case for case in chosen if not is_done(case, config, projects, before)]
    for ranks in config.ranks:
        together = [case for case in chosen if case.ranks == ranks]
        if ranks > 1 and together:
            harness.in_processes(measure_cases, together, config, projects, ranks=ranks, threads=config.threads)
        elif together:
            measure_cases(together, config, projects)
    rows = harness.read(path, PeerRow)[len(before) :]
    show(rows)
    return rows


def cases(config: PeersConfig, projects: Mapping[str, Project]) -> list[Case]:
    """Return what is compared, in order.

    Raises:
        UsageError: there is no clone.
    """
    there = []
    for name in config.peers:
        if name == TRANSFORMER or (config.clones / projects[name].folder).is_dir():
            there.append(name)
        else:
            print(f"{name}: skipped, {config.clones / projects[name].folder} is not a folder")
    if not there or (there == [TRANSFORMER] and config.peers != (TRANSFORMER,)):
        folders = dict.fromkeys(projects[name].folder for name in config.peers if name != TRANSFORMER)
        raise UsageError(f"peers: {config.clones} holds no clone: expected {', '.join(folders)}")
    return [
        Case(name, size, ranks, window)
        for ranks in config.ranks
        for size in config.sizes
        for window in config.windows
        for name in there
        if ranks == 1 or (name != TRANSFORMER and projects[name].ranks)
    ]


def is_done(case: Case, config: PeersConfig, projects: Mapping[str, Project], rows: Sequence[PeerRow]) -> bool:
    """Return whether the rows hold every row of a case, of these commits, with at least as many rounds."""
    alone = case.peer == TRANSFORMER
    commit = "peft" if alone else clone.commit(config.clones / projects[case.peer].folder)
    same = [
        row
        for row in rows
        if (row.peer, row.size, row.ranks, row.window) == case
        and (row.commit, row.fluvial, row.samples, row.steps) == (commit, clone.commit(ROOT), config.samples, config.steps)
        and row.runs >= config.runs
    ]
    expected = {("update", pairs) for pairs in case.pairs(config)}
    if alone or projects[case.peer].samples:
        expected.add(("rollout", config.samples))
    return expected <= {(row.what, row.pairs) for row in same}


def show(rows: Sequence[PeerRow]) -> None:
    """Print rows as a table."""
    lines = [
        {
            "peer": row.peer,
            "size": row.size,
            "ranks": str(row.ranks),
            "window": str(row.window or "all"),
            "what": row.what,
            "pairs per pass": str(row.pairs),
            "theirs": str(row.peer_pairs),
            **{name: f"{getattr(row, name):.2f}" for name in ("p20", "p50", "p80")},
            "MB": f"{(row.held_bytes + row.peak_bytes) / 1e6:.1f}",
            "theirs, MB": f"{(row.peer_held_bytes + row.peer_peak_bytes) / 1e6:.1f}",
            "log-probs apart": f"{row.log_prob_distance:.1g}",
            "gradients apart": f"{row.gradient_distance:.1g}",
        }
        for row in rows
    ]
    harness.show_table("CPU time of fluvial, as a multiple of the project's; below 1 fluvial is faster", lines, left=5)
