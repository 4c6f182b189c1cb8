"""`fluvial pretrain MODEL`: train a built-in model's base weights."""

from pkgutil import resolve_name

from fluvial.engines.cli.brief import asks
from fluvial.engines.cli.parse import console, flags_in_errors, parse_config, parse_name
from fluvial.engines.errors import UsageError
from fluvial.engines.named_models import MODELS


def run(args: list[str]) -> None:
    """Pre-train the named model."""
    if asks(args):
        args = ["handwriting", "--help"]
    name = parse_name("pretrain", args, tuple(MODELS), "a model")
    from fluvial.bench.pretrain import pretrain

    recipe = resolve_name(MODELS[name].pretraining)
    config = parse_config(recipe(), f"fluvial pretrain {name}", args[1:], about=recipe.__doc__)
    if config.model != name:
        raise UsageError(f"--model is {config.model}, and the command names {name}: use fluvial pretrain {config.model}")
    with flags_in_errors(config):
        pretrain(config, console=console())
