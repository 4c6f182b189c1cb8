"""Prompts from files: what is read, what is refused in one line, what is held out, and several files at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluvial.engines.data.images import read_images
from fluvial.engines.data.preferences import read_preference_records
from fluvial.engines.data.prompts import is_prompt_file, parse_sources, read_heldout, read_prompts, read_sources, split_off
from fluvial.engines.data.records import Prompt, as_prompts, copy_metadata, list_negatives, read_files, texts
from fluvial.engines.errors import UsageError

RECORDS: list[dict[str, Any]] = [
    {"prompt": "a red fox", "tag": "colour", "count": 1, "negative_prompt": "blurry"},
    {"prompt": "two cats", "weight": 2.5, "count": 2, "boxes": [[0, 1], [2, 3]]},
]
# A line of flow_grpo's dataset/geneval/train_metadata.jsonl.
GENEVAL = {
    "tag": "counting",
    "include": [{"class": "bench", "count": 4}],
    "exclude": [{"class": "bench", "count": 5}],
    "t2i_prompt": "four benches",
    "prompt": "four benches",
}


def words(prompt: str) -> None:
    """A model whose prompts have at most three words."""
    if len(prompt.split()) > 3:
        raise ValueError(f"prompt {prompt!r} has more than 3 words")


def anything(prompt: str) -> None:
    """A model that takes every prompt."""


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def csv(path: Path, records: list[dict[str, Any]]) -> Path:
    header = list(dict.fromkeys(name for record in records for name in record))
    lines = [",".join(header)]
    lines += [",".join('"' + str(record.get(name, "")) + '"' for name in header) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet as files

    files.write_table(arrow.Table.from_pylist(_whole(records)), path)
    return path


def saved_to_disk(path: Path, records: list[dict[str, Any]]) -> Path:
    """Return a folder as `datasets.Dataset.save_to_disk` writes it, in two files."""
    import pyarrow as arrow
    from pyarrow import ipc

    path.mkdir()
    names = []
    for number, part in enumerate([_whole(records)[:1], _whole(records)[1:]]):
        table = arrow.Table.from_pylist(part, schema=arrow.Table.from_pylist(_whole(records)).schema)
        names.append(f"data-{number:05d}-of-00002.arrow")
        with ipc.new_stream(str(path / names[-1]), table.schema) as stream:
            stream.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return path


def _whole(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that all have all columns, as a table does."""
    columns = dict.fromkeys(name for record in records for name in record)
    return [{name: record.get(name) for name in columns} for record in records]


def test_one_prompt_per_line(tmp_path: Path) -> None:
    """Blank lines and spaces around a prompt are dropped; the rest is kept to the letter, in its order."""
    path = tmp_path / "prompts.txt"
    path.write_text("  a red fox \n\n\tzwei Kühe\na red fox\n", encoding="utf-8")
    assert texts(read_prompts(path, check=words)) == ["a red fox", "zwei Kühe", "a red fox"]


def test_a_word_with_the_ending_of_a_prompt_file_names_one(tmp_path: Path) -> None:
    """Text does not; a missing file is not taken as the text of a prompt."""
    (path := tmp_path / "prompts.txt").write_text("a red fox")
    assert is_prompt_file(str(path))
    assert not any(map(is_prompt_file, ("a red fox", "a red fox.", "v1.5", "a/b", str(tmp_path))))
    (tmp_path / "notes.md").write_text("a red fox")
    with pytest.raises(UsageError, match=r"notes.md is a file, expected a text, or a file that ends in .txt"):
        is_prompt_file(str(tmp_path / "notes.md"))
    for missing in ("typo.jsonl", "a/typo.parquet", "TYPO.TXT", str(path.with_suffix(".csv"))):
        with pytest.raises(UsageError, match=f"^no such file: {missing}$"):
            is_prompt_file(missing)


ENDINGS: dict[Callable[[Path, Any], Path], str] = {jsonl: ".jsonl", csv: ".csv", parquet: ".parquet", saved_to_disk: ""}


