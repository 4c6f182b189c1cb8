"""GenEval's rules on drawn scenes: a detector that finds rectangles of known colours, and answers that are known."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor

from fluvial.models.rewards.geneval import (
    COLOURS,
    Detection,
    EmbeddingColourNamer,
    GenEval,
    crop,
    evaluate,
    find_positions,
    select_objects,
)

RGB = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0), "white": (1, 1, 1), "black": (0, 0, 0)}
CLASSES = {"square": 8, "bar": 4}  # objects by their height; a square is 8 x 8, a bar 4 high and 12 wide
WIDTHS = {"square": 8, "bar": 12}
Scene = Sequence[tuple[str, str, int, int]]  # class, colour, left, top


def drawn(scene: Scene) -> Tensor:
    image = torch.full((3, 64, 64), 0.5)
    for name, colour, left, top in scene:
        image[:, top : top + CLASSES[name], left : left + WIDTHS[name]] = torch.tensor(RGB[colour]).view(3, 1, 1)
    return image


def detector(scene: Scene, confidence: float = 0.95) -> Any:
    def detect(image: Tensor) -> dict[str, list[Detection]]:
        found: dict[str, list[Detection]] = {}
        for number, (name, _, left, top) in enumerate(scene):
            mask = torch.zeros(64, 64, dtype=torch.bool)
            mask[top : top + CLASSES[name], left : left + WIDTHS[name]] = True
            box = (float(left), float(top), float(left + WIDTHS[name]), float(top + CLASSES[name]))
            found.setdefault(name, []).append(Detection(box, confidence - 0.001 * number, mask))
        return found

    return detect


def named(crops: Sequence[Tensor], name: str) -> list[str]:
    palette = torch.tensor(list(RGB.values()), dtype=torch.float32)
    return [list(RGB)[int((palette - crop.flatten(1).mean(1)).norm(dim=1).argmin())] for crop in crops]


def verdict(scene: Scene, *include: dict[str, Any], tag: str = "", exclude: Any = (), confidence: float = 0.95) -> Any:
    record = {"tag": tag, "include": list(include), "exclude": list(exclude)}
    found = evaluate(drawn(scene), record, detector(scene, confidence), named)
    return found.correct, found.strict, round(found.partial, 3)


ONE, TWO, BARS = {"class": "square", "count": 1}, {"class": "square", "count": 2}, {"class": "bar", "count": 1}
LEFT, RIGHT, TOP, LOW = ("square", "red", 4, 28), ("square", "blue", 50, 28), ("bar", "green", 26, 4), ("bar", "red", 26, 56)


def test_objects_counts_and_colours() -> None:
    """GenEval asks for enough objects, flow_grpo for as many; of several, the surest count."""
    assert verdict([LEFT], ONE) == (True, True, 1)
    assert verdict([TOP], ONE) == (False, False, 0)
    assert verdict([LEFT, RIGHT], ONE) == (True, False, 0)
    assert verdict([LEFT], TWO) == (False, False, 0.5)
    assert verdict([LEFT, RIGHT], TWO) == (True, True, 1)
    assert verdict([LEFT, TOP], ONE, BARS) == (True, True, 1)
    assert verdict([LEFT], ONE, BARS) == (False, False, 0.5)
    three = [LEFT, RIGHT, ("square", "red", 28, 28)]
    excluded = [{"class": "square", "count": 3}]
    assert verdict(three, TWO, exclude=excluded) == (False, False, 0.5)
    assert verdict(three[:2], TWO, exclude=excluded) == (True, True, 1)
    assert verdict([LEFT], ONE, confidence=0.8) == (True, True, 1)
    assert verdict([LEFT], ONE, tag="counting", confidence=0.8)[0] is False
    assert verdict([LEFT], ONE, confidence=0.3)[0] is False
    assert verdict([LEFT], {**ONE, "color": "red"}) == (True, True, 1)
    assert verdict([LEFT], {**ONE, "color": "blue"}) == (False, False, 0.5)
    assert verdict([LEFT, RIGHT], {**TWO, "color": "red"}) == (False, False, 0.75)
    assert verdict([LEFT, RIGHT], {**ONE, "color": "red"}) == (True, False, 0)
    assert verdict([RIGHT, LEFT], {**ONE, "color": "red"}) == (False, False, 0)
    assert verdict([LEFT, TOP], {**ONE, "color": "red"}, {**BARS, "color": "green"}) == (True, True, 1)
    assert verdict([LEFT, TOP], {**ONE, "color": "green"}, {**BARS, "color": "red"}) == (False, False, 0.5)


@pytest.mark.parametrize(
    ("scene", "relation", "holds"),
    [
        ([LEFT, ("bar", "red", 44, 30)], "right of", True),
        ([LEFT, ("bar", "red", 44, 30)], "left of", False),
        ([RIGHT, ("bar", "red", 4, 30)], "left of", True),
        ([LEFT, ("bar", "red", 4, 4)], "above", True),
        ([LEFT, ("bar", "red", 4, 58)], "below", True),
        ([LEFT, ("bar", "red", 4, 28)], "above", False),
    ],
)
def test_positions(scene: Scene, relation: str, holds: bool) -> None:
    """Of the second entry's object relative to the first's; the server's mean of a wrong one is that of 1, 1, 0 and 1."""
    expected = (True, True, 1) if holds else (False, False, 0.75)
    assert verdict(scene, ONE, {**BARS, "position": [relation, 0]}) == expected


