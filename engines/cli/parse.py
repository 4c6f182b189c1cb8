"""Parser of a command's flags to its dataclass, which also names the flags of fields in the library's errors."""

import contextlib
import dataclasses
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeVar, get_type_hints

from fluvial.engines.choices import (
    describe_fields,
    find_default,
    find_variant,
    is_bare,
    is_open,
    is_variant,
    list_kinds,
    list_unused,
    list_variant_fields,
    list_variant_kinds,
    list_variants,
    locate,
)
from fluvial.engines.errors import FluvialError, UsageError
from fluvial.engines.plugins import suggest
from fluvial.engines.run.files.hints import explain_unknown, find_settings

if TYPE_CHECKING:
    from rich.console import Console
    from tyro._errors import ParseErrorEvent

    from fluvial.engines.cli.brief import Brief

Config = TypeVar("Config")
EXPECTED = {"INT": "a whole number", "FLOAT": "a number"}  # tyro's names of types


KIND = "kind"  # field of a choice's form


class HelpPrintedError(Exception):
    """Signal that ends a command after its help was printed."""


def parse_config(
    base: Config,
    program: str,
    args: Sequence[str],
    *,
    about: str | None = None,
    brief: "Brief | None" = None,
    unused: Callable[[Config], Iterable[str]] = list_unused,
) -> Config:
    """Parse arguments to a configuration.

    Args:
        base: dataclass whose fields become flags, with their default values.
        program: words before the flags, e.g. "fluvial train grpo".
        args: flags and their values.
        about: first paragraph of the help; by default the docstring of the dataclass.
        brief: output of --help; by default every flag, as with --help-all.
        unused: function from a configuration to the flags that have no effect beside the others; helps omit them.

    Raises:
        UsageError: a flag or a value is invalid.
        HelpPrintedError: the help was printed.
    """
    from fluvial.engines.cli import brief as helps

    if brief is not None and set(helps.HELP) & set(args):
        print("\n".join(helps.format_help(brief, base, program, _drop_arguments(about or type(base).__doc__ or ""))))
        raise HelpPrintedError
    help_words = {*helps.HELP, helps.HELP_ALL} & set(args)
    args = [word for word in args if word not in help_words]
    if help_words:
        with contextlib.suppress(UsageError):  # a person who looks for help may type wrong flags
            base = parse_config(base, program, args)
        args = ["--help"]
    import tyro
    from tyro._errors import on_parse_error

    try:
        with flags_in_errors(base):
            if "--" in args:
                raise UsageError("unexpected '--': expected flags and their values")
            typed = expand_flags(args, list_fields(base))
            hidden = set(unused(base)) if help_words else set[str]()
            form = build_form(base, lambda name: next(iter(find_values(typed, _to_flag(name))[-1:]), None), hidden=hidden)
        words = expand_flags(args, form.names)
        with flags_in_errors(form), on_parse_error(lambda event: _fail(event, words, form)):
            filled: Any = tyro.cli(
                form.type,
                prog=program,
                description=_drop_arguments(about or type(base).__doc__ or ""),
                args=words,
                config=(tyro.conf.AvoidSubcommands,),
            )
            for name in form.names:
                if find_values(words, _to_flag(name))[-1:] == [""] and getattr(*locate(filled, name), None) == Path():
                    raise UsageError(f"{_to_flag(name)} is '', expected a path; the current folder is .")
            from fluvial.engines.run.record import expand_home

            config: Config = expand_home(form.fill(filled))
            return config
    except SystemExit:
        raise HelpPrintedError from None
    except UsageError as error:
        raise UsageError(f"{error} ({program} --help)") from error


def _qualify_field(error: Any, place: str, names: Collection[str]) -> None:
    """Prefix the field of an error with its group of settings, e.g. `fake.` for an optimizer."""
    field = getattr(error, "field", None) or ""
    if (name := field.rpartition(".")[2]) in names and not field.startswith(place):
        error.field = f"{place}{name}"


