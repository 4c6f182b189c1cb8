"""`fluvial pretrain MODEL`: train a built-in model's base weights."""

from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import console, flags_in_errors, named, parsed
from fluvial.engines.errors import UsageError


def run(args: list[str]) -> None:
    """Pre-train the named model.

    Raises:
        UsageError: the arguments are wrong.
    """
    name = named("pretrain", args, tuple(BUILT_IN), "a model")
    from fluvial.engines.train.pretrain import (
        PretrainConfig,
        handwriting_pretraining,
        handwriting_unet_pretraining,
        pretrain,
        words_pretraining,
    )

    recipes = dict(zip(BUILT_IN, (handwriting_pretraining, handwriting_unet_pretraining, words_pretraining), strict=True))
    recipe = recipes[name]
    config = parsed(PretrainConfig, recipe, f"fluvial pretrain {name}", args[1:])
    if config.model != name:
        raise UsageError(f"--model is {config.model}, and the command names {name}: use fluvial pretrain {config.model}")
    with flags_in_errors(config):
        pretrain(config, console=console())