def test_offsets_that_are_positions_and_their_targets() -> None:
    assert verdict([TOP], ONE, {**BARS, "position": ["above", 0]}) == (False, False, round(1 / 3, 3))
    assert verdict([LEFT], ONE, {**BARS, "position": ["above", 0]}) == (False, False, round(1 / 3, 3))

    def at(x: float, y: float, size: float = 10) -> Detection:
        return Detection((x, y, x + size, y + size), 1.0)

    assert find_positions(at(0, 0), at(40, 40)) == {"left of", "above"}
    assert find_positions(at(40, 0), at(0, 40)) == {"right of", "above"}
    assert find_positions(at(0, 0), at(40, 5)) == {"left of"}
    assert find_positions(at(1, 1), at(0, 0)) == set()
    assert find_positions(at(0, 0), at(0, 0)) == set()
    # offset 4 of sizes 10 + 10: clear by 2, which is half of it and no more
    assert find_positions(at(4, 0), at(0, 0)) == set()
    assert find_positions(at(4.1, 0), at(0, 0)) == {"right of"}


def test_the_surest_sixteen_objects_count_and_are_cropped() -> None:
    many = [Detection((0, 0, 1, 1), confidence / 100) for confidence in range(25, 60)]
    found = select_objects(many, 0.3)
    assert len(found) == 16
    assert [each.confidence for each in found] == [confidence / 100 for confidence in range(59, 43, -1)]
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[10:20, 10:15] = True
    cropped = crop(torch.ones(3, 64, 64), Detection((9.6, 10.4, 20.0, 20.0), 1.0, mask))
    assert cropped.shape == (3, 10, 10)
    assert torch.equal(cropped[0, 0], torch.tensor([1.0] * 5 + [0x99 / 255] * 5))
    assert crop(torch.ones(3, 8, 8), Detection((-5, 9, -2, 12), 1.0)).shape == (3, 1, 1)


def test_colours_are_named_by_the_nearest_embedding() -> None:
    asked: list[str] = []

    def texts(lines: Sequence[str]) -> Tensor:
        asked.extend(lines)
        return torch.stack(
            [torch.eye(len(COLOURS))[[c in line for c in COLOURS].index(True)] * (2 + i) for i, line in enumerate(lines)]
        )

    def embedded(crops: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.eye(len(COLOURS))[int(crop[0, 0, 0])] for crop in crops])

    name = EmbeddingColourNamer(embedded, texts)
    crops = [torch.full((3, 2, 2), float(number)) for number in (3, 0, 9)]
    assert name(crops, "dog") == ["green", "red", "white"]
    assert asked[:3] == ["a photo of a red dog", "a photo of a red-colored dog", "a photo of a red object"]
    name(crops, "dog")
    assert len(asked) == 30  # once per class


def test_it_is_a_reward_of_several_numbers() -> None:
    scenes: list[Scene] = [[LEFT], [LEFT, RIGHT]]
    images = torch.stack([drawn(scene) for scene in scenes])

    def detect(image: Tensor) -> Any:
        return detector(scenes[1] if bool((image[2] == 1).any()) else scenes[0])(image)

    records = [{"tag": "counting", "include": [TWO]}] * 2
    found = GenEval(detect)(images, ["two squares"] * 2, records)
    assert {name: values.tolist() for name, values in found.items()} == {
        "score": [0.5, 1],
        "correct": [0, 1],
        "strict": [0, 1],
        "partial": [0.5, 1],
    }
    assert GenEval(detect, score="correct")(images, ["two squares"] * 2, records)["score"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({}, "no column include"),
        ({"include": []}, "no column include"),
        ({"include": [{"class": "square"}]}, "expected class, count"),
        ({"include": [{"class": "square", "count": 0}]}, "expected class, count"),
        ({"include": ["square"]}, "expected class, count"),
        ({"include": [{**ONE, "position": ["left of", 0]}]}, "number of an earlier entry"),
        ({"include": [ONE, {**BARS, "position": ["near", 0]}]}, "one of left of, right of"),
        ({"include": [{**ONE, "color": "red"}]}, "there is no function for colours"),
    ],
)
def test_metadata_of_another_form_is_one_line(record: Any, says: str) -> None:
    refuses(says, evaluate, drawn([LEFT]), record, detector([LEFT]))
    refuses("score is 'most'", GenEval, detector([LEFT]), score="most")
