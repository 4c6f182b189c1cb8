"""Built-in models by name: a table of their `module:name`, which a user writes for her own models."""

from typing import NamedTuple


class NamedModel(NamedTuple):
    """A built-in model; its class and job are imported when they are needed."""

    model: str  # class of the model
    job: str  # function that returns its job, with its prompts and rewards
    prompts: tuple[str, ...]  # prompts of `fluvial sample`


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
