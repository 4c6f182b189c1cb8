"""Models that are known by a name: one table of what each name stands for, as a user writes `module:name` for her own."""

from typing import NamedTuple


class NamedModel(NamedTuple):
    """A model with a name. What it consists of is imported when it is asked for."""

    model: str  # class of the model
    job: str  # function that returns its job, with prompts and rewards of its own
    prompts: tuple[str, ...]  # that `fluvial sample` draws


CODES, SPELLINGS = ("0427", "1999", "3141", "8650"), ("apple", "house", "river", "stone")
MODELS = {
    name.replace("_", "-"): NamedModel(f"fluvial.models.{model}", f"fluvial.engines.run.job:{name}", prompts)
    for name, model, prompts in (
        ("handwriting", "handwriting:Handwriting", CODES),
        ("handwriting_unet", "handwriting:HandwritingUNet", CODES),
        ("words", "words:Words", SPELLINGS),
        ("edit_words", "words:EditWords", SPELLINGS),
    )
}