class FlagForm(NamedTuple):
    """Dataclass with the fields of a configuration but without its checks, from which tyro derives flags.

    A field that holds a dataclass is declared with the type of its value: `TrainConfig.method` may be any method, also a
    user's, and the flags are those of the recipe's method. A choice (`engines.choices`) has a flag for its kind, and flags
    for the fields of that kind.
    """

    type: type  # the dataclass
    names: list[str]  # names of its flags, e.g. "rollout.window.size"
    build: Callable[..., Any]  # function from the fields' values to the configuration
    inner: dict[str, "FlagForm"]  # forms of the fields that hold dataclasses
    union: Any  # type of the field, if it is a choice
    kind: str  # kind of the choice
    bare: list["FlagForm"]  # those of `inner` whose flags have no prefix

    def fill(self, values: Any, place: str = "") -> Any:
        """Build the configuration of a filled-in form, at a place in a run, and run its checks."""
        current = {field.name: getattr(values, field.name) for field in dataclasses.fields(values) if field.name != KIND}
        inner = {name: form.fill(current[name], f"{place}{name}.") for name, form in self.inner.items()}
        try:
            return self.build(**current | inner)
        except ValueError as error:
            _qualify_field(error, place.removeprefix("method."), current)
            raise

    def explain_other_kind(self, name: str) -> str | None:
        """Return a hint for a flag that belongs to another kind of a choice; None for any other flag."""
        first, _, rest = name.partition(".")
        if first in self.inner and rest:
            return self.inner[first].explain_other_kind(rest)
        if self.union is None:
            return next((hint for form in self.bare if (hint := form.explain_other_kind(name)) is not None), None)
        fields = {
            kind: [field.name for field in list_variant_fields(find_variant(self.union, kind, "")[0])]
            for kind in list_kinds(self.union)
        }
        others = [kind for kind, names in fields.items() if first in names]
        return f"the kind {self.kind} has no {first}, which {', '.join(others)} have" if others else None


def build_form(
    config: Any,
    typed_kind: Callable[[str], str | None],
    name: str = "",
    union: Any = None,
    hidden: Collection[str] = (),
) -> FlagForm:
    """Build the form of a configuration.

    A choice keeps its values if the typed kind is its own. Otherwise it has the defaults of the typed kind, and flags
    without a default are required.

    Args:
        config: dataclass with the values of flags that are not typed.
        typed_kind: function from the name of a choice, e.g. "rollout.window", to its typed kind.
        name: name of the field that holds `config`.
        union: type of that field, if it is a choice.
        hidden: names of flags and groups of flags to leave out of a help; such a form cannot be filled in.
    """
    import tyro

    variant: Any = type(config)
    build: Callable[..., Any] = variant
    kind = ""
    if union is not None:
        kind = typed_kind(name) or config.kind
        variant, build = find_variant(union, kind, name)
        if kind == config.kind and is_open(variant):  # a function in Python may have no name to type
            first = dataclasses.fields(variant)[0].name
            build = partial(variant, **{first: getattr(config, first)})
    hints, inner = get_type_hints(variant, include_extras=True), dict[str, FlagForm]()
    names, bare = list[str](), list[FlagForm]()
    fields: list[Any] = [] if union is None else [(KIND, _build_kind_flag(union), kind)]
    for field in dataclasses.fields(variant) if union is None else list_variant_fields(variant):
        value = getattr(config, field.name) if isinstance(config, variant) else _find_default(field)
        full_name, declared = f"{name}.{field.name}" if name else field.name, hints[field.name]
        full_name = name if is_bare(field) else full_name
        if full_name in hidden:
            continue
        if list_variants(declared) or dataclasses.is_dataclass(value):
            form = build_form(value, typed_kind, full_name, declared if list_variants(declared) else None, hidden)
            inner[field.name] = form
            names += form.names
            bare += [form] if is_bare(field) else []
            form_type: Any = Annotated[form.type, tyro.conf.arg(name="")] if is_bare(field) else form.type
            fields.append((field.name, form_type, dataclasses.field(default_factory=form.type)))
        else:
            names.append(full_name)
            fields.append((field.name, declared, dataclasses.field(default_factory=partial(_identity, value))))
    dataclass = dataclasses.make_dataclass(variant.__name__, fields)
    texts = describe_fields(variant)
    described = [f"    {name}: {' '.join(texts[name].split())}" for name, *_ in fields if name in texts]
    dataclass.__doc__ = "\n".join(
        [_drop_arguments(variant.__doc__ or ""), "", "Args:", *described] if described else [variant.__doc__ or ""]
    )
    return FlagForm(dataclass, [name, *names] if union is not None else names, build, inner, union, kind, bare)


