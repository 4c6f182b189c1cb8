"""The READMEs as their users take them: shell commands, fenced blocks, and a `mine.py` of the code that they show."""

import doctest
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = "bench", "core", "engines", "kernels", "models", "tests"
PAGES = sorted(str(path.relative_to(ROOT)) for name in ("engines", "models") for path in (ROOT / name).rglob("README.md"))
READMES = ["README.md", *(f"{name}/README.md" for name in ("bench", "core", "kernels", "tests", "tests/properties"))]
READMES += [*PAGES, "bench/NOTEBOOK.md"]
# Examples that make up `mine.py`: page, and how the source of each begins.
MINE = (
    ("engines/scoring/README.md", ("def score(",)),
    ("engines/sampling/README.md", ("from fluvial.core.transitions import", "def walk(")),
    ("engines/methods/README.md", ("from ", "@dataclass(frozen=True)\nclass RewardWeighted", "def recipe(")),
    ("models/README.md", ("from fluvial.core.guidance import", "from fluvial.models import Schedule", "class Dots")),
)


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(name: str) -> list[list[str]]:
    """Return the command lines of fluvial and of its benchmarks in a README's shell blocks, as words without comments."""
    text = "\n".join(blocks(name, "sh")).replace("\\\n", " ")
    lines = [part for line in text.splitlines() for part in re.split(r"\s&&\s", line)]
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words and is_fluvials(words)]


def is_fluvials(words: Sequence[str]) -> bool:
    return words[0] == "fluvial" or any(word in words for word in ("fluvial.engines", "fluvial.bench"))


@cache
def mine() -> str:
    """Return the source of `mine.py`, with the reward, sampler, objective, recipe and model that the pages show."""
    parts = ["import torch\n"]
    for page, starts in MINE:
        examples = doctest.DocTestParser().get_examples((ROOT / page).read_text())
        parts += [example.source for example in examples if example.source.startswith(starts)]
    return "\n".join(parts)


@cache
def suite() -> str:
    """Return the evaluation suite that the page of evaluations shows, a file `mine.toml`."""
    return "\n".join(blocks("engines/run/evaluation/README.md", "toml"))
