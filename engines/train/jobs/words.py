"""The built-in job of drawn words, which OCR models that people use read and score."""

from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.data.images import read_images
from fluvial.engines.data.prompts import read_sources
from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.errors import UsageError
from fluvial.engines.train.jobs.base import Job


def words(*, weights: Path | None = None, prompts: Sequence[str] = (), data: Sequence[str] = ()) -> Job:
    """Return the job: draw words of 3 to 6 letters so that RapidOCR reads them; ddddocr evaluates held-out words.

    Args:
        weights: folder of the model's weights; the shipped base by default.
        prompts: files of words to train on, see `data.prompts.sources`; by default all words of the list that are not held
            out.
        data: images of words with their words as captions, see `data.images.read_images`.

    Raises:
        UsageError: a package of the recognisers is not installed, or the file holds a line that is not a word.
    """
    from fluvial.models import words as built_in
    from fluvial.models.words.recognisers import INSTALL, missing

    if absent := missing():
        raise UsageError(f"the words job needs {', '.join(absent)}, not installed: {INSTALL}")
    model = built_in.Words(built_in.BASE if weights is None else weights)
    train: Sequence[str | Prompt] = built_in.words("train")
    heldout, weights_of = built_in.words("heldout"), dict[str, float]()
    if prompts:
        train, weights_of = read_sources(prompts, check=model.check_prompt, heldout=heldout)
    elif data:
        train, weights_of = read_sources(data, check=model.check_prompt, heldout=heldout, read=read_images, field="data")
    reward = built_in.reward_recogniser().letters
    return Job(
        model,
        train,
        {"letters": reward, "legibility": built_in.legibility},
        heldout=heldout,
        evaluators={"reward": reward, "heldout": built_in.heldout_recogniser().letters},
        load=built_in.Words,
        data=lambda key, prompts: built_in.write(key, texts(prompts)),
        encode=lambda images: images * 2 - 1,
        source_weights=weights_of,
    )