def _build_kind_flag(union: Any) -> Any:
    """Return the annotated type of the flag for a choice's kind."""
    import tyro

    known, custom = list_kinds(union), any(map(is_open, list_variants(union)))
    metavar = f"{{{','.join([*known, 'module:name'] if custom else known)}}}"
    about = "; ".join(
        f"{'any other' if is_open(variant) else list_variant_kinds(variant)[0]}: {_read_first_line(variant)}"
        for variant in reversed(list_variants(union))
    )
    return Annotated[str, tyro.conf.arg(name="", metavar=metavar, help=about)]


def _identity(value: Any) -> Any:
    return value


def _find_default(field: "dataclasses.Field[Any]") -> Any:
    """Return the default of a field, or tyro's mark of a required one."""
    import tyro

    return tyro.MISSING if (default := find_default(field)) is dataclasses.MISSING else default


def _read_first_line(variant: type) -> str:
    return inspect.cleandoc(variant.__doc__ or "").partition("\n")[0].removesuffix(".")


def _fail(event: "ParseErrorEvent", words: Sequence[str], form: "FlagForm") -> NoReturn:
    """Raise UsageError for an error of tyro."""
    from tyro import _errors

    if isinstance(event, _errors.UnrecognizedArgs):
        token = next((token for token in event.tokens if token.startswith("-")), event.tokens[0])
        if not token.startswith("-"):
            before = [word for word in words[: [*words, token].index(token)] if word.startswith("--")]
            place = f"{before[-1]} takes one value" if before else "expected flags"
            raise UsageError(f"unexpected word {token!r}: {place}")
        unknown = token.partition("=")[0]
        if len(matches := _find_flags(unknown, form.names)) > 1:
            raise UsageError(f"{unknown} is ambiguous: name one of {', '.join(matches)}")
        if (hint := form.explain_other_kind(unknown[2:].replace("-", "_"))) is not None:
            raise UsageError(f"unknown flag {unknown}: {hint}")
        near = suggest(unknown, map(_to_flag, form.names))
        near = near or suggest(unknown, [_to_flag(name.rpartition(".")[2]) for name in form.names])
        name = unknown[2:].replace("-", "_")
        if (hint := explain_unknown(name, form.names, _to_flag, of_method=bool(form.bare))) is not None:
            raise UsageError(f"unknown flag {unknown}: {hint}")
        raise UsageError(f"unknown flag {unknown}{near}")
    if isinstance(event, _errors.MissingArgs):
        missing = [each.arg.lowered.name_or_flags[0] for each in event.missing_arguments]
        raise UsageError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: without a default, expected a value"
        )
    argument: Any = getattr(event, "argument", None)
    if argument is None:
        raise UsageError(getattr(event, "message", type(event).__name__))
    flag, metavar = argument.lowered.name_or_flags[0], argument.lowered.metavar or "a value"
    choices = [word for part in metavar.split("|") for word in part.strip("{}").split(",")]
    accepted = " or ".join(EXPECTED.get(word, word) for word in choices if word != "None")
    got = list(itertools.takewhile(lambda word: not word.startswith("--"), _list_words_after(words, flag)))
    raise UsageError(f"{flag} is {' '.join(got)!r}, expected {accepted}" if got else f"{flag} needs {accepted}")


def _list_words_after(words: Sequence[str], flag: str) -> list[str]:
    """Return the words after a flag's last occurrence."""
    split = [part for word in words for part in (word.split("=", 1) if word.startswith(f"{flag}=") else [word])]
    split = [part.replace("_", "-") if part.startswith("--") else part for part in split]
    return split[len(split) - split[::-1].index(flag) :] if flag in split else []


def _to_flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _drop_arguments(docstring: str) -> str:
    """Return a docstring without its arguments, which are shown with the flags."""
    return inspect.cleandoc(docstring).partition("\nArgs:\n")[0].strip()


