"""Prompts from files and prompt sets, with weights, and their split into training and held-out prompts."""

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fluvial.engines.data import prompt_sets
from fluvial.engines.data.prompt_sets import Part, is_set
from fluvial.engines.data.prompt_table import PromptTable, list_examples, select
from fluvial.engines.data.records import Prompt, parse_prompt
from fluvial.engines.data.sizes import Size, find_nearest_size, parse_size
from fluvial.engines.data.tables import PROMPT_FILES, is_hub, is_text, read_lines, read_rows
from fluvial.engines.errors import UsageError


class PromptSource(NamedTuple):
    """File of prompts, or prompt set."""

    # File name without its ending, or the path below the common folder for files of the same name; a set's name as typed.
    name: str
    path: Path  # `@name` for a prompt set
    weight: float  # fraction of the samples, relative to the other sources


def parse_sources(words: Sequence[str], field: str = "prompts") -> tuple[PromptSource, ...]:
    """Parse names of files and prompt sets, each `file` or `file=weight`; a set is `@name`.

    Raises:
        UsageError: a weight is not a number above 0, or a file is named twice.
    """
    listed: list[tuple[Path, float]] = []
    for word in words:
        name, separator, weight = str(word).rpartition("=")
        if not separator or os.path.exists(word):
            listed.append((Path(word), 1.0))
            continue
        try:
            number = float(weight)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise UsageError(
                f"`{field}` is {word!r}, whose weight {weight!r} is not a number above 0: give one, e.g. {name}=2"
            )
        listed.append((Path(name), number))
    paths, stems = Counter(path for path, _ in listed), Counter(path.stem for path, _ in listed)
    if repeated := [path for path, number in paths.items() if number > 1]:
        raise UsageError(f"`{field}` names {repeated[0]} twice: name each file once")

    def name_source(path: Path) -> str:
        if is_set(path) or is_hub(path):
            return str(path)
        namesakes = [os.path.abspath(other) for other, _ in listed if other.stem == path.stem and not is_set(other)]
        top = os.path.commonpath([os.path.dirname(file) for file in namesakes])
        return path.stem if stems[path.stem] == 1 else os.path.relpath(path, top)

    return tuple(PromptSource(name_source(path), path, weight) for path, weight in listed)


def is_prompt_file(word: str) -> bool:
    """Return whether a word names a file of prompts, by its ending; otherwise it is a prompt.

    Raises:
        UsageError: the file does not exist, or it has another ending.
    """
    if is_hub(word):
        return True
    if not word.lower().endswith(PROMPT_FILES):
        if os.path.isfile(word):
            raise UsageError(f"{word} is a file, expected a text, or a file that ends in {', '.join(PROMPT_FILES)}")
        return False
    if not os.path.isfile(word):  # also False for names that are too long
        raise UsageError(f"no such file: {word}")
    return True


def read_prompts(
    path: Path,
    *,
    part: Part = "train",
    check: Callable[[str], None],
    heldout: Collection[object] = (),
    source: str | None = None,
    media: Mapping[str, str] = MappingProxyType({}),
) -> PromptTable:
    """Return the prompts of a file, or of a part of a prompt set.

    A text file has one prompt per line; blank lines are skipped. A .jsonl, .json (array), .csv or .parquet file, or a
    folder written by datasets' `save_to_disk`, has one record per prompt, see `records.parse_prompt`.

    Args:
        path: file, `@name` of a prompt set, or `hub:OWNER/NAME` of a data set.
        part: part of a prompt set.
        check: function that raises ValueError for a string that is not a prompt of the model.
        heldout: model inputs of the evaluation's prompts, which must not be in the file.
        source: name of the file in metrics; by default its name without the ending.
        media: argument of `records.parse_prompt`.

    Raises:
        UsageError: the file cannot be read or is empty, or a line is not a record, not a prompt or held out; the message
            names file, line and column.
    """
    name = (str(path) if is_set(path) or is_hub(path) else path.stem) if source is None else source
    prompts = check_prompts(_locate(path, name, media, part), check=check, heldout=heldout)
    if not prompts and is_set(path):
        raise UsageError(f"prompt set {path} has no prompt in the part {part}, expected at least one")
    if not prompts:
        raise UsageError(f"prompts file {path} is empty, expected one prompt per line")
    return prompts


def check_prompts(
    located: Iterable[tuple[str, Prompt]], *, check: Callable[[str], None], heldout: Collection[object]
) -> PromptTable:
    """Check prompts, and return them as a table.

    Args:
        located: (place of the prompt, which begins each message; prompt).
        check, heldout: arguments of `read_prompts`.

    Raises:
        UsageError: a prompt or its negative prompt is not one of the model, or the prompt is held out.
    """
    heldout_inputs = frozenset(heldout)

    def check_each() -> Iterator[Prompt]:
        for where, prompt in located:
            try:
                check(prompt.text)
                if prompt.negative is not None:
                    check(prompt.negative)
            except ValueError as error:
                raise UsageError(f"{where}: {error}") from error
            if heldout_inputs & {prompt.text, prompt.model_input}:
                raise UsageError(f"{where}: {prompt.text!r} is held out for evaluation, never trained on")
            yield prompt

    return PromptTable(check_each())


