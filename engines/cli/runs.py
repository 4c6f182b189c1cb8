"""`fluvial runs [NAME]`: the field's published runs, what each was trained with, and what fluvial does differently."""

import json
from collections.abc import Sequence
from typing import Any

from fluvial.engines.errors import UsageError
from fluvial.engines.train.published.fields import FIELDS
from fluvial.engines.train.published.runs import PublishedRun, find, published_runs

USAGE = """usage: fluvial runs [NAME]

Without a name, list the published runs. With one, print every setting with its source, what is unusual about the run, and
what fluvial does differently. fluvial train NAME trains it.
"""


def run(args: Sequence[str]) -> None:
    """List the published runs, or print one.

    Raises:
        UsageError: there is no such run, or the arguments are wrong.
    """
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
        gpus = "-" if found.gpus is None else str(found.gpus)
        headline = found.headline.get("result", "")
        lines.append(f"{name:<{width}}  {found.algorithm:<28} {found.paper or '-':<10} {gpus:>4}  {headline}".rstrip())
    lines += ["", f"{len(runs)} runs. fluvial runs NAME prints one, fluvial train NAME trains it."]
    return "\n".join(lines)


def described(found: PublishedRun) -> str:
    """Return every setting of a run, its source, what is unusual, and what fluvial does differently."""
    source = found.source
    lines = [
        f"{found.name}: {found.algorithm} on {found.model}",
        f"  paper     {'arXiv ' + found.paper if found.paper else '-'}",
        f"  source    {source['repo']} {source['path']} at {source['commit']}",
        *([f"            {source['note']}"] if "note" in source else []),
        f"  GPUs      {found.gpus or 'not stated'}",
    ]
    if found.headline:
        lines.append(f"  headline  {', '.join(f'{key} {value}' for key, value in found.headline.items())}")
    lines += ["", "settings"]
    for name, field in FIELDS.items():
        if name in found.settings:
            unit = f" {field.unit}" if field.unit and field.unit != "bool" else ""
            lines.append(f"  {name:<26} {_text(found.settings[name])}{unit}  ({field.meaning})")
    missing = [name for name in FIELDS if name not in found.settings]
    lines.append(f"  not stated by the source: {', '.join(missing)}")
    if found.unusual:
        lines += ["", "unusual", *(f"  - {line}" for line in found.unusual)]
    return "\n".join([*lines, "", *_differences(found)])


def _differences(found: PublishedRun) -> list[str]:
    """Return what fluvial does differently, a line each."""
    from fluvial.engines.train.published.resolve import resolve

    try:
        deviations = resolve(found).deviations
    except UsageError as error:
        return ["what fluvial does differently", f"  {error}"]
    if not deviations:
        return ["fluvial runs it as published"]
    lines = ["what fluvial does differently"]
    for deviation in deviations:
        ours = "" if deviation.ours is None else f"{_text(deviation.ours)} instead of "
        lines.append(f"  [{deviation.kind}] {deviation.field}: {ours}{_text(deviation.published)}: {deviation.why}")
    return lines


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