@pytest.mark.parametrize("write", [jsonl, parquet, saved_to_disk])
def test_records_keep_their_columns(tmp_path: Path, write: Callable[[Path, Any], Path]) -> None:
    """The prompt is the text of its column; what the run does not use itself is metadata; empty columns are absent."""
    fox, cats = read_prompts(write(tmp_path / f"mine{ENDINGS[write]}", RECORDS), check=words)
    assert isinstance(fox, Prompt)
    assert (fox.text, fox.tag, fox.negative, fox.weight, fox.source) == ("a red fox", "colour", "blurry", 1.0, "mine")
    assert (cats.text, cats.tag, cats.negative, cats.weight) == ("two cats", None, None, 2.5)
    known = [{"tag": "colour", "count": 1}, {"count": 2, "boxes": [[0, 1], [2, 3]]}, {}]
    assert copy_metadata([fox, cats, Prompt("text")]) == known
    assert list_negatives([fox, cats, Prompt("text")], "otherwise") == ["blurry", "otherwise", "otherwise"]


@pytest.mark.parametrize("write", ENDINGS)
def test_a_null_is_an_absent_column(tmp_path: Path, write: Callable[[Path, Any], Path]) -> None:
    """In every kind of file, of an image and of any other column; of datasets' images, too."""
    empty, path = "" if write is csv else None, tmp_path / f"mine{ENDINGS[write]}"
    beside = path if write is saved_to_disk else tmp_path
    write(path, [{"prompt": "a fox", "image": "fox.png", "tag": "x"}, {"prompt": "a cat", "image": empty, "tag": empty}])
    (beside / "fox.png").write_bytes(b"png")
    fox, cat = read_prompts(path, check=words)
    assert (fox.image, fox.tag) == (beside / "fox.png", "x")
    assert (cat.image, cat.tag, cat.metadata) == (None, None, {})


def test_a_table_of_text(tmp_path: Path) -> None:
    """CSV has only text, apart from the weight; quoted cells may hold commas and line ends."""
    path = tmp_path / "mine.csv"
    path.write_text('\ufeffprompt,weight,count\n"a fox, red",2,1\n"two\ncats",,2\n', encoding="utf-8")
    fox, cats = read_prompts(path, check=words)
    assert (fox.text, fox.weight, fox.metadata) == ("a fox, red", 2.0, {"count": "1"})
    assert (cats.text, cats.weight, cats.metadata) == ("two\ncats", 1.0, {"count": "2"})


def test_the_files_of_flow_grpo(tmp_path: Path) -> None:
    """GenEval's metadata load as they are and reach the reward whole; its OCR prompts are lines of text."""
    (found,) = read_prompts(jsonl(tmp_path / "train_metadata.jsonl", [GENEVAL]), check=anything)
    assert (found.text, found.tag) == ("four benches", "counting")
    assert copy_metadata([found])[0] == {name: value for name, value in GENEVAL.items() if name != "prompt"}
    (tmp_path / "train.txt").write_text('A sign that reads "Hello, {world}"\n')
    assert texts(read_prompts(tmp_path / "train.txt", check=anything)) == ['A sign that reads "Hello, {world}"']


def test_an_image_is_found_beside_its_file(tmp_path: Path) -> None:
    """The path starts from the folder of the file, and reaches the reward as an absolute one."""
    (tmp_path / "fox.png").write_bytes(b"png")
    (found,) = read_prompts(jsonl(tmp_path / "a.jsonl", [{"prompt": "a fox", "image": "fox.png"}]), check=words)
    assert found.image == tmp_path / "fox.png"
    assert found.metadata == {"image": str(tmp_path / "fox.png")}
    (found,) = read_prompts(
        parquet(tmp_path / "a.parquet", [{"prompt": "a fox", "image": {"bytes": b"png", "path": None}}]), check=words
    )
    assert (found.image, found.metadata) == (b"png", {})


