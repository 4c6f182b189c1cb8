"""Aspect-ratio buckets: which size an image gets, how batches come to have one size, and what is refused."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fluvial.core.random import key
from fluvial.engines.data.image_cache import ImageCache
from fluvial.engines.data.images import read_size
from fluvial.engines.data.order import BatchOrder, PromptOrder, PromptPool, draw_size
from fluvial.engines.data.preferences import EncodedPreferences, PreferenceRecord
from fluvial.engines.data.prompts import assign_recorded_sizes
from fluvial.engines.data.records import Prompt, as_prompts
from fluvial.engines.data.sizes import Size, find_nearest_size, fits, parse_shapes, parse_size
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError

SQUARE, TALL, WIDE = Size(8, 8), Size(12, 8), Size(8, 12)
SIZES = (SQUARE, TALL, WIDE)
SHAPES = {size: (3, size.height // 2, size.width // 2) for size in SIZES}


def test_a_size_is_width_by_height() -> None:
    """As people write it; anything else is named."""
    assert parse_size("832x1216") == Size(height=1216, width=832)
    assert str(Size(1216, 832)) == "832x1216"
    for word in ("832", "0x8", "8x", "8 x 8", "-8x8", "8x8x8"):
        with pytest.raises(ValueError, match=r"is not a size, expected WIDTHxHEIGHT in pixels, e\.g\. 832x1216"):
            parse_size(word)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_an_image_gets_the_nearest_ratio_or_none(height: int, width: int) -> None:
    """No other size keeps more of it, and at least two thirds are kept."""

    def kept(size: Size) -> float:
        scale = max(size.height / height, size.width / width)
        return size.height * size.width / (height * width * scale**2)

    if not any(fits(Size(height, width), size) for size in SIZES):
        assert max(map(kept, SIZES)) < 2 / 3
        with pytest.raises(ValueError, match="fit none of the sizes 8x8 8x12 12x8: more than a third would be cut off"):
            find_nearest_size(Size(height, width), SIZES)
        return
    found = find_nearest_size(Size(height, width), SIZES)
    assert kept(found) == pytest.approx(max(map(kept, SIZES)))
    assert fits(Size(height, width), found)
    assert kept(found) >= 2 / 3 - 1e-9


def test_sizes_of_a_model() -> None:
    """Each has a shape of its own; of equal ratios the nearest area counts."""
    both = (Size(512, 512), Size(1024, 1024))
    assert [find_nearest_size(Size(side, side), both).height for side in (100, 600, 800, 4000)] == [512, 512, 1024, 1024]
    shapes = parse_shapes(("8x8", "8x12"), lambda height, width: (3, height // 2, width // 2))
    assert shapes == {SQUARE: (3, 4, 4), TALL: (3, 6, 4)}
    with pytest.raises(ValueError, match=r"pipeline\.sizes has 8x8 and 9x8, whose samples have the same shape"):
        parse_shapes(("8x8", "9x8"), lambda height, width: (height // 2, width // 2))


def prompts_of(*counts: int) -> list[Prompt]:
    """Return so many prompts of each size."""
    each = zip(SIZES, counts, strict=False)
    return [Prompt(f"{size} {number}", size=size) for size, count in each for number in range(count)]


def test_batches_have_one_size_and_epochs_are_whole() -> None:
    """Each size comes as often as its prompts do, and each of its prompts once per epoch of the size."""
    prompts = prompts_of(8, 4, 4)
    order = BatchOrder(prompts, key(0))
    batches = [order.take_batch(number, 4) for number in range(16)]
    for places in batches:
        assert len({prompts[place].size for place in places}) == 1
    for start in (0, 4, 8, 12):  # four batches of four are an epoch of all sixteen
        assert sorted(place for places in batches[start : start + 4] for place in places) == list(range(16))
    assert batches != [BatchOrder(prompts, key(1)).take_batch(number, 4) for number in range(16)]
    again = BatchOrder(prompts, key(0))
    assert [again.take_batch(number, 4) for number in (9, 2, 15, 2)] == [batches[number] for number in (9, 2, 15, 2)]


def test_sources_keep_their_shares_over_sizes() -> None:
    """A source of weight 3 is drawn three times as often, whatever the sizes of its prompts."""
    prompts = []
    for source, sizes in (("a", (SQUARE, SQUARE, TALL)), ("b", (TALL, WIDE, WIDE, WIDE))):
        prompts += [Prompt(f"{source}{number}", source=source, size=size) for number, size in enumerate(sizes)]
    order = BatchOrder(prompts, key(0), {"a": 3.0})
    drawn = Counter(prompts[place].source for number in range(1200) for place in order.take_batch(number, 2))
    assert drawn["a"] / drawn.total() == pytest.approx(0.75, abs=0.01)
    each = Counter(place for number in range(1200) for place in order.take_batch(number, 2))
    assert [each[place] / each.total() for place in range(7)] == pytest.approx([1 / 4] * 3 + [1 / 16] * 4, abs=0.01)


@pytest.mark.parametrize("size", [None, TALL])
def test_one_size_has_the_order_of_prompts(size: Size | None) -> None:
    """To the prompt, so that runs of one size draw as they did."""
    prompts = [Prompt(str(number), size=size) for number in range(7)]
    order, known = BatchOrder(prompts, key(3)), PromptOrder(prompts, key(3))
    assert [order.take_batch(number, 3) for number in range(9)] == [known.take(3 * number, 3) for number in range(9)]


def test_draws_have_the_size_of_the_first() -> None:
    """And every prompt is drawn as often as every other; without sizes nothing is redrawn."""
    prompts, counts = prompts_of(6, 2, 1), Counter[int]()
    for number in range(600):
        places = PromptPool(prompts).draw(key(number), 3)
        assert len({prompts[place].size for place in places}) == 1
        counts.update(places)
    assert [counts[place] / 1800 for place in range(9)] == pytest.approx([1 / 9] * 9, abs=0.04)
    plain = as_prompts(["a", "b", "c"])
    assert PromptPool(plain).draw(key(5), 4) == PromptPool([replace(prompt, size=TALL) for prompt in plain]).draw(key(5), 4)


def test_the_size_of_a_rollout() -> None:
    """That of its prompts, or each as likely."""
    assert draw_size([Prompt("a", size=TALL)], key(0), SIZES) == TALL
    drawn = Counter(draw_size([Prompt("a")], key(number), SIZES) for number in range(300))
    assert set(drawn) == set(SIZES)
    assert min(drawn.values()) > 70


def test_records_name_the_size_of_their_samples() -> None:
    """By one column or two, as numbers or text; the nearest is taken, and what is no size is named."""
    given: list[Any] = [{"size": "16x24"}, {"width": 120, "height": "80"}, {"width": 5}, {}]
    prompts = [Prompt(str(number), metadata=columns) for number, columns in enumerate(given)]
    assert [prompt.size for prompt in assign_recorded_sizes(prompts, SIZES)] == [TALL, WIDE, None, None]
    assert [prompt.metadata for prompt in assign_recorded_sizes(prompts, SIZES)] == given
    for columns, says in (
        ({"size": "big"}, r"prompt 'a fox': 'big' is not a size"),
        ({"width": 9.5, "height": 8}, "'9.5x8' is not a size"),
        ({"size": "8x80"}, "8x80 pixels fit none of the sizes 8x8 8x12 12x8"),
    ):
        with pytest.raises(UsageError, match=says):
            assign_recorded_sizes([Prompt("a fox", metadata=columns)], SIZES)


def halved(images: Tensor) -> Tensor:
    """Return every second pixel."""
    return images[:, :, ::2, ::2] * 2 - 1


def painted(folder: Path, **sizes: tuple[int, int]) -> dict[str, Path]:
    """Write images of (width, height) by name."""
    folder.mkdir(exist_ok=True)
    for number, (name, size) in enumerate(sizes.items()):
        Image.new("RGB", size, (10 * number, 0, 99)).save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in sizes}


def cache(folder: Path, **changes: Any) -> ImageCache:
    return ImageCache(folder / "cache", **{"settings": {}, "encode": halved, "shapes": SHAPES, **changes})


def test_each_image_is_cut_to_its_bucket(tmp_path: Path, one: World) -> None:
    """The nearest of the sizes; an image on its side counts as it is seen."""
    found = painted(tmp_path / "all", square=(20, 21), tall=(30, 44), wide=(90, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (90, 64)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_size(tmp_path / "turned.jpg") == Size(height=90, width=64)
    made = cache(tmp_path)
    made.fill([(path,) for path in (*found.values(), tmp_path / "turned.jpg")], one)
    assert list(made.sizes.values()) == [SQUARE, TALL, WIDE, TALL]
    for image, size in made.sizes.items():
        assert made.sample(image, size).shape == SHAPES[size]  # type: ignore[index]


def test_an_image_that_no_bucket_takes(tmp_path: Path, one: World) -> None:
    """It is named, or left out where that is asked for; the others are kept.

    The preferred image of a preference that is left out may be that of another one, whose size it does not change.
    """
    found = painted(tmp_path / "all", a=(20, 20), strip=(200, 20), wide=(36, 24), other=(72, 48), tall=(20, 28))
    groups = [(found["a"],), (found["strip"],), (found["wide"], found["other"]), (found["wide"], found["tall"])]
    with pytest.raises(UsageError, match=r"strip\.png of 200x20 pixels fit none of the sizes 8x8 8x12 12x8: ") as error:
        cache(tmp_path).fill(groups, one)
    assert "\n" not in str(error.value)
    made = cache(tmp_path, skip=True)
    made.fill(groups, one)
    assert made.left_out == {groups[1], groups[3]}
    assert made.sizes == {found["a"]: SQUARE, found["wide"]: WIDE}
    assert made.sample(found["a"], SQUARE).shape == SHAPES[SQUARE]


def test_both_images_of_a_preference_have_the_size_of_the_preferred(tmp_path: Path, one: World) -> None:
    """So an image may be there at two sizes; one that would be cut too much is named, or its preference left out."""
    found = painted(tmp_path / "all", square=(20, 20), tall=(20, 28), wide=(36, 24))
    named = [("square", "tall"), ("tall", "square"), ("wide", "tall")]
    records = [PreferenceRecord(f"line {win}", Prompt(win), found[win], found[lose]) for win, lose in named]
    made, pairs = cache(tmp_path, skip=True), [(found[win], found[lose]) for win, lose in named]
    made.fill(pairs, one)
    assert made.left_out == {pairs[2]}
    preferences = EncodedPreferences(records, made)
    assert [prompt.size for prompt in preferences.prompts] == [SQUARE, TALL]
    assert len(preferences) == 2
    for preference, size in ((preferences[0], SQUARE), (preferences[1], TALL)):
        assert preference.win.shape == preference.lose.shape == SHAPES[size]
    with pytest.raises(UsageError, match=r"tall\.png of 20x28 pixels cannot be cut to 12x8, the size of .*wide\.png beside"):
        cache(tmp_path).fill(pairs[2:], one)
    with pytest.raises(UsageError, match="no preference can be used"):
        EncodedPreferences(records[2:], made)


class Ranks:
    """Two ranks of one process: each is a thread, and they meet where they gather."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2, timeout=20), [None, None]

    def world(self, rank: int) -> Any:
        """Return the world of a rank."""
        ranks = self

        class Rank:
            size, is_main = 2, rank == 0

            def __init__(self) -> None:
                self.rank = rank

            @contextmanager
            def agreed(self) -> Iterator[None]:
                """Wait for the other."""
                yield
                ranks.barrier.wait()

            def gather_items(self, item: Any) -> list[Any]:
                """Return what both give."""
                ranks.given[rank] = item
                ranks.barrier.wait()
                found = list(ranks.given)
                ranks.barrier.wait()
                return found

        return Rank()


def test_ranks_share_the_encoding_and_agree(tmp_path: Path) -> None:
    """Each image is encoded by one of them, and both know every size and what was left out."""
    found = painted(tmp_path / "all", a=(20, 20), b=(20, 30), c=(30, 20), d=(21, 20), e=(90, 9))
    (tmp_path / "all" / "f.png").write_text("no image")
    groups = [(path,) for path in (*found.values(), tmp_path / "all" / "f.png")]
    counts, made, ranks = [0, 0], [], Ranks()

    def fill(rank: int) -> None:
        def encode(images: Tensor) -> Tensor:
            counts[rank] += len(images)
            return halved(images)

        mine = cache(tmp_path, encode=encode, skip=True)
        mine.fill(groups, ranks.world(rank))
        made.append(mine)

    threads = [threading.Thread(target=fill, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [2, 2]
    assert made[0].sizes == made[1].sizes
    assert made[0].left_out == made[1].left_out == {groups[4], groups[5]}
    assert all(torch.equal(made[0].sample(path, SQUARE), made[1].sample(path, SQUARE)) for path in (found["a"], found["d"]))
