"""Parse a command's flags into its dataclass, and turn what the library says of fields into what was typed: flags."""

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fluvial.engines.errors import FluvialError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

Config = TypeVar("Config")
# Words for flags: most runs have one reward, `lora` is a group of fields, and `async` is a word of Python's.
ALIASES = {
    "--reward": "--rewards",
    "--transformer": "--weights",
    "--lora": "--lora.weights",
    "--async.ahead": "--asynchronous.ahead",
}


class HelpPrintedError(Exception):
    """Ends a command whose help was asked for and has been printed."""


def parsed(
    kind: type[Config], default: Callable[[], Config], program: str, args: Sequence[str], *, about: str | None = None
) -> Config:
    """Return the configuration that the arguments ask for.

    Args:
        kind: dataclass whose fields become flags.
        default: function that returns the values of the flags that are not typed.
        program: what was typed before the flags, e.g. "fluvial train grpo".
        args: the flags and their values.
        about: first paragraph of the help; by default the docstring of `default`, or of `kind`.

    Raises:
        UsageError: a flag or a value is wrong. The message is one line, without the box that tyro draws.
        HelpPrintedError: help was asked for and has been printed.
    """
    import tyro

    base, boxed = default(), io.StringIO()
    narrow = _narrowed(kind, base)
    names = field_names(base)
    words = [word if word[2:] in names else _alias(word, names) for word in args]
    try:
        with contextlib.redirect_stderr(boxed):
            found = tyro.cli(
                narrow, prog=program, description=_summary(about or default.__doc__ or kind.__doc__ or ""), default=base,
                args=words, config=(tyro.conf.AvoidSubcommands,),
            )  # fmt: skip
    except SystemExit as done:
        if not done.code:
            raise HelpPrintedError from None
        message = with_flags(_unboxed(boxed.getvalue()), field_names(base))
        raise UsageError(f"{message} ({program} --help)") from None
    return kind(**{field.name: getattr(found, field.name) for field in dataclasses.fields(kind)})  # type: ignore[arg-type]


def _narrowed(kind: type, base: Any) -> type:
    """Return a subclass whose fields that hold a dataclass are declared as that dataclass, so that flags come from it.

    `TrainConfig.objective` may be any objective, a person's own too. The one of the recipe has flags.
    """
    held = {field.name: type(getattr(base, field.name)) for field in dataclasses.fields(kind)}
    narrow = {name: found for name, found in held.items() if dataclasses.is_dataclass(found)}
    made = type(kind.__name__, (kind,), {"__annotations__": narrow, "__doc__": kind.__doc__, "__module__": kind.__module__})
    for field in dataclasses.fields(kind):
        if field.name in narrow:
            setattr(made, field.name, dataclasses.field(default_factory=_constant(getattr(base, field.name))))
    return dataclasses.dataclass(frozen=True)(made)


def _summary(docstring: str) -> str:
    """Return a docstring without its section of arguments, which the flags explain."""
    return inspect.cleandoc(docstring).partition("\nArgs:\n")[0].strip()


def _alias(word: str, names: Sequence[str]) -> str:
    """Return the flag that a word stands for, with its value if it has one; other words as they are."""
    flag, equals, value = word.partition("=")
    meant = ALIASES.get(flag, flag)
    return meant + equals + value if meant[2:].replace("-", "_") in names else word


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


@contextlib.contextmanager
def flags_in_errors(config: Any) -> Iterator[None]:
    """Turn the fields of `config` that an error names into flags: the library says `rollout.eta`, a person typed
    `--rollout.eta`."""
    try:
        yield
    except FluvialError as error:
        said = with_flags(str(error), field_names(config))
        if said == str(error):
            raise
        raise type(error)(said) from error
    except ValueError as error:  # a config that a command builds from another
        raise UsageError(with_flags(str(error), field_names(config))) from error


