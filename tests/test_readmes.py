"""Examples of the READMEs hold: their Python runs, their commands parse, their links lead to files."""

import doctest
import json
import re
import shlex
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import pages
from helpers.marks import long
from helpers.pages import FOLDERS, PAGES, READMES, ROOT, blocks, commands

from fluvial.engines.cli import main as cli

# Folders whose page tells how to use them.
EXTENSIONS = ("plan", "published", "remote", "report", "servers", "verl")
TOPICS = (
    *("data", "scoring", "sampling", "methods", "engine", "export", "cli"),
    *("run", "run/evaluation", "run/checkpoint", "run/process"),
    *(f"extensions/{name}" for name in EXTENSIONS),
)
# Most lines of a page, and most words of a paragraph, of the pages that people open first.
MOST_LINES = {"README.md": 150, "engines/README.md": 120, "bench/README.md": 150}
WORDS_OF_PAGES = {"models/README.md": 3000, "tests/README.md": 1200}
MOST_WORDS = 80
SHORT = ["README.md", *PAGES, "bench/README.md", "core/README.md", "kernels/README.md"]


def inline(name: str, start: str) -> list[str]:
    """Return the pieces of code within a README's sentences that begin with a word, without those that leave a gap."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = [" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", text)]
    return [piece for piece in found if piece.startswith(start) and not re.search(r"\b[A-Z]{2,}\b|\.\.\.|[<>]", piece)]


@cache
def every_flag() -> set[str]:
    """Return the flags of all commands and benchmarks."""
    from fluvial.bench import aot, kernels, phases, serving, traffic, waits
    from fluvial.bench.peers.config import PeersConfig
    from fluvial.bench.studies.objectives import ObjectivesConfig
    from fluvial.bench.update.cases import UpdateConfig
    from fluvial.engines.cli import eval as evaluation
    from fluvial.engines.cli import export, preferences, sample, serve, serve_rewards
    from fluvial.engines.cli.parse import expand_flags, list_fields
    from fluvial.engines.extensions.dryrun.run import DryRunConfig
    from fluvial.engines.extensions.plan.plan import PlanConfig
    from fluvial.engines.extensions.plan.simulate import AheadConfig
    from fluvial.engines.run import recipes

    configs: list[Any] = [recipe() for recipe in recipes.RECIPES.values()]
    configs += [
        DryRunConfig(),
        preferences.PreferencesConfig(Path("x")),
        PlanConfig(),
        AheadConfig(),
    ]
    configs += [export.ExportOptions(), evaluation.EvalConfig(), sample.SampleConfig()]
    configs += [serve_rewards.ServeRewardsConfig(), serve.ServeConfig(), serve_rewards.VoteConfig()]
    configs += [aot.AotConfig(), kernels.KernelsConfig(), ObjectivesConfig(), phases.PhasesConfig()]
    configs += [
        serving.ServingConfig(),
        traffic.TrafficConfig(),
        UpdateConfig(),
        PeersConfig(Path("x")),
        waits.WaitsConfig(),
    ]
    known = list(map(list_fields, configs))
    flags = {"--" + name.replace("_", "-") for names in known for name in names}
    short = {"--" + flag.rpartition(".")[2] for flag in flags if "." in flag}
    return (
        flags
        | {flag for flag in short if any(expand_flags([flag], names) != [flag] for names in known)}
        | {
            *("--help", "--help-all", "--version", "--processes", "--preset", "--reward", "--as", "--rollout.ahead"),
            "--temperature",  # of the objective that a page shows
        }
    )


COMMANDS = [(name, shlex.join(words)) for name in READMES for words in commands(name)] + [
    (name, line) for name in READMES for line in inline(name, "fluvial ") if len(line.split()) > 2
]
# Flags of other tools.
OTHERS = (
    "--all",
    "--nproc-per-node",
    "--max-restarts",
    "--shutdown-timeout",
    "--no-deps",
    "--again",
    "--hypothesis-profile",
    "--import-mode",
    "--device",
    "--only",
    "--upload",
    "--public",
)


def test_every_folder_has_a_readme() -> None:
    missing = [folder for folder in FOLDERS if not (ROOT / folder / "README.md").exists()]
    assert not missing


def test_every_topic_has_a_page() -> None:
    assert [topic for topic in TOPICS if f"engines/{topic}/README.md" not in PAGES] == []


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_page_that_is_opened_first_is_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


def test_long_pages_stay_short() -> None:
    """In words, those of tables aside; the changelog in lines, because nothing is released."""
    words = {
        name: len(re.sub(r"^\|.*$", "", (ROOT / name).read_text(), flags=re.MULTILINE).split()) for name in WORDS_OF_PAGES
    }
    assert {name: number for name, number in words.items() if number > WORDS_OF_PAGES[name]} == {}
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60


def test_code_of_the_shop_window_fits_a_screen() -> None:
    """No line of the README's blocks is cut off, or scrolls, where the page is narrow."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for block in fenced for line in block.splitlines() if len(line) >= 100] == []


