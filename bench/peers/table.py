"""The tables of bench/README.md, from the rows of peers.csv."""

from collections.abc import Iterable, Sequence

from fluvial.bench.peers.config import KNOWN, TRANSFORMER, PeerRow

NAMES = {
    "flow_grpo": "Flow-GRPO",
    "flow_factory": "Flow-Factory",
    "unirl": "UniRL",
    "verl_omni": "verl-omni, stored log-probabilities",
    "verl_omni_default": "verl-omni, default",
}
Key = tuple[str, str, int, int]  # peer, size, ranks, window


def markdown(rows: Sequence[PeerRow]) -> str:
    """Return the tables of the newest commit of fluvial: ratios, the transformer's share, and memory.

    Of rows with the same peer, size, processes, window, phase and pairs the last one counts.
    """
    newest = [row for row in rows if row.fluvial == rows[-1].fluvial]
    by_case: dict[Key, dict[tuple[str, int], PeerRow]] = {}
    for row in newest:
        by_case.setdefault((row.peer, row.size, row.ranks, row.window), {})[row.what, row.pairs] = row
    order = sorted((key for key in by_case if key[0] != TRANSFORMER), key=_place)
    cases = [(key, by_case[key], by_case.get((TRANSFORMER, key[1], 1, key[3]), {})) for key in order]
    if not cases:
        return "peers.csv has no row of a project"
    head = ["project", "size", "processes", "steps with noise"]
    ratios = _table(
        [*head, "rollout", "update, as many pairs per pass", "update, larger passes"],
        ([*_head(key, found), *_ratios(found)] for key, found, _ in cases),
    )
    shares = _table(
        [*head, *(f"{phase}: {cell}" for phase in ("rollout", "update") for cell in ("passes", "least ratio", "the rest"))],
        ([*_head(key, found), *_shares(found, alone)] for key, found, alone in cases if key[2] == 1 and alone),
    )
    memory = _table(
        [*head, "held", "peak, rollout", "peak, update", "peak, larger passes"],
        ([*_head(key, found), *_memory(found)] for key, found, _ in cases),
    )
    commits = ", ".join(f"{NAMES[peer]} at `{commit}`" for peer, commit in _commits(newest))
    made = f"fluvial at `{newest[-1].fluvial}`; {commits}; medians of {_span(row.runs for row in newest)} rounds."
    apart = (
        f"Log-probabilities are {max(row.log_prob_distance for row in newest):.0e} apart at most, gradients "
        f"{max(row.gradient_distance for row in newest):.0e}."
    )
    return "\n\n".join([made, apart, ratios, shares, memory])


def _place(key: Key) -> tuple[int, int, str, int]:
    peer, size, ranks, window = key
    return ranks, window, {"tiny": "0", "small": "1"}.get(size, size), KNOWN.index(peer)


def _head(key: Key, found: dict[tuple[str, int], PeerRow]) -> list[str]:
    peer, size, ranks, window = key
    steps = next(iter(found.values())).steps
    return [NAMES[peer], size, str(ranks), f"{window or steps} of {steps}"]


def _phases(found: dict[tuple[str, int], PeerRow]) -> tuple[PeerRow | None, PeerRow | None, list[PeerRow]]:
    """Return the row of the rollout, that of the update with as many pairs per pass, and those with more."""
    rollout = next((row for (what, _), row in found.items() if what == "rollout"), None)
    updates = [row for (what, _), row in found.items() if what == "update"]
    equal = next((row for row in updates if row.pairs == row.peer_pairs), None)
    return rollout, equal, [row for row in updates if row.pairs > row.peer_pairs]


def _ratios(found: dict[tuple[str, int], PeerRow]) -> list[str]:
    rollout, equal, larger = _phases(found)
    best = min(larger, key=lambda row: row.p50, default=None)
    return [_ratio(rollout), _ratio(equal), "-" if best is None else f"{best.pairs}: {_ratio(best)}"]


def _ratio(row: PeerRow | None) -> str:
    return "-" if row is None else f"{row.p50:.2f} ({row.p20:.2f} to {row.p80:.2f})"


def _shares(found: dict[tuple[str, int], PeerRow], alone: dict[tuple[str, int], PeerRow]) -> list[str]:
    """Return three cells per phase, of as many pairs per pass on both sides.

    They are the share of the project's time that the passes of its transformer take; the ratio that would remain if
    fluvial made its own passes and nothing else; and the time of both sides without the passes. Only ratios of one
    round and the rests are used, because the speed of a machine drifts between cases.
    """
    cells = []
    for row, bare in zip(_phases(found)[:2], _phases(alone)[:2], strict=True):
        if row is None or bare is None:
            cells += ["-"] * 3
            continue
        share = 1 - row.peer_rest_seconds / row.peer_seconds
        rests = f"{1000 * row.rest_seconds:.0f}, {1000 * row.peer_rest_seconds:.0f} of {1000 * row.peer_seconds:.0f} ms"
        cells += [f"{share:.2f}", f"{share * bare.p50:.2f}", rests]
    return cells


def _memory(found: dict[tuple[str, int], PeerRow]) -> list[str]:
    rollout, equal, larger = _phases(found)
    best = min(larger, key=lambda row: row.p50, default=None)
    held = next(iter(found.values()))
    return [
        _megabytes(held.held_bytes, held.peer_held_bytes),
        *("-" if row is None else _megabytes(row.peak_bytes, row.peer_peak_bytes) for row in (rollout, equal, best)),
    ]


def _megabytes(own: int, other: int) -> str:
    return f"{own / 1e6:.1f} MB, {other / 1e6:.1f} MB"


def _commits(rows: Sequence[PeerRow]) -> list[tuple[str, str]]:
    return sorted({(row.peer, row.commit) for row in rows if row.peer != TRANSFORMER}, key=lambda pair: KNOWN.index(pair[0]))


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
