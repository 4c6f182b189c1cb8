"""GenEval: objects, counts, colours and positions of a prompt, verified in the image with any object detector.

Source: GenEval, arXiv 2310.11513, and its repository's `evaluation/evaluate_images.py`; the partial score is that of
flow_grpo's server (yifan123/reward-server, `reward_server/gen_eval.py`).
The published detector is Mask2Former (mmdet), and CLIP ViT-L/14 names the colours; both are arguments here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

THRESHOLD = 0.3  # least confidence of an object
COUNTING_THRESHOLD = 0.9  # least confidence for prompts with the tag counting
MOST_OBJECTS = 16  # most objects of one class, by confidence
POSITION_THRESHOLD = 0.1  # least offset of a position, relative to the objects' sizes
GREY = 0x99 / 255  # value of the pixels outside of an object whose colour is named
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")


class Detection(NamedTuple):
    """An object in an image.

    Args:
        box: left, top, right and bottom, in pixels.
        confidence: confidence of the detector, in [0, 1].
        mask: `[H, W]`, True inside the object; None without a mask.
    """

    box: tuple[float, float, float, float]
    confidence: float
    mask: Tensor | None = None


# Function from an image `[3, H, W]` in [0, 1] to its objects by the name of their class.
Detector = Callable[[Tensor], Mapping[str, Sequence[Detection]]]
# Function from crops `[3, h, w]` of objects, and the name of their class, to their colours, each one of COLOURS.
ColourNamer = Callable[[Sequence[Tensor], str], Sequence[str]]


class Verdict(NamedTuple):
    """Result of an image for its prompt."""

    correct: bool  # GenEval: enough objects with the colour and the position, and fewer of `exclude` than its count
    strict: bool  # flow_grpo: exactly the requested number of objects
    partial: float  # flow_grpo: mean over the requirements; less than 1 for a wrong count, 1/2 for a wrong position


@dataclass(eq=False)
class GenEval:
    """Reward of GenEval; the metadata of each prompt has `tag`, `include` and `exclude` as in GenEval's files.

    Args:
        detector: function that finds objects.
        colours: function that names the colours of objects, such as `EmbeddingColourNamer`; for prompts with colours.
        score: value to train on: partial, strict or correct, see `Verdict`.
    """

    detector: Detector
    colours: ColourNamer | None = None
    _: KW_ONLY
    score: Literal["partial", "strict", "correct"] = "partial"

    def __post_init__(self) -> None:
        if self.score not in Verdict._fields:
            raise ValueError(f"score is {self.score!r}, expected one of {', '.join(Verdict._fields)}")

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the `score`, and all numbers of the verdicts, `[B]` each.

        Raises:
            ValueError: the metadata of a prompt is not in GenEval's form, or it names colours and `colours` is None.
        """
        verdicts = [
            evaluate(image, record, self.detector, self.colours) for image, record in zip(images, metadata, strict=True)
        ]
        columns = {name: torch.tensor([float(getattr(each, name)) for each in verdicts]) for name in Verdict._fields}
        return {"score": columns[self.score], **columns}


class EmbeddingColourNamer:
    """Namer of colours by the text embedding nearest to that of the object's image, as published with CLIP.

    Args:
        images: function from crops `[3, h, w]` to embeddings `[N, D]`.
        texts: function from texts to embeddings `[N, D]`.
    """

    def __init__(self, images: Callable[[Sequence[Tensor]], Tensor], texts: Callable[[Sequence[str]], Tensor]) -> None:
        self.images, self.texts = images, texts
        self.known: dict[str, Tensor] = {}  # embeddings of the colours `[10, D]`, by class

    def __call__(self, crops: Sequence[Tensor], name: str) -> list[str]:
        """Return the colour of each crop."""
        if name not in self.known:
            lines = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
            each = torch.nn.functional.normalize(self.texts(lines).float(), dim=-1)
            mean = each.unflatten(0, (len(COLOURS), len(TEMPLATES))).mean(1)
            self.known[name] = torch.nn.functional.normalize(mean, dim=-1)
        embeds = torch.nn.functional.normalize(self.images(crops).float(), dim=-1)
        return [COLOURS[number] for number in (embeds @ self.known[name].T.to(embeds.device)).argmax(-1).tolist()]