def read_sources(
    words: Sequence[str],
    *,
    check: Callable[[str], None],
    heldout: Collection[object] = (),
    read: Callable[..., PromptTable] = read_prompts,
    field: str = "prompts",
) -> tuple[PromptTable, dict[str, float]]:
    """Return the training prompts of several files and prompt sets, and the weight of each by name.

    Args:
        words: files and prompt sets, see `parse_sources`.
        check, heldout: arguments of `read_prompts`.
        read: function that reads a file, `read_prompts` or `images.read_images`.
        field: name of the setting, for messages.
    """
    listed = parse_sources(words, field)
    prompts = [read(each.path, check=check, heldout=heldout, source=each.name) for each in listed]
    table = prompts[0] if len(prompts) == 1 else PromptTable(chain.from_iterable(prompts))
    return table, {each.name: each.weight for each in listed}


def read_heldout(
    words: Sequence[str],
    trained: Sequence[str],
    *,
    check: Callable[[str], None],
    field: str = "pipeline.heldout",
    media: Mapping[str, str] = MappingProxyType({}),
) -> PromptTable:
    """Return the prompts of held-out files, and of the held-out parts of prompt sets.

    If there are as many held-out files as training files, each one shares the name of its training file in metrics.

    Args:
        words: held-out files and prompt sets.
        trained: training files and prompt sets.
        check, media: arguments of `read_prompts`.
        field: name of the setting, for messages.
    """
    files = parse_sources(words, field=field)
    if weighted := [each.path for each in files if each.weight != 1]:
        raise UsageError(f"`{field}` gives {weighted[0]} a weight, which has no effect on evaluations: remove it")
    names = [each.name for each in (parse_sources(trained) if len(files) == len(trained) else files)]
    parts = (
        read_prompts(each.path, check=check, source=name, media=media, part="heldout")
        for each, name in zip(files, names, strict=True)
    )
    return PromptTable(chain.from_iterable(parts))


def hold_out(
    prompts: Sequence[Prompt],
    words: Sequence[str],
    *,
    check: Callable[[str], None],
    media: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return (training prompts, held-out prompts) when no held-out file is named.

    The held-out prompts are the held-out parts of prompt sets, and every tenth prompt of other sources, see `split_off`.

    Args:
        prompts: prompts of `words`.
        words: files and prompt sets, see `parse_sources`.
        check, media: arguments of `read_prompts`.
    """
    sets = [str(each.path) for each in parse_sources(words) if is_set(each.path)]
    if not sets:
        return split_off(prompts)
    heldout_of_sets = read_heldout(sets, (), check=check, media=media)
    inputs = {prompt.model_input for prompt in heldout_of_sets}
    kept = [(number, prompt.source in sets) for number, prompt in enumerate(prompts) if prompt.model_input not in inputs]
    others = select(prompts, [number for number, is_of_set in kept if not is_of_set])
    train, heldout = split_off(others) if others else ((), ())
    left = {prompt.model_input for prompt in heldout} - {prompt.model_input for prompt in train}
    numbers = [number for number, is_of_set in kept if is_of_set and prompts[number].model_input not in left]
    of_sets = select(prompts, numbers)
    return PromptTable(chain(of_sets, train)), PromptTable(chain(heldout_of_sets, heldout))


def split_off(prompts: Sequence[Prompt]) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return (training prompts, held-out prompts): every tenth prompt of each source is held out.

    If no training prompt would be left, all prompts are trained on.
    """
    counts: Counter[str] = Counter()
    heldout, inputs = array("i"), set[object]()
    for number, prompt in enumerate(prompts):
        if counts[prompt.source] % 10 == 0:
            heldout.append(number)
            inputs.add(prompt.model_input)
        counts[prompt.source] += 1
    train = array("i", (number for number, prompt in enumerate(prompts) if prompt.model_input not in inputs))
    return select(prompts, train or range(len(prompts))), select(prompts, heldout)


def assign_recorded_sizes(prompts: Sequence[Prompt], sizes: Sequence[Size]) -> PromptTable:
    """Return prompts with the sizes nearest to the columns `size`, or `width` and `height`, of their records.

    A prompt without these columns gets no size; the size of its samples is drawn.

    Raises:
        UsageError: a column is not a size, or none of `sizes` is near it; the message names the prompt.
    """

    def assign_each() -> Iterator[Prompt]:
        for prompt in prompts:
            columns = prompt.metadata
            try:
                if "size" in columns:
                    recorded = parse_size(str(columns["size"]))
                elif "width" in columns and "height" in columns:
                    recorded = parse_size(f"{columns['width']}x{columns['height']}")
                else:
                    yield prompt
                    continue
                yield replace(prompt, size=find_nearest_size(recorded, sizes))
            except ValueError as error:
                raise UsageError(f"prompt {prompt.text[:40]!r}: {error}") from error

    return PromptTable(assign_each())


def list_source_weights(prompts: Sequence[Prompt], weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weight of each source of the prompts, in the order of their first prompts; by default 1."""
    return {source: weights.get(source, 1.0) for source in dict.fromkeys(prompt.source for prompt in list_examples(prompts))}


def _locate(path: Path, source: str, media: Mapping[str, str], part: Part) -> Iterator[tuple[str, Prompt]]:
    """Yield each prompt of a file or a prompt set, after its place."""
    if is_set(path):
        for record in prompt_sets.read_set(str(path), part):
            yield record.where, parse_prompt(record, folder=Path(), source=source, media=media)
        return
    if is_text(path) and not path.is_dir():
        for where, line in read_lines(path, f"prompts file {path}"):
            yield where, Prompt(line, source=source)
        return
    folder = path if os.path.isdir(path) else path.parent
    for record in read_rows(path, "prompts file"):
        yield record.where, parse_prompt(record, folder=folder, source=source, media=media)
