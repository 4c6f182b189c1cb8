"""Short help of a command: the most used flags, and examples. --help-all lists every flag."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from fluvial.engines.choices import describe_fields, locate
from fluvial.engines.cli.listing import find_width, wrap

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
LONGEST = 190  # largest number of characters of a sentence that is printed in full
WIDEST = 110  # largest number of columns of running text


class Brief(NamedTuple):
    """Contents of the short help of a command."""

    fields: str  # dotted names, separated by spaces; fields that the configuration lacks are left out
    examples: tuple[str, ...]  # command lines without "fluvial "


TRAIN = Brief(
    "model rewards prompts out resume updates seed train lora.rank optimizer.lr kl.coef sampling.prompts sampling.group "
    "sampling.steps sampling.guidance.scale pipeline.height pipeline.width engine.fit evaluation.every tracker",
    (
        "train {recipe} --updates 40",
        "train {recipe} --model MODEL {source} --preset 1gpu",
        "train {recipe} --resume --out {out}",
    ),
)
DRAWING = "weights lora steps seed guidance.scale micro_batch pipeline.height pipeline.width"
SAMPLE = Brief(
    f"prompts out each {DRAWING}",
    (
        "sample handwriting --prompts 0427 1999",
        "sample runs/grpo",
        "sample FOLDER --prompts 'a red fox' --lora runs/grpo/lora --out fox.png",
    ),
)
PREFERENCES = Brief(
    f"prompts rewards out count group {DRAWING}",
    (
        "preferences handwriting --count 200",
        "preferences runs/grpo/checkpoints/000040 --count 100",
        "preferences FOLDER --prompts prompts.txt --rewards pickscore --out pairs",
    ),
)
EVAL = Brief(
    "suite prompts rewards base weights lora out seeds samples steps guidance solver micro_batch pipeline.height "
    "pipeline.width",
    (
        "eval runs/grpo --base start --out comparison",
        "eval runs/grpo/checkpoints/000040 --seeds 4",
        "eval runs/grpo --suite ocr --json",
    ),
)
EXPORT = Brief(
    "format ema dtype merge out",
    (
        "export runs/grpo",
        "export runs/grpo --as comfyui --dtype bfloat16",
        "export runs/grpo/checkpoints/000040 --as merged --out network",
    ),
)
NAMES = {"format": "as"}  # flags whose name is not that of their field


def format_help(brief: Brief, values: Any, program: str, about: str) -> list[str]:
    """Return the lines of the short help of a command.

    Args:
        brief: contents of the help.
        values: default configuration of the command.
        program: words before the flags.
        about: text above the flags.
    """
    columns = min(find_width(), WIDEST)
    fields = [
        (name, *described) for name in brief.fields.split() if (described := _describe_value(values, name)) is not None
    ]
    names = ["--" + NAMES.get(name, name).replace("_", "-") for name, *_ in fields]
    indent = max(map(len, names)) + 4
    flag_lines = []
    for name, (_, value, text) in zip(names, fields, strict=True):
        default = "" if value in (None, (), "") else f" [{' '.join(map(str, value)) if isinstance(value, tuple) else value}]"
        first, *further = textwrap.wrap(text + default, columns - indent, break_on_hyphens=False)
        flag_lines += [f"  {name:<{indent - 2}}{first}", *(" " * indent + line for line in further)]
    method = getattr(values, "method", None)
    rewards = "--rewards pickscore " if method is None or method.is_scored else ""
    from_data = method is not None and method.source is not None
    source = "--data.images FOLDER" if from_data else f"{rewards}--prompts @drawbench-like"
    words = {"recipe": program.rpartition(" ")[2], "source": source, "out": getattr(values, "out", "")}
    examples = [example.format(**words) for example in brief.examples]
    paragraphs = [" ".join(paragraph.split()) for paragraph in about.split("\n\n")]
    return [
        f"usage: {program} [--flag value ...]",
        *(line for paragraph in paragraphs for line in ["", *wrap(paragraph, columns)]),
        "",
        *flag_lines,
        "",
        "Examples",
        *(line for each in examples for line in wrap(f"fluvial {each}", columns, indent=2, later=6)),
        *wrap(f"Every other flag, by group: {program} {HELP_ALL}", columns),
    ]


def _describe_value(values: Any, field: str) -> tuple[Any, str] | None:
    """Return the value of a field and the beginning of its help; None if there is no such field."""
    values, name = locate(values, field)
    if not hasattr(values, name):
        return None
    text = describe_fields(type(values)).get(name, "")
    return getattr(values, name), _shorten(" ".join(text.split()))


def _shorten(text: str) -> str:
    """Return the first sentence of a help text, without its explanations."""
    for marks in ((", e.g.", ", each with", ". ", "; "), (": ", " (")):
        ends = [place for mark in marks if (place := text.find(mark)) > 0]
        text = text[: min(ends, default=len(text))]
        if len(text) <= LONGEST:
            break
    return text.removesuffix(".").replace("`", "")


def asks_for_help(args: Sequence[str]) -> bool:
    """Return whether a command is asked for its help, without a name."""
    return bool(args) and args[0] in (*HELP, HELP_ALL)
