"""`fluvial runs [NAME]`: the field's published runs, each side by side with what fluvial runs."""

from collections.abc import Sequence

from fluvial.engines.errors import UsageError
from fluvial.engines.train.published.runs import PublishedRun, Source, find, published_runs

USAGE = """usage: fluvial runs [NAME]

Without a name, list the published runs. With one, print its configuration side by side: each setting as published and as
fluvial runs it, where it was read, and why the two differ. fluvial train NAME trains it.
"""
WIDTHS = (28, 36, 24)  # least widths of the columns setting, published and ours


def run(args: Sequence[str]) -> None:
    """List the published runs, or print one."""
    if args and args[0] in ("-h", "--help"):
        print(USAGE, end="")
    elif len(args) > 1:
        raise UsageError(f"runs takes one name, got {len(args)} words (fluvial runs --help)")
    elif args:
        print(described(find(args[0])))
    else:
        print(listed())


def listed() -> str:
    """Return a line per run: name, algorithm, paper, GPUs and headline."""
    runs = published_runs()
    width = max(map(len, runs))
    lines = [f"{'name':<{width}}  {'algorithm':<28} {'paper':<10} GPUs  headline"]
    for name, found in runs.items():
        headline = found.headline.get("result", "")
        lines.append(
            f"{name:<{width}}  {found.algorithm:<28} {found.paper or '-':<10} {found.gpus or '-':>4}  {headline}".rstrip()
        )
    lines += ["", f"{len(runs)} runs. fluvial runs NAME prints one, fluvial train NAME trains it."]
    return "\n".join(lines)


def described(found: PublishedRun) -> str:
    """Return a run's sources, its settings side by side, and what is unusual about it."""
    from fluvial.engines.train.published.resolve import side_by_side

    sources = {source: number for number, source in enumerate(found.sources, start=1)}
    lines = [
        f"{found.name}: {found.algorithm} on {found.model}",
        f"  paper     {'arXiv ' + found.paper if found.paper else '-'}",
        f"  GPUs      {found.gpus or 'not stated'}",
        *(f"  headline  {key}: {value}" for key, value in found.headline.items()),
        *(f"  source {number}  {_place(source)}" for source, number in sources.items()),
        *([f"  fluvial cannot train it: {found.algorithm} needs {found.needs}"] if found.needs else []),
        "",
        _columns(("setting", "published", "ours"), "source  why"),
    ]
    for row in side_by_side(found):
        ours = "the same" if row.ours == row.published and len(row.ours) > WIDTHS[2] else row.ours
        number = sources.get(row.source, "-") if row.source else "-"
        lines.append(_columns((row.setting, row.published, ours), f"{number:<7} {row.why}"))
    if found.unusual:
        lines += ["", "unusual", *(f"  - {line}" for line in found.unusual)]
    return "\n".join(lines)


def _place(source: Source) -> str:
    note = f" ({source.note})" if source.note else ""
    return f"{source.repo} {source.path} at {source.commit}{note}"


def _columns(cells: tuple[str, str, str], rest: str) -> str:
    texts = (f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return f"{'  '.join(texts)}  {rest}".rstrip()