@pytest.mark.parametrize("language", ["bash", "diff", "python", "sh", "toml", "yaml"])
def test_code_of_all_pages_fits_a_screen(language: str) -> None:
    """Commands, Python and what it prints; data of a request may be longer, which no line can be broken in."""
    lines = [line for name in READMES for block in blocks(name, language) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 100 + (language == "diff") and not line.lstrip().startswith("-d ")] == []


def test_the_files_to_read_are_short() -> None:
    """A stranger has read them in an evening, and each method in one sitting."""
    table = (ROOT / "engines" / "README.md").read_text().partition("## Eight files to read")[2].partition("## Tasks")[0]
    files = [(ROOT / "engines" / target).resolve() for target in re.findall(r"\]\(([^)]+\.py)\)", table)]
    assert len(files) == 8
    assert sum(len(file.read_text().splitlines()) for file in files) < 2500
    shared = {"__init__.py", "losses.py", "table.py"}
    methods = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "engines" / "methods").glob("*.py")}
    assert {name: lines for name, lines in methods.items() if lines > 120 and name not in shared} == {}


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs and items of lists of a page, without code, tables and headings."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^(?:\||#|    ).*$", "", prose, flags=re.MULTILINE)
    return re.split(r"\n\s*\n|\n(?=(?:-|\d+\.) )", prose)


