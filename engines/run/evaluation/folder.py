"""The folder of an evaluation (images, scores, table and contact sheet), and suites: evaluations by name.

images/NAME.{png,wav}  base/NAME.{png,wav}  scores.csv  table.csv  table.json  sheet.png
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fluvial.core.checks import type_of
from fluvial.engines import plugins
from fluvial.engines.data.prompt_sets import is_set
from fluvial.engines.data.records import texts
from fluvial.engines.data.tables import read_text
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.run.evaluation.config import SuiteConfig
from fluvial.engines.run.evaluation.evaluate import Evaluation
from fluvial.engines.run.evaluation.table import ScoreRow, as_records, write_rows, write_scores
from fluvial.engines.run.log.images import draw_sheet
from fluvial.engines.run.log.sounds import write_wave
from fluvial.models.images import to_image

TABLE, IMAGES, BASE = "table.json", "images", "base"
COLUMNS, FRAMES_PER_SECOND = 4, 16


class EvaluationFolder:
    """Writer of an evaluation's files; every rank writes its own images, the main rank the rest.

    Args:
        out: folder without an evaluation.

    Raises:
        UsageError: the folder holds an evaluation, or cannot be made.
    """

    def __init__(self, out: Path, world: World) -> None:
        self.out, self.world = out, world
        with world.agreed():
            if (out / TABLE).exists():
                raise UsageError(f"`out` is {out}, which already holds an evaluation: set it to another folder")
            with convert_errors(UsageError, OSError, says=f"`out` is {out}, which cannot be made"):
                (out / IMAGES).mkdir(parents=True, exist_ok=True)

    def keep(self, folder: str) -> Callable[[Sequence[str], Tensor], None]:
        """Return a function that writes images to a subfolder, for the argument `keep` of `evaluate`."""
        (self.out / folder).mkdir(exist_ok=True)

        def write(names: Sequence[str], images: Tensor) -> None:
            for name, image in zip(names, images, strict=True):
                write_image(self.out / folder / name, image)

        return write

    def finish(
        self,
        rows: Sequence[ScoreRow],
        ours: Evaluation,
        base: Evaluation | None,
        *,
        title: str,
        settings: Mapping[str, Any],
    ) -> None:
        """Write scores, table and sheet.

        Args:
            ours: evaluation of the model.
            base: evaluation of the base model; None without a comparison.
            settings: settings of the evaluation, as values of JSON.
        """
        if not self.world.is_main:
            return
        write_scores(self.out / "scores.csv", ours.scores, None if base is None else base.scores)
        write_rows(self.out / "table.csv", rows)
        for folder, part in ((IMAGES, ours), (BASE, base)):
            if part is not None and part.sounds is not None:
                for name, wave in zip(part.scores.names, part.sounds.waves, strict=False):
                    write_wave(self.out / folder / f"{name}.wav", wave, part.sounds.rate)
        draw_contact_sheet(ours, base, title=title).save(self.out / "sheet.png")
        record = {"model": title, "settings": settings, "rows": as_records(rows)}
        # Written last: its presence means that the evaluation is complete.
        (self.out / TABLE).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_image(path: Path, image: Tensor) -> None:
    """Write an image `[C, H, W]` in [0, 1] as PNG, a video `[C, F, H, W]` as an animated lossless WebP.

    Args:
        path: path without the ending.
    """
    if image.ndim == 3:
        to_image(image, width=1, colour=False).save(f"{path}.png")
        return
    first, *rest = (to_image(frame, width=1) for frame in image.unbind(1))
    first.save(f"{path}.webp", save_all=True, append_images=rest, duration=1000 // FRAMES_PER_SECOND, lossless=True)


def draw_contact_sheet(ours: Evaluation, base: Evaluation | None, *, title: str) -> Image.Image:
    """Return a sheet of the first images with prompt and score, each below the base's image from the same noise."""
    if base is None:
        return draw_sheet(ours.images, _format_captions(ours), ours.images_score, title=title, columns=COLUMNS)
    columns = min(COLUMNS, len(ours.images))
    count = len(ours.images) // columns * columns  # full rows only: rows of the two alternate
    rows = [(part, slice(first, first + columns)) for first in range(0, count, columns) for part in (base, ours)]
    images = torch.cat([part.images[span] for part, span in rows])
    captions = [caption for part, span in rows for caption in _format_captions(part)[span]]
    scores = [part.images_score[span] for part, span in rows if part.images_score is not None]
    theirs = None if base.images_score is None else torch.cat([base.images_score[span] for _, span in rows]).tolist()
    return draw_sheet(
        images,
        captions,
        torch.cat(scores) if scores else None,
        base=theirs,
        title=f"above: base, below: {title}",
        columns=columns,
    )