def field_names(config: Any) -> list[str]:
    """Return the names of all fields of a dataclass, e.g. "seed" and "rollout.eta", without those that hold a dataclass."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            names += [f"{field.name}.{inner}" for inner in field_names(value)]
        else:
            names.append(field.name)
    return names


def with_flags(message: str, names: Sequence[str]) -> str:
    """Return a message with the fields that it names written as flags.

    A name with a dot or an underscore stands for itself anywhere. One that is an English word, such as `updates`, is taken
    for a field only in phrases like "updates is 0", "rewards 'x' has" and "set prompts to".
    """
    for name in sorted(names, key=len, reverse=True):
        flag = "--" + name.replace("_", "-")
        exact = re.escape(name)
        if "." in name or "_" in name:
            message = re.sub(rf"(?<![\w./:-]){exact}(?![\w:/-]|\.\w)", flag, message)
        else:
            message = re.sub(
                rf"(^|[:;.,] |\band |\bwhile |\bset ){exact}(?= is\b| are\b| '| to\b| \S+ there\b)", rf"\1{flag}", message
            )
    return message


def typed(args: Sequence[str], flag: str) -> list[str]:
    """Return the values that a flag is given, as `flag value` or `flag=value`."""
    words = [arg.replace("_", "-") if arg.startswith("--") and "=" not in arg else arg for arg in args]
    spaced = [value for word, value in itertools.pairwise(words) if word == flag]
    return spaced + [arg.partition("=")[2] for arg in args if arg.startswith(f"{flag}=")]


def console() -> "Console":
    """Return the terminal that a command prints to."""
    from rich.console import Console

    return Console()


def at_least_one(**numbers: int) -> None:
    """Raise UsageError for a field below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} is {number}, expected at least 1")


def one_size(pipeline: Any) -> None:
    """Raise UsageError for several sizes, which only training takes."""
    if len(pipeline.sizes) > 1:
        raise UsageError("pipeline.sizes holds several, and images are drawn here at one size: name one")


def _unboxed(box: str) -> str:
    """Return what the box of an error says, in one line: its first section, and the flag that tyro would suggest."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    boxed = [line.strip("│ \t") for line in plain.splitlines() if line.startswith("│")]
    # On a terminal without line drawing there is a title between two rules instead.
    lines = boxed or re.split(r"-{3,}\s", plain, maxsplit=1)[-1].splitlines()
    sections = [" ".join(section.split()) for section in re.split(r"[─-]{3,}", "\n".join(lines))]
    message = re.sub(r"^Error parsing [\w.]+: (?=[a-z_.]+:? )", "", sections[0])
    if wrong := re.fullmatch(
        r"Error parsing (--[\w.-]+): (?:invalid literal for int|could not convert string to float).*?('.*')", message
    ):
        kind = "a whole number" if "int()" in message else "a number"
        message = f"{wrong[1]} is {wrong[2]}, expected {kind}"
    union = r"Error parsing (--[\w.-]+): no type matching (\S+) could be instantiated from \[('.*?')\]"
    if wrong := re.match(union, message):
        words = {"INT": "a whole number", "FLOAT": "a number"}
        accepted = " or ".join(words.get(part, part.strip("{}").replace(",", " or ")) for part in wrong[2].split("|"))
        message = f"{wrong[1]} is {wrong[3]}, expected {accepted}"
    if message.startswith("Unrecognized options: "):
        unknown = [word.strip(",") for word in message.split()[2:]]
        message = f"unknown flag {next((word for word in unknown if word.startswith('-')), unknown[0])}"
    suggested = re.search(r"--[\w.-]+", sections[1]) if len(sections) > 2 and "you meant" in sections[1] else None
    return f"{message}; did you mean {suggested[0]}?" if suggested else message


def named(
    command: str, args: Sequence[str], known: Sequence[str], what: str, *, fits: Callable[[str], bool] | None = None
) -> str:
    """Return the name that follows a command.

    Args:
        command: the command.
        args: what was typed after it.
        known: names that there are.
        what: what a name stands for, with its article, e.g. "a model".
        fits: test of a name that is not known, which may be a path or `module:name`.

    Raises:
        UsageError: there is no name, or it is not known.
    """
    if args and (args[0] in known or (fits is not None and fits(args[0]))):
        return args[0]
    got = repr(args[0]) if args else "nothing"
    near = difflib.get_close_matches(args[0], known, n=1) if args else []
    guess = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"{command} needs the name of {what}, got {got}, expected one of {', '.join(known)}{guess} "
        f"(fluvial {command} --help)"
    )
