"""The vocabulary of the project: words of its own making do not come back into the code, the texts and the tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "models", "engines", "bench", "tests", "docs", ".ci")
KINDS = {".py", ".md", ".toml", ".yaml", ".yml"}
OTHERS = {"Makefile", "run"}
UNITS = "nats|numbers?|values?|bytes|bits|tensors?|keys?|rows?|floats?|seconds?|forwards|passes|images?|items?|steps?"
OWNERS = "sample|step|rank|dimension|rollout|update|pixel|prompt|group|micro-batch|process|GPU|block|file|row|token|element"
# Pattern of what is wrong, and what to write.
BANNED = {
    r"\bpictures?\b": "image",
    r"\bfilms?\b": "video",
    r"\banew\b": "again, new",
    r"(?<!LLM )(?<!VLM )(?<!LLM-)(?<!VLM-)(?<!as-a-)\bjudges?\b": "evaluator",
    r"\breaders?\b": "recogniser; for a person, user",
    r"\bis refused in words\b": "raises",
    r"\b(?:is|are) given back\b": "is returned",
    # "nats a dimension", "two forward passes a step": a plural or a number before, so that "gives a step a name" is none.
    rf"\b(?:{UNITS}) an? (?:{OWNERS})\b(?! (?:of|that|which|has|is|in|with)\b)": "per ...",
    # The same in a name with underscores, where \b matches nothing: "test_a_number_a_sample".
    rf"_(?:{UNITS})_an?_(?:{OWNERS})(?=_|\b)": "per ...",
    r"\ba person's own\b": "user-defined, custom; your own",
    r"\bthe weights of now\b": "the current weights",
    r"\bleave (?:it|them|these) as (?:it is|they are)\b": "X has no effect with Y; remove it",
    r"(?-i:(?<!there )(?<!old )(?<!old` )\b(?:is|are) none\b)(?! of)": "is not one; lacks",
    r"\bin the words of the wire\b": "builds requests",
    r"\bhas no answer\b": "is undefined",
    r"\bhave not what\b": "lack",
    r"\bwhat it is to the (?:run|loss)\b": "role in the run",
    r"\bmodels? of epsilon\b": "epsilon-prediction model",
    r"\bgoes? on from\b": "continue from",
    r"\btake[ns]? .{0,12}weights out\b": "export weights",
    r"\bleave undone\b": "drop",
    r"\bgive up too\b": "tell the other ranks that this one failed",
    r"\bthe sureness\b": "confidence",
    r"\basks the network for nothing\b": "loads nothing from the network",
    r"\bsomething else has made\b": "externally generated",
    r"\bData on its way\b": "input data",
    # "once an update, one a sample"; no count of something else that begins so.
    rf"\b(?:once|twice|one|(?:a|one|two) keys?|passes) an? (?:{OWNERS}|evaluation)\b": "per ...",
}
# Lines that say something else: {file: what the line holds}.
ALLOWED: dict[str, tuple[str, ...]] = {
    # Python's csv.reader.
    "engines/data/tables.py": ("csv.reader",),
    # torch.distributed.checkpoint has storage readers.
    "engines/run/checkpoint/checkpoint.py": ("reader",),
    "engines/engine/loading.py": ("reader",),
}


# First words of a docstring that is no verb sentence. Fixtures and properties are things, and may be named as such.
NOUNS = re.compile(r"(?:A|An|The|This|Two|Both|Every|Each|Whether|What|How|Where|Which|Another|All)\b")


def files() -> list[Path]:
    """Return the texts of the project, except this one."""
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    texts = [path for path in paths if path.is_file() and (path.suffix in KINDS or path.name in OTHERS)]
    return sorted(path for path in texts if path != Path(__file__))


def offences() -> Iterator[str]:
    """Yield the lines with a banned word: where, the line, and what to write."""
    for path in files():
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(part in line for part in ALLOWED.get(name, ())):
                continue
            for pattern, better in BANNED.items():
                if found := re.search(pattern, line, re.IGNORECASE):
                    yield f"{name}:{number}: {found[0]!r}, write {better!r}: {line.strip()}"


def nouns() -> Iterator[str]:
    """Yield the functions whose docstring begins with a noun, or with a question: where, and the docstring's first line."""
    for path in files():
        functions = ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ()
        for node in functions:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("test_") or returns_nothing(node):
                continue
            words = ast.get_docstring(node) or ""
            named = {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}
            if NOUNS.match(words) and not named & {"fixture", "property", "cached_property"}:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {words.splitlines()[0]}"


def openings() -> Iterator[str]:
    """Yield the docstrings that begin with "Let", and the modules whose docstring begins with "What"."""
    for path in files():
        tree = ast.parse(path.read_text()) if path.suffix == ".py" else None
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = ast.get_docstring(node) or ""
                if words.startswith("Let ") or (isinstance(node, ast.Module) and words.startswith("What ")):
                    line = getattr(node, "lineno", 1)
                    yield f"{path.relative_to(ROOT)}:{line}: {words.splitlines()[0]}"


def returns_nothing(node: ast.FunctionDef) -> bool:
    """Return whether a function is one that only acts, whose docstring may say what it stands for."""
    return node.returns is None or ast.unparse(node.returns) == "None"


def test_a_docstring_begins_with_a_verb() -> None:
    """Of functions that return something; a test's docstring says more of what its name claims."""
    found = [*nouns()]
    assert not found, "\n".join(found)


def test_a_docstring_names_the_thing() -> None:
    """It does not begin with "Let", nor that of a module with "What"."""
    found = [*openings()]
    assert not found, "\n".join(found)


def test_no_banned_word_is_in_use() -> None:
    """Each offence is one line: where, what, and what to write."""
    found = [*offences()]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "one picture", "Pictures", "films", "drawn anew", "the judges agree", "a reader of digits",
        "in nats a dimension", "a key a sample, two forwards a step", "five numbers a sample", "is refused in words",
        "the value is given back", "once an update", "a key a sample is taken", "one an evaluation",
        "def test_a_number_a_sample_that_depends", "a person's own model", "the weights of now", "leave it as it is",
    ],
)  # fmt: skip
def test_the_patterns_find_what_they_are_for(text: str) -> None:
    """Each banned word, however it is spelled."""
    assert any(re.search(pattern, text, re.IGNORECASE) for pattern in BANNED)


@pytest.mark.parametrize(
    "text", ["an LLM judge", "gives a step of two values", "nats per dimension", "a sample a user sees", "judgement"]
)
def test_the_patterns_leave_plain_english_alone(text: str) -> None:
    """Words that only contain a banned one, and articles that are no "per"."""
    assert not any(re.search(pattern, text, re.IGNORECASE) for pattern in BANNED)


if __name__ == "__main__":  # the offenders, one per line
    print(*offences(), *openings(), sep="\n")