def _format_captions(evaluation: Evaluation) -> list[str]:
    """Shorten prompts to fit above their images."""
    most = max(max(evaluation.images.shape[-1], 256) // 10 - 7, 8)
    return [prompt if len(prompt) <= most else prompt[: most - 3] + "..." for prompt in texts(evaluation.prompts)]


# GenEval has four samples per prompt (arXiv 2310.11513), and flow_grpo's evaluations of SD3.5 have 40 steps. Guidance and
# size are those of the run or of the model.
SUITES = {
    "geneval": SuiteConfig(("@geneval",), ("flow_grpo:url=http://127.0.0.1:18085,form=geneval",), seeds=4, steps=40),
    "ocr": SuiteConfig(("@ocr",), ("ocr",), seeds=1, steps=40),
    "compression": SuiteConfig(("@animals",), ("jpeg",), seeds=2, steps=40),
    "preference": SuiteConfig(("@drawbench-like",), ("pickscore", "hpsv2", "imagereward", "clipscore"), seeds=2, steps=40),
}
FORMATS = {".toml": tomllib.loads, ".json": json.loads}


def find_suite(name: str) -> SuiteConfig:
    """Return a suite by name: built in, an entry point of `fluvial.suites`, `module:name`, or a .toml or .json file.

    A file has the fields of `SuiteConfig`; `prompts` and `rewards` are required. Its prompts are prompt sets and paths
    relative to its folder, or a table `[[prompts]]` (an object in JSON) per prompt with a column `prompt` and any others.

    Raises:
        UsageError: there is no such suite, or it is not one; in one line.
    """
    if Path(name).suffix in FORMATS:
        return _read_suite(Path(name))

    def check(value: Any) -> str | None:
        return None if isinstance(value, SuiteConfig) else f"is {type_of(value)}, expected a SuiteConfig or a .toml file"

    suite: SuiteConfig = plugins.load(name, "suites", check, table=SUITES)
    return _check_complete(suite, f"`suite` {name!r}")


def _read_suite(path: Path) -> SuiteConfig:
    """Read a suite from a file."""
    label = f"suite {path}"
    with convert_errors(UsageError, ValueError, says=f"{label} is not {path.suffix[1:].upper()}"):
        record = FORMATS[path.suffix](read_text(path, label))
    if not isinstance(record, dict):
        raise UsageError(f"{label} holds {type_of(record)}, expected an object of fields")
    known = [each.name for each in fields(SuiteConfig)]
    if unknown := [name for name in record if name not in known]:
        raise UsageError(f"{label} has the unknown field {unknown[0]!r}, expected {', '.join(known)}")
    prompts = record.get("prompts", [])
    if isinstance(prompts, list) and prompts and all(isinstance(prompt, dict) for prompt in prompts):
        record["prompts"] = [str(path)]  # read as a file of records
    elif isinstance(prompts, list):
        record["prompts"] = [_resolve_path(path, word) for word in prompts]
    for name in ("prompts", "rewards"):
        words = record.get(name, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UsageError(f"{label}: {name} is {words!r}, expected a list of text")
        record[name] = tuple(words)
    with convert_errors(UsageError, TypeError, ValueError, says=f"{label}"):
        return _check_complete(SuiteConfig(**record), label)


def _check_complete(suite: SuiteConfig, label: str) -> SuiteConfig:
    """Return the suite; UsageError if it has no prompts or no rewards."""
    for name in ("prompts", "rewards"):
        if not getattr(suite, name):
            raise UsageError(f"{label} has no {name}, expected at least one")
    return suite


def _resolve_path(path: Path, word: Any) -> Any:
    """Resolve a path in a suite relative to the suite's folder; names of prompt sets are unchanged."""
    return str(path.parent / word) if isinstance(word, str) and not is_set(word) else word
