"""Models that are known by a name: one table of what each name stands for, as a user writes `module:name` for her own."""

from typing import NamedTuple


class NamedModel(NamedTuple):
    """A model with a name. What it consists of is imported when it is asked for."""

    model: str  # class of the model
    job: str  # function (weights, prompts, data) to a job, with prompts and rewards of its own
    pretraining: str  # function that returns how its base weights are trained
    prompts: tuple[str, ...]  # that `fluvial sample` draws


CODES = ("0427", "1999", "3141", "8650")
MODELS = {
    "handwriting": NamedModel(
        "fluvial.models.handwriting:Handwriting",
        "fluvial.engines.run.job:handwriting",
        "fluvial.bench.pretrain:handwriting_pretraining",
        CODES,
    ),
    "handwriting-unet": NamedModel(
        "fluvial.models.handwriting:HandwritingUNet",
        "fluvial.engines.run.job:handwriting_unet",
        "fluvial.bench.pretrain:handwriting_unet_pretraining",
        CODES,
    ),
    "words": NamedModel(
        "fluvial.models.words:Words",
        "fluvial.engines.run.job:words",
        "fluvial.bench.pretrain:words_pretraining",
        ("apple", "house", "river", "stone"),
    ),
    "edit-words": NamedModel(
        "fluvial.models.words:EditWords",
        "fluvial.engines.run.job:edit_words",
        "fluvial.bench.pretrain:edit_words_pretraining",
        ("apple", "house", "river", "stone"),
    ),
}