@pytest.mark.parametrize("name", SHORT)
def test_a_paragraph_is_short(name: str) -> None:
    """At most 80 words; a link counts as its text."""
    texts = [re.sub(r"\]\([^)]*\)", "]", text) for text in paragraphs((ROOT / name).read_text())]
    assert [text for text in texts if len(text.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("name", [page for page in PAGES if page != "engines/README.md"])
def test_a_page_lists_its_sections(name: str) -> None:
    """A table of contents before the first section links to each of them."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL | re.MULTILINE)
    top, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert [title for title in titles if f"](#{anchor(title)})" not in top] == []


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading: lower case, without punctuation, spaces as hyphens."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {anchor(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}


LONGER = ("engines/extensions/remote/README.md", "engines/export/README.md")  # whose Python takes over a second


@pytest.mark.slow
@pytest.mark.parametrize("name", [long(name) if name in LONGER else name for name in READMES])
def test_the_python_of_a_readme_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a doctest, in a folder of its own; examples without a prompt would not be run, so there are none."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(name, "python"):
        assert ">>>" in block, f"{name} shows Python without a prompt:\n{block}"
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_ONLY_FIRST_FAILURE
    results = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=options)
    assert results.failed == 0
    assert results.attempted >= len(blocks(name, "python"))


@pytest.fixture
def stubbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what takes long by a note that it was reached; a person's module `mine` is there."""
    from fluvial.bench import __main__ as bench
    from fluvial.bench import aot, kernels, phases, serving, traffic, waits
    from fluvial.bench.studies import objectives
    from fluvial.bench.trial import pipelines as trial
    from fluvial.engines import run as training
    from fluvial.engines.cli import eval as evaluation
    from fluvial.engines.cli import preferences, processes, push, sample, serve, serve_rewards
    from fluvial.engines.extensions.dryrun import run as dry_runs
    from fluvial.engines.extensions.plan import check, fit, plan, simulate
    from fluvial.engines.run import exports

    reached: list[str] = []

    def noted(name: str, answer: Any = None) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            reached.append(name)
            return answer

        return call

    replaced: list[tuple[Any, str, Any]] = [
        (training, "train", {}),
        (evaluation, "score", None),
        (preferences, "write", (3, 3)),
        (serve_rewards, "serve_rewards", None),
        (serve, "serve_model", None),
        (serve_rewards, "serve_votes", None),
        (sample, "sample", "x.png"),
        (plan, "show", None),
        (fit, "show_fit", None),
        (dry_runs, "run", None),
        (plan, "show_table", None),
        (check, "check", None),
        (simulate, "show", None),
        (exports, "export_run", ("x", False)),
        (push, "find_weights", Path()),
        (trial, "measure", trial.PipelineTrial("", reason="it is not tried")),
        *((module, "run", None) for module in (aot, kernels, objectives, phases, serving, traffic, waits)),
        (bench, "update", None),
    ]
    for module, name, answer in replaced:
        monkeypatch.setattr(module, name, noted(f"{module.__name__}.{name}", answer))
    monkeypatch.setattr(processes, "run", lambda args, count: cli.run(args))  # what each rank runs
    monkeypatch.setitem(sys.modules, "mine", mine := types.ModuleType("mine"))
    exec(pages.mine(), mine.__dict__)
    (tmp_path / "mine.toml").write_text(pages.suite())
    (tmp_path / "my.yaml").write_text("\n".join(blocks("engines/cli/README.md", "yaml")))
    monkeypatch.chdir(tmp_path)
    return reached


@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=[f"{name}: {line}" for name, line in COMMANDS])
def test_a_command_of_a_readme_parses(name: str, line: str, stubbed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """It reaches its work, which is stubbed, or prints its help."""
    words = shlex.split(line)
    start = next(i for i, word in enumerate(words) if word in ("fluvial", "fluvial.engines", "fluvial.bench"))
    arguments = words[start + 1 :]
    if "--resume" in arguments:
        record_a_run(arguments)
    if words[start] == "fluvial.bench":
        from fluvial.bench.__main__ import main

        code = cli.run(arguments, main)
    else:
        code = cli.run(arguments)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    # runs, config, rewards and models print at once.
    assert stubbed or arguments[0] in ("runs", "config", "rewards", "models") or shown.out.startswith("usage:")


def record_a_run(arguments: Sequence[str]) -> None:
    """Write the record of the run that a command resumes."""
    from fluvial.engines.run import recipes
    from fluvial.engines.run.record import as_record

    out = Path(arguments[arguments.index("--out") + 1])
    out.mkdir(parents=True)
    record = as_record(replace(recipes.RECIPES[arguments[1]](), out=out))
    (out / "config.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", READMES)
def test_the_flags_within_the_sentences_of_a_readme_exist(name: str) -> None:
    used = {word.partition("=")[0] for piece in inline(name, "--") for word in piece.split() if word.startswith("--")}
    assert not used - every_flag() - set(OTHERS)


@pytest.mark.parametrize("name", READMES)
def test_the_links_of_a_readme_lead_somewhere(name: str) -> None:
    """To files of the tree; the part behind # is the anchor of a heading there."""
    here, missing = ROOT / name, []
    for file, part in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", here.read_text()):
        target = here.parent / file if file else here
        if "://" not in file and not (target.exists() and (not part or part in anchors(target))):
            missing.append(f"{file}#{part}")
    assert not missing


def test_a_wrong_flag_in_a_readme_would_be_found(stubbed: list[str]) -> None:
    """The commands are parsed, not merely read."""
    assert cli.run(["train", "grpo", "--sampling.sampler.etaa", "1"]) == 2
    assert cli.run(["train", "grpo", "--sampling.sampler.eta", "1"]) == 0
    assert stubbed == ["fluvial.engines.run.train"]
