"""Suites: evaluations by name, each a prompt set, evaluators and how samples are drawn; a suite of one's own is one file."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from fluvial.core.checks import type_of
from fluvial.engines import plugins
from fluvial.engines.data.prompt_sets import is_set
from fluvial.engines.data.tables import read_text
from fluvial.engines.errors import UsageError, convert_errors
from fluvial.engines.run.evaluation.config import SuiteConfig

# GenEval has four samples per prompt (arXiv 2310.11513), and flow_grpo's evaluations of SD3.5 have 40 steps. Guidance and
# size are those of the run or of the model.
SUITES = {
    "geneval": SuiteConfig(("@geneval",), ("flow_grpo:url=http://127.0.0.1:18085,form=geneval",), seeds=4, steps=40),
    "ocr": SuiteConfig(("@ocr",), ("ocr",), seeds=1, steps=40),
    "compression": SuiteConfig(("@animals",), ("jpeg",), seeds=2, steps=40),
    "preference": SuiteConfig(("@drawbench-like",), ("pickscore", "hpsv2", "imagereward", "clipscore"), seeds=2, steps=40),
}
FORMATS = {".toml": tomllib.loads, ".json": json.loads}


def find(name: str) -> SuiteConfig:
    """Return the suite of a name: built in, an entry point of `fluvial.suites`, `module:name`, or a .toml or .json file.

    A file has the fields of `SuiteConfig`: `prompts` and `rewards`, and any others. Its prompts are files beside it and
    prompt sets, or a table `[[prompts]]` (an object in JSON) per prompt with a column `prompt` and any others.

    Raises:
        UsageError: there is no such suite, or it is not one; in one line.
    """
    if Path(name).suffix in FORMATS:
        return _from_file(Path(name))

    def check(found: Any) -> str | None:
        return None if isinstance(found, SuiteConfig) else f"is {type_of(found)}, expected a SuiteConfig or a .toml file"

    found: SuiteConfig = plugins.load(name, "suites", check, table=SUITES)
    return _whole(found, f"`suite` {name!r}")


def _from_file(path: Path) -> SuiteConfig:
    """Return the suite in a file."""
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
        record["prompts"] = [_beside(path, word) for word in prompts]
    for name in ("prompts", "rewards"):
        words = record.get(name, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UsageError(f"{label}: {name} is {words!r}, expected a list of text")
        record[name] = tuple(words)
    with convert_errors(UsageError, TypeError, ValueError, says=f"{label}"):
        return _whole(SuiteConfig(**record), label)


def _whole(suite: SuiteConfig, label: str) -> SuiteConfig:
    """Return a suite that says what is evaluated, and by what."""
    for name in ("prompts", "rewards"):
        if not getattr(suite, name):
            raise UsageError(f"{label} has no {name}, expected at least one")
    return suite


def _beside(path: Path, word: Any) -> Any:
    """Return the path of a file that a suite names, which starts from the suite's folder."""
    return str(path.parent / word) if isinstance(word, str) and not is_set(word) else word