def expand_flags(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a command line with the full names of flags: `--lr` becomes `--optimizer.lr`.

    Args:
        args: words of the command line.
        names: names of the command's flags.
    """
    words = list[str]()
    for word in args:
        flag, equals, value = word.partition("=")
        matches = _find_flags(flag, names)
        words.append(matches[0] + equals + value if len(matches) == 1 else word)
    return words


def _find_flags(word: str, names: Sequence[str]) -> list[str]:
    """Return the flags that a word may stand for, see `find_settings`."""
    name = word.removeprefix("--").replace("-", "_")
    return [_to_flag(each) for each in find_settings(name, names)] if word.startswith("--") else []


@contextlib.contextmanager
def flags_in_errors(config: Any, also: Mapping[str, str] | None = None) -> Iterator[None]:
    """Convert fields in errors to flags: `rollout.eta` to `--rollout.eta`.

    Args:
        config: configuration of the command, or its form.
        also: field of the command by its name in the library, if the names differ.
    """
    names = config.names if isinstance(config, FlagForm) else list_fields(config)

    def format_field(field: str) -> str:
        name = (also or {}).get(field, field)
        name = name if name in names else name.removeprefix("method.")  # records and checkpoints name it so
        return _to_flag(name) if name in names else field

    try:
        yield
    except FluvialError as error:
        message = error.name_fields(format_field)
        if message == str(error):
            raise
        raise type(error)(message) from error
    except ValueError as error:  # an invalid value of a configuration
        from fluvial.core.checks import FieldError  # imports torch

        if isinstance(error, FieldError):
            raise UsageError(f"{format_field(error.field)} {error.problem}") from error
        raise UsageError(str(error)) from error


def list_fields(config: Any) -> list[str]:
    """Return the dotted names of all flags of a dataclass, e.g. "seed" and "rollout.window.size"."""
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value) or is_variant(type(value)):
            names.append(field.name)
        if dataclasses.is_dataclass(value):
            inner = list_fields(value)[is_open(type(value)) :]
            names += inner if is_bare(field) else [f"{field.name}.{name}" for name in inner]
    return names


def find_values(args: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag, given as `flag value` or `flag=value`, in the order of the command line."""
    words = [(*arg.partition("="), after) for arg, after in itertools.zip_longest(args, args[1:])]
    found = [value if equals else after for name, equals, value, after in words if name.replace("_", "-") == flag]
    return [value for value in found if value is not None]


def split_flags(args: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the given flags with their values, and all other words."""
    matched, others, words = list[str](), list[str](), iter(args)
    for word in words:
        name, has_value, _ = word.partition("=")
        if name.replace("_", "-") not in flags:
            others.append(word)
        else:
            matched += [word] if has_value else [word, *itertools.islice(words, 1)]
    return matched, others


def console() -> "Console":
    """Return the console of the standard output."""
    from rich.console import Console

    return Console()


def check_server_packages(command: str) -> None:
    """Raise UsageError if a package of the HTTP servers is missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UsageError(f"{command} needs starlette and uvicorn: pip install 'fluvial[serve]'")


def check_pipeline(pipeline: Any) -> None:
    """Raise UsageError for settings that only training takes: several sizes, and `pipeline.weights`."""
    if pipeline.weights is not None:
        raise UsageError("pipeline.weights", pipeline.weights, "None", "name the folder in `weights`")
    if len(pipeline.sizes) > 1:
        raise UsageError("pipeline.sizes", pipeline.sizes, "one size: only training takes several")


def parse_name(
    command: str, args: Sequence[str], known: Sequence[str], what: str, *, fits: Callable[[str], bool] | None = None
) -> str:
    """Return the name after a command.

    Args:
        command: name of the command.
        args: words after the command.
        known: known names.
        what: kind of name, with its article, e.g. "a model".
        fits: predicate of other valid names, such as paths or `module:name`.

    Raises:
        UsageError: there is no name, or it is unknown.
    """
    if args and (args[0] in known or (fits is not None and fits(args[0]))):
        return args[0]
    got = repr(args[0]) if args else "nothing"
    guess = suggest(args[0], known) if args else ""
    raise UsageError(
        f"{command} needs the name of {what}, got {got}, expected one of {', '.join(known)}{guess} "
        f"(fluvial {command} --help)"
    )