def as_json_lines(prompts: list[str], **columns: Any) -> str:
    return "".join(json.dumps({"prompt": prompt, **columns}, ensure_ascii=False) + "\n" for prompt in prompts)


def as_json(prompts: list[str]) -> str:
    return json.dumps([{"prompt": prompt} for prompt in prompts], ensure_ascii=False, indent=1)


def as_csv(prompts: list[str]) -> str:
    return "\n".join(["prompt,tag", *(f"{prompt}," for prompt in prompts)]) + "\n"


def as_toml(prompts: list[str]) -> str:
    return "".join(f'[[prompts]]\nprompt = "{prompt}"\n' for prompt in prompts)


def as_metadata(prompts: list[str]) -> str:
    return "".join(json.dumps({"file_name": "a.png", "text": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)


def read_from(file: Path) -> list[str]:
    """Return the texts of a file of any kind."""
    if file.name == "preferences.jsonl":
        return [record.prompt.text for record in read_preference_records(file.parent, check=anything)]
    if file.name.startswith(("metadata", "caption")):
        return texts(read_images(file.parent, check=anything))
    return texts(read_prompts(file, check=anything))


# Every kind of text file: its name, and what it holds for some prompts.
TEXT_FILES: dict[str, Callable[[list[str]], str]] = {
    "prompts.txt": lambda prompts: "\n".join(prompts) + "\n",
    "prompts.jsonl": as_json_lines,
    "prompts.json": as_json,
    "prompts.csv": as_csv,
    "prompts.tsv": lambda prompts: as_csv(prompts).replace(",", "\t"),
    "prompts.toml": as_toml,
    "metadata.jsonl": as_metadata,
    "preferences.jsonl": lambda prompts: as_json_lines(prompts, win="a.png", lose="a.png"),
    "caption.txt": lambda prompts: prompts[0] + "\n",
}
# U+2028 and U+0085 end a line for Python's `splitlines`, and for nobody else.
LISTED = ["an owl\u2028 at night \x85 \U0001f989", "zwei K\xfche", "a10", "a9"]
FORMS: dict[str, Callable[[str], bytes]] = {
    "as it is": str.encode,
    "byte-order mark": lambda text: text.encode("utf-8-sig"),
    "CR LF": lambda text: text.replace("\n", "\r\n").encode(),
    "CR": lambda text: text.replace("\n", "\r").encode(),
    "blank lines at the end": lambda text: (text + "\n \n").encode(),
}


def beside_images(folder: Path, name: str, data: bytes) -> Path:
    """Return a file that is written beside the images that it names."""
    (folder / ("caption.png" if name == "caption.txt" else "a.png")).write_bytes(b"png")
    (folder / name).write_bytes(data)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_kind_of_text_file_has_the_same_prompts(name: str, form: str, tmp_path: Path) -> None:
    """In UTF-8, in their order, with any ends of lines; other separators of Unicode belong to the text."""
    if (name, form) == ("prompts.toml", "CR"):  # which TOML does not allow
        return
    file = beside_images(tmp_path, name, FORMS[form](TEXT_FILES[name](LISTED)))
    assert read_from(file) == (LISTED[:1] if name == "caption.txt" else LISTED)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text.encode("latin-1", "ignore"), "is not UTF-8 text"),
        (lambda text: text.encode("utf-16"), "is not UTF-8 text"),
        (lambda text: text.encode("utf-16-le"), "is not UTF-8 text"),
        (lambda text: text.rstrip()[:-2].encode() + b"\xf0\x9f", "is not UTF-8 text"),  # within an emoji
        (lambda text: b"", "empty|not JSON|no tables|holds no images"),
        (lambda text: b"\xef\xbb\xbf\n \n", "empty|not JSON|no tables|holds no images"),
        (lambda text: text.rstrip()[:-2].encode(), "not JSON|not TOML|cells"),  # truncated
    ],
)
@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_kind_of_damaged_text_file_is_named(
    name: str, damage: Callable[[str], bytes], says: str, tmp_path: Path
) -> None:
    """One line that names the file. A text without a structure cannot be seen to be truncated."""
    data = damage(TEXT_FILES[name](["zwei K\xfche", "an owl"]))
    if name.endswith(".txt") and says.endswith("cells"):
        return
    with pytest.raises(UsageError, match=says) as error:
        read_from(beside_images(tmp_path, name, data))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in TEXT_FILES if "json" in name])
