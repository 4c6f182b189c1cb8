"""`fluvial runs [NAME]`: list the published runs of the field, or compare one with its configuration in fluvial."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fluvial.engines.cli.listing import JSON, drop_flag, format_table, wrap
from fluvial.engines.errors import UsageError
from fluvial.engines.extensions.published.requirements import list_missing
from fluvial.engines.extensions.published.runs import Citation, PublishedRun, find_run, load_published

USAGE = """usage: fluvial runs [NAME] [--json]
       fluvial runs ls [FOLDER ...] [--json]

Without a name, list the published runs. With one, print each setting as published and as fluvial runs it, its source, and
why the two differ. fluvial train NAME trains it.
--json prints the same for programs.

ls lists your own runs, those in ./runs or in FOLDER: method, model, state, reward, score on held-out prompts, seconds.
"""
OWN = "ls"
SHORT = 24  # longer values that are equal are printed as "the same"


def run(args: Sequence[str]) -> None:
    """List the published runs, or print one."""
    args, as_json = drop_flag(args, JSON)
    if args and args[0] == OWN:
        print(list_own([Path(each) for each in args[1:]] or [Path("runs")], as_json=as_json))
    elif as_json and len(args) < 2:
        facts = [{"name": name, **_list_facts(run)} for name, run in load_published().items()]
        print(json.dumps(to_record(find_run(args[0])) if args else facts, indent=1))
    elif len(args) > 1:
        raise UsageError(f"runs takes one name, got {len(args)} words (fluvial runs --help)")
    elif args:
        print(describe_run(find_run(args[0])))
    else:
        print(format_list())


def list_own(folders: Sequence[Path], *, as_json: bool) -> str:
    """Return a table of the runs in some folders, or their facts as JSON."""
    from fluvial.engines.extensions.report.comparison import list_scores, read_runs

    runs = read_runs(folders)
    scores = [*list_scores(runs)]
    facts = [
        {
            "run": str(each.out),
            "method": each.config.get("name", ""),
            "model": each.config.get("model", ""),
            "state": each.state,
            "reward": each.rewards[-1] if each.rewards else None,
            "scores": {name: row["mean"] for name, column in scores if (row := column[number]) is not None},
            "seconds": each.seconds,
        }
        for number, each in enumerate(runs)
    ]
    if as_json:
        return json.dumps(facts, indent=1)
    rows = [
        (
            row["run"],
            str(row["method"]),
            str(row["model"]),
            row["state"],
            "-" if row["reward"] is None else f"{row['reward']:.3f}",
            ", ".join(f"{name} {score:.3f}" for name, score in row["scores"].items()) or "-",
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
        )
        for row in facts
    ]
    return "\n".join(format_table(("run", "method", "model", "state", "reward", "held out", "seconds"), rows))


def _list_facts(run: PublishedRun) -> dict[str, Any]:
    """Return the facts of a run in a list for programs."""
    facts = {name: getattr(run, name) for name in ("algorithm", "model", "paper", "gpus")}
    return {**facts, "to_bring": list_missing(run), "headline": dict(run.headline)}


def format_list() -> str:
    """Return a table of the published runs: name, algorithm, paper, GPUs, missing requirements, and headline."""
    runs = load_published()
    rows = [
        (
            name,
            run.algorithm,
            run.paper or "-",
            str(run.gpus or "-"),
            ", ".join(list_missing(run)) or "-",
            run.headline.get("result", ""),
        )
        for name, run in runs.items()
    ]
    lines = format_table(("name", "algorithm", "paper", "GPUs", "to bring", "headline"), rows)
    lines += ["", f"{len(runs)} runs. fluvial runs|plan|train NAME prints, plans or trains one."]
    return "\n".join(lines)


def describe_run(run: PublishedRun) -> str:
    """Return a run's sources, the comparison of its settings, the assumed settings, and unusual behaviour."""
    from fluvial.engines.extensions.published.resolve import ASSUMED, compare_settings

    sources = {source: number for number, source in enumerate(run.sources, start=1)}
    lines = [
        f"{run.name}: {run.algorithm} on {run.model}",
        f"  paper     {'arXiv ' + run.paper if run.paper else '-'}",
        f"  GPUs      {run.gpus or 'not stated'}",
        *(f"  headline  {key}: {value}" for key, value in run.headline.items()),
        *(f"  source {number}  {_format_citation(source)}" for source, number in sources.items()),
        "",
    ]
    lines = [part for line in lines for part in wrap(line, later=4) or [""]]
    rows = list(compare_settings(run))
    settings = [
        (
            row.setting,
            row.published,
            "the same" if row.ours == row.published and len(row.ours) > SHORT else row.ours,
            str(sources.get(row.source, "-")) if row.source else "-",
            row.why,
        )
        for row in rows
        if row.why != ASSUMED
    ]
    lines += format_table(("setting", "published", "ours", "source", "why"), settings)
    if assumed := "; ".join(f"{row.setting} {row.ours}" for row in rows if row.why == ASSUMED):
        lines += ["", f"{ASSUMED}, since no source states them", *wrap(assumed, indent=2, later=2)]
    if run.unusual:
        lines += ["", "unusual", *(part for line in run.unusual for part in wrap(f"- {line}", indent=2, later=4))]
    return "\n".join(lines)


def to_record(run: PublishedRun) -> dict[str, Any]:
    """Return a run for programs: its facts, and the comparison of its settings."""
    from fluvial.engines.extensions.published.resolve import compare_settings

    facts = {name: getattr(run, name) for name in ("name", "algorithm", "model", "paper", "gpus", "unusual")}
    settings = [
        {
            **{name: getattr(row, name) for name in ("setting", "published", "ours", "why")},
            "source": _format_citation(row.source),
        }
        for row in compare_settings(run)
    ]
    return {**facts, "headline": dict(run.headline), "settings": settings}


def _format_citation(source: Citation | None) -> str | None:
    if source is None:
        return None
    note = f" ({source.note})" if source.note else ""
    return f"{source.repo} {source.path} at {source.commit}{note}"