def evaluate(image: Tensor, record: Mapping[str, Any], detector: Detector, colours: ColourNamer | None = None) -> Verdict:
    """Return the verdict on an image.

    Args:
        image: `[3, H, W]` in [0, 1].
        record: metadata of the prompt: `include` is a list of {class, count, color?, position?}, with the position relative
            to the objects of an earlier entry, e.g. ["left of", 0]; `exclude` is a list of {class, count}.
        detector: function that finds objects.
        colours: function that names the colours of objects.

    Raises:
        ValueError: the record has another form, or names a colour while `colours` is None.
    """
    threshold = COUNTING_THRESHOLD if record.get("tag") == "counting" else THRESHOLD
    selected = {name: select_objects(detections, threshold) for name, detections in detector(image).items()}
    include = record.get("include")
    if not isinstance(include, Sequence) or not include:
        raise ValueError("the prompt's metadata has no column include, expected the objects as in GenEval's files")
    correct, strict, parts = True, True, list[float]()
    enough: list[list[Detection] | None] = []  # objects of each entry that is right by GenEval's rule
    exact: list[list[Detection] | None] = []  # objects of each entry that is right by flow_grpo's rule
    for number, entry in enumerate(include):
        name, count, colour, position = _parse_entry(entry, number)
        objects = selected.get(name, [])
        named = _name_colours(image, objects, name, colours) if colour and len(objects) >= count else []
        # GenEval: the `count` most confident objects.
        first = objects[:count]
        right = len(first) == count and (not colour or named[:count].count(colour) >= count)
        right = right and (not position or _are_all_in(position, first, enough))
        enough.append(first if right else None)
        correct = correct and right
        # flow_grpo: exactly the requested number of objects.
        parts.append(1 - abs(count - len(objects)) / count)
        right = len(objects) == count
        if not right and (colour or position):
            parts.append(0.0)
        if right and colour:
            parts.append(1 - abs(count - named.count(colour)) / count)
            right = named.count(colour) == count
        if right and position:
            right = _are_all_in(position, objects, exact)
            # flow_grpo's server adds a 1 if the target exists, beside the 0 of a wrong position.
            parts += [1.0] if right else [0.0] if exact[position[1]] is None else [0.0, 1.0]
        exact.append(objects if right else None)
        strict = strict and right
    for entry in record.get("exclude") or ():
        name, count, _, _ = _parse_entry(entry, 0)
        correct = correct and len(selected.get(name, [])) < count
    return Verdict(correct, strict, sum(parts) / len(parts))


def select_objects(detections: Sequence[Detection], threshold: float) -> list[Detection]:
    """Return the objects of a class above a threshold of confidence, the most confident first."""
    confident = [detection for detection in detections if detection.confidence > threshold]
    return sorted(confident, key=lambda detection: -detection.confidence)[:MOST_OBJECTS]


def find_positions(a: Detection, b: Detection) -> set[str]:
    """Return the positions of `a` relative to `b`.

        offset = centre_a - centre_b
        d = max(|offset| - 0.1 (size_a + size_b), 0) sign(offset) / |offset|

    `a` is left of `b` if d_x < -0.5, above it if d_y < -0.5, and so on.
    """
    box_a, box_b = torch.tensor(a.box, dtype=torch.float64), torch.tensor(b.box, dtype=torch.float64)
    sizes = (box_a[2:] - box_a[:2]).abs() + (box_b[2:] - box_b[:2]).abs()
    offset = (box_a[2:] + box_a[:2]) / 2 - (box_b[2:] + box_b[:2]) / 2
    clear = (offset.abs() - POSITION_THRESHOLD * sizes).clamp(min=0) * offset.sign()
    if bool((clear.abs() < 1e-3).all()):
        return set()
    x, y = (clear / offset.norm()).tolist()
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, value in holds.items() if value}


def crop(image: Tensor, detection: Detection) -> Tensor:
    """Return the crop of an object's box, grey outside of its mask, `[3, h, w]` with at least one pixel."""
    if detection.mask is not None:
        image = torch.where(detection.mask.to(image.device, torch.bool), image, torch.full_like(image, GREY))
    height, width = image.shape[-2:]
    left, top, right, bottom = (round(edge) for edge in detection.box)
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return image[:, top : max(bottom, top + 1), left : max(right, left + 1)]


def _are_all_in(position: tuple[str, int], objects: Sequence[Detection], groups: Sequence[list[Detection] | None]) -> bool:
    """Return whether all objects have a position relative to all objects of an earlier entry, which must be right."""
    relation, target = position
    others = groups[target]
    return others is not None and all(relation in find_positions(each, other) for each in objects for other in others)


def _name_colours(image: Tensor, objects: Sequence[Detection], name: str, colours: ColourNamer | None) -> list[str]:
    if colours is None:
        raise ValueError(f"the prompt names the colour of a {name}, and there is no function for colours: pass colours")
    return list(colours([crop(image, each) for each in objects], name))


def _parse_entry(entry: Any, number: int) -> tuple[str, int, str, tuple[str, int] | None]:
    """Return the class, count, colour and position of an entry."""
    try:
        name, count, colour, position = entry["class"], int(entry["count"]), entry.get("color") or "", entry.get("position")
        if position is not None:
            relation, target = position
            position = (relation, int(target))
        if count < 1 or (position and (position[0] not in POSITIONS or not 0 <= position[1] < number)):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"the prompt's metadata has {str(entry)[:120]!r} in include or exclude, expected class, count of at least 1, "
            "and for a position one of left of, right of, above and below with the number of an earlier entry"
        ) from None
    return name, count, colour, position