def test_half_an_emoji_is_named(name: str, tmp_path: Path) -> None:
    """JSON can hold a half of a surrogate pair, which no tokenizer takes; a whole one is a character."""
    whole = TEXT_FILES[name](["an owl", "a fox"]).replace("fox", "fox \\ud83e\\udd8a")
    assert read_from(beside_images(tmp_path, name, whole.encode())) == ["an owl", "a fox \U0001f98a"]
    with pytest.raises(UsageError, match=r"(line|record) 2, column (prompt|text) holds half a character"):
        read_from(beside_images(tmp_path, name, whole.replace("\\udd8a", "").encode()))
    with pytest.raises(ValueError, match="holds half a character"):
        Prompt("a fox", negative="\ud83e")


def text(name: str, written: str) -> Callable[[Path], Path]:
    """Return what writes a file."""

    def write(folder: Path) -> Path:
        (folder / name).write_text(written)
        return folder / name

    return write


def damaged_parquet(folder: Path) -> Path:
    parquet(folder / "a.parquet", RECORDS)
    (folder / "a.parquet").write_bytes((folder / "a.parquet").read_bytes()[:-20])
    return folder / "a.parquet"


def damaged_data_set(folder: Path) -> Path:
    last = saved_to_disk(folder / "a", RECORDS) / "data-00001-of-00002.arrow"
    last.write_bytes(last.read_bytes()[:-8])  # between two batches
    return folder / "a"


def splits(folder: Path) -> Path:
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder


WRONG: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder / "nowhere.txt", "nowhere.txt cannot be read: No such file or directory"),
    (text("empty.txt", "\n \n"), "empty.txt is empty, expected one prompt per line"),
    (text("long.txt", "a fox\n\na very red fox\n"), "long.txt, line 3: prompt 'a very red fox' has more than 3 words"),
    (text("a.tar", "prompt"), "a.tar cannot be read: file could not be opened successfully"),
    (text("a.tsv", "prompt\ttag\na fox\n"), "a.tsv, line 2 has 1 cells, expected 2"),
    *(
        (text(name, "import torch\n"), f"{name} ends in {ending}, expected .txt, .jsonl, .json, .csv, .tsv, .parquet")
        for name, ending in (("mine.py", ".py"), ("notes.md", ".md"), ("run.yaml", ".yaml"), ("prompts", "nothing"))
    ),
    (text("a.json", '{"prompt": "a fox"}\n{"prompt": "a dog"}'), "(a file with a record per line ends in .jsonl)"),
    (text("a.json", '{"prompt": "a fox"}'), "a.json holds a dict, expected an array of objects"),
    (text("a.json", '[{"prompt": "a fox"}, "a dog"]'), "a.json, record 2 is a str, expected an object of columns"),
    (text("a.jsonl", '\n{"prompt": \n'), "a.jsonl, line 2 is not JSON: "),
    (text("a.jsonl", '"a fox"\n'), "a.jsonl, line 1 holds a str, expected an object"),
    (text("a.JSONL", '{"caption": "a fox"}\n'), "a.JSONL, line 1 has no column prompt, it has caption: rename"),
    (text("a.jsonl", '{"prompt": 3}\n'), "a.jsonl, line 1, column prompt is an int, expected text"),
    (text("a.jsonl", '{"prompt": " "}\n'), "line 1, column prompt is empty"),
    (text("a.jsonl", '{"prompt": "a fox", "weight": 0}\n'), "line 1, column weight is 0, expected a number above 0"),
    (text("a.jsonl", '{"prompt": "a fox", "weight": true}\n'), "line 1, column weight is True"),
    (text("a.jsonl", '{"prompt": "a fox", "weight": NaN}\n'), "line 1, column weight is nan"),
    (text("a.jsonl", '{"prompt": "a fox", "tag": ["t"]}\n'), "line 1, column tag is a list, expected text"),
    (
        text("a.jsonl", '{"prompt": "a fox", "image": "x.png"}\n'),
        "line 1, column image names x.png, which does not exist in",
    ),
    (text("a.jsonl", '{"prompt": "a fox", "negative_prompt": "a b c d"}\n'), "line 1: prompt 'a b c d' has more than 3"),
    (text("a.jsonl", '{"prompt": "a fox"}\n{"prompt": "a cow"}'), "a.jsonl, line 2: 'a cow' is held out"),
    (text("a.csv", "prompt,tag\na fox\n"), "a.csv, line 2 has 1 cells, expected 2"),
    (text("a.csv", "prompt,prompt\na,b\n"), "a.csv, line 1 names the column 'prompt' twice"),
    (text("a.csv", 'prompt\n"a fox"x\n'), "a.csv, line 2 is not CSV"),
    (text("a.csv", "a fox, red\n\n"), "a.csv has one line, 'a fox, red', expected a header with rows below it"),
    (text("a.csv", "text\na fox\n"), "a.csv, line 2 has no column prompt, it has text"),
    (damaged_parquet, "a.parquet cannot be read: "),
    (damaged_data_set, "a cannot be read: data-00001-of-00002.arrow is truncated"),
    (splits, "holds several splits (train, test): name the folder of one"),
    (lambda folder: folder, "is a folder without state.json"),
]


