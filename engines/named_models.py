"""Models that are known by a name: one table of what each name stands for, as a user writes `module:name` for her own."""

from typing import NamedTuple


class NamedModel(NamedTuple):
    """A model with a name. What it consists of is imported when it is asked for."""

    about: str  # one line for lists of models
    model: str  # class of the model
    job: str  # function (weights, prompts, data) to a job, with prompts and rewards of its own
    pretraining: str  # function that returns how its base weights are trained


MODELS = {
    "handwriting": NamedModel(
        "a small SD3 transformer that writes 4-digit codes (predicts a velocity)",
        "fluvial.models.handwriting:Handwriting",
        "fluvial.engines.train.job:handwriting",
        "fluvial.engines.train.pretrain:handwriting_pretraining",
    ),
    "handwriting-unet": NamedModel(
        "a small UNet that writes them (predicts epsilon)",
        "fluvial.models.handwriting:HandwritingUNet",
        "fluvial.engines.train.job:handwriting_unet",
        "fluvial.engines.train.pretrain:handwriting_unet_pretraining",
    ),
    "words": NamedModel(
        "a small SD3 transformer that draws words of 3 to 6 letters (predicts a velocity)",
        "fluvial.models.words:Words",
        "fluvial.engines.train.job:words",
        "fluvial.engines.train.pretrain:words_pretraining",
    ),
}


def brings_prompts(model: str) -> bool:
    """Return whether a model comes with prompts and rewards, and with settings that were tuned on it."""
    return model in MODELS