@pytest.mark.parametrize(("make", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
def test_what_is_wrong_with_a_file(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    """One line that names file, line and column."""
    with pytest.raises(UsageError) as error:
        read_prompts(make(tmp_path), check=words, heldout=("a cow",))
    assert says in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_without_pyarrow_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", RECORDS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"needs pyarrow, which is not installed: pip install 'fluvial\[data\]'"):
        read_prompts(path, check=words)


def test_files_are_named_with_weights(tmp_path: Path) -> None:
    """A file whose name itself has an equals sign is taken for what it is; two of one name go by their paths."""
    (tmp_path / "a=2").write_text("a fox")
    found = parse_sources([str(tmp_path / "a=2"), "b.txt=0.5", "x/c.txt", "y/c.txt"])
    assert [(each.name, each.weight) for each in found] == [("a=2", 1), ("b", 0.5), ("x/c.txt", 1), ("y/c.txt", 1)]
    for wrong, says in (("a=0", "weight '0'"), ("a=much", "weight 'much'"), ("a=inf", "weight 'inf'")):
        with pytest.raises(UsageError, match=says):
            parse_sources([wrong])
    with pytest.raises(UsageError, match=r"names a\.txt twice"):
        parse_sources(["a.txt", "a.txt=2"])


def test_several_files(tmp_path: Path) -> None:
    """Each prompt knows its source; held-out files share the names of the sources in their places."""
    paths = []
    for name in ("a", "b", "a-held", "b-held"):
        (tmp_path / f"{name}.txt").write_text(f"{name} one\n{name} two\n")
        paths.append(str(tmp_path / f"{name}.txt"))
    prompts, weights = read_sources([f"{paths[0]}=3", paths[1]], check=words)
    assert weights == {"a": 3.0, "b": 1.0}
    assert [prompt.source for prompt in prompts] == ["a", "a", "b", "b"]
    assert [prompt.source for prompt in read_heldout(paths[2:], paths[:2], check=words)] == ["a", "a", "b", "b"]
    assert {prompt.source for prompt in read_heldout(paths[3:], paths[:2], check=words)} == {"b-held"}
    with pytest.raises(UsageError, match="has no effect on evaluations"):
        read_heldout([f"{paths[2]}=2"], paths[:1], check=words)


def test_every_tenth_prompt_of_each_source_is_held_out() -> None:
    """The two parts are apart, also where a prompt stands twice, and together they are all; a single one is in both."""
    prompts = [f"prompt {i}" for i in range(25)]
    train, heldout = map(texts, split_off(as_prompts(prompts)))
    assert heldout == ["prompt 0", "prompt 10", "prompt 20"]
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(prompts)
    twice = [Prompt("a"), Prompt("b"), Prompt("a", tag="other")]
    assert split_off(twice) == ((Prompt("b"),), (Prompt("a"),))
    several = [Prompt(f"{source} {i}", source=source) for i in range(11) for source in "ab"]
    assert texts(split_off(several)[1]) == ["a 0", "b 0", "a 10", "b 10"]
    assert split_off([Prompt("a")]) == ((Prompt("a"),), (Prompt("a"),))


def test_rewards_see_what_the_model_is_given() -> None:
    """`image`, `video` and `audio` are those of `media` where they are not given; of several images the first."""
    files: dict[str, Any] = {"image": (b"first", b"second"), "video": Path("clip.mp4"), "mask_image": b"mask"}
    prompt = Prompt("an owl", media=files, audio=b"sound")
    assert (prompt.image, prompt.video, prompt.audio) == (b"first", Path("clip.mp4"), b"sound")
    assert Prompt("an owl", image=b"other", media=files).image == b"other"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub with a data set of two splits, as its client leaves one, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "datasets--me--foxes"
    snapshot = folder / "snapshots" / ("a" * 40)
    for place, records in {
        "default/train/0000": RECORDS[:1],
        "default/train/0001": RECORDS[1:],
        "small/test/0000": RECORDS,
    }.items():
        (snapshot / place).parent.mkdir(parents=True, exist_ok=True)
        parquet(snapshot / f"{place}.parquet", records)
    reference = folder / "refs" / "refs" / "convert" / "parquet"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    return snapshot


def test_a_data_set_of_the_hub_is_read_by_its_name(hub: Path) -> None:
    """All its Parquet files in their order, of the configuration and split that are named; it may have a weight."""
    for word, file in (("hub:me/foxes", "default/train"), ("hub:me/foxes/small/test", "small/test")):
        found = read_prompts(Path(word), check=words)
        here = [prompt for each in sorted((hub / file).iterdir()) for prompt in read_prompts(each, check=words)]
        assert [(prompt.text, prompt.metadata) for prompt in found] == [(prompt.text, prompt.metadata) for prompt in here]
        assert {prompt.source for prompt in found} == {word}
    (source,) = parse_sources(["hub:me/foxes=2"])
    assert (source.name, source.weight) == ("hub:me/foxes", 2.0)
    assert is_prompt_file("hub:me/foxes")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("hub:foxes", "prompts file hub:foxes names no data set, expected hub:OWNER/NAME or hub:OWNER/NAME/CONFIG/SPLIT"),
        ("hub:me/foxes/default", "names no data set"),
        ("hub:me/wolves", "prompts file hub:me/wolves cannot be downloaded: "),
        ("hub:me/foxes/big/train", "no configuration big with a split train: name one of default/train, small/test"),
    ],
)
def test_what_the_hub_does_not_have(hub: Path, word: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        read_prompts(Path(word), check=words)
    assert "\n" not in str(refused.value)


def test_a_list_of_media_may_hold_the_folder_of_a_videos_frames(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    (tmp_path / "voice.wav").touch()
    found = read_files(["frames", "voice.wav"], "line 1, column references", tmp_path)
    assert found == ((tmp_path / "frames").absolute(), (tmp_path / "voice.wav").absolute())
    with pytest.raises(UsageError, match="column references is an empty list, expected the paths of files"):
        read_files([], "column references", tmp_path)
