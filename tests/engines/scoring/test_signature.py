"""Inputs of a reward: its parameters name it, in whichever order and however it is written."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.refusals import refuses
from PIL import Image

from fluvial.engines.data.records import Prompt, texts
from fluvial.engines.errors import UsageError
from fluvial.engines.scoring.registry import check_records
from fluvial.engines.scoring.signature import Samples, reward_problem, signature_of
from fluvial.models.replay import kinds

PROMPTS = [Prompt("a", metadata={"count": 3}), Prompt("b")]
SAMPLES = Samples(torch.ones(2, 3, 4, 4), PROMPTS, torch.zeros(2, 5), 7)
VIDEO = SAMPLES._replace(images=torch.ones(2, 3, 6, 4, 4))


def first_two(x: Any, texts: Any, threshold: float = 0.5) -> Any:
    return {"images": x, "prompts": texts, "threshold": threshold}


def swapped(prompts: Any, images: Any) -> Any:
    return {"images": images, "prompts": prompts}


def everything(images: Any, prompts: Any, metadata: Any, *, group: Any, latents: Any = None) -> Any:
    return {"images": images, "prompts": prompts, "metadata": metadata, "group": group, "latents": latents}


def of_latents(latents: Any, prompts: Any) -> Any:
    return {"latents": latents, "prompts": prompts}


def of_videos(videos: Any, prompts: Any) -> Any:
    return {"videos": videos, "prompts": prompts}


def after_a_default(images: Any, prompts: Any, only_strict: bool = True, metadata: Any = None) -> Any:
    return {"images": images, "metadata": metadata, "only_strict": only_strict}


def arguments(*args: Any, **kwargs: Any) -> Any:
    return {"images": args[0], "prompts": args[1], "count": len(args) + len(kwargs)}


class Scorer:
    def __call__(self, images: Any, prompts: Any, *, metadata: Any) -> Any:
        return {"images": images, "prompts": prompts, "metadata": metadata}


METADATA = [{"count": 3}, {}]
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (first_two, {"images": SAMPLES.images, "prompts": texts(PROMPTS), "threshold": 0.5}),
    (swapped, {"images": SAMPLES.images, "prompts": texts(PROMPTS)}),
    (everything, {"metadata": METADATA, "group": 7, "latents": SAMPLES.latents}),
    (of_latents, {"latents": SAMPLES.latents, "prompts": texts(PROMPTS)}),
    (after_a_default, {"metadata": METADATA, "only_strict": True}),
    (arguments, {"images": SAMPLES.images, "prompts": texts(PROMPTS), "count": 2}),
    (Scorer(), {"metadata": METADATA}),
    (functools.partial(first_two, threshold=2.0), {"images": SAMPLES.images, "threshold": 2.0}),
    (lambda images, prompts, *, latents: {"latents": latents}, {"latents": SAMPLES.latents}),
]


@pytest.mark.parametrize(("reward", "expected"), CALLS, ids=range(len(CALLS)))
def test_a_reward_is_passed_what_its_parameters_name(reward: Callable[..., Any], expected: dict[str, Any]) -> None:
    """Each by its name, as a copy; the first two are images and prompts if their names say nothing else."""
    found = signature_of(reward).call(reward, SAMPLES)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].data_ptr() != value.data_ptr(), name
        else:
            assert found[name] == value, name


def test_videos_are_passed_as_images_too() -> None:
    """A reward of images gets the whole video; what a reward takes and is not there is named in one line."""
    assert torch.equal(signature_of(of_videos).call(of_videos, VIDEO)["videos"], VIDEO.images)
    assert torch.equal(signature_of(swapped).call(swapped, VIDEO)["images"], VIDEO.images)
    for reward, says in (
        (of_videos, r"it takes videos, and these are images \[3, 4, 4\]"),
        (of_latents, "it takes latents, and there are only images here"),
        (everything, "it compares the samples of a group, and there are no groups here"),
    ):
        with pytest.raises(UsageError, match=says):
            signature_of(reward).call(reward, Samples(SAMPLES.images, PROMPTS))


def test_conditions_are_those_of_the_records(tmp_path: Path) -> None:
    """Each prompt's own image, video or sound; a prompt without one is named when the run is built."""
    Image.new("RGB", (5, 4), (255, 0, 0)).save(tmp_path / "red.png")
    frames = [Image.new("RGB", (5, 4), (255, 51 * number, 0)) for number in range(3)]
    (tmp_path / "clip.npy").write_bytes(kinds.VIDEO.write(frames))
    (tmp_path / "tone.wav").write_bytes(kinds.SOUND.write(kinds.Sound(torch.tensor([[0.5, -1.0]]), 400)))
    heard = (tmp_path / "tone.wav").read_bytes()
    prompt = Prompt("louder", image=tmp_path / "red.png", video=tmp_path / "clip.npy", audio=heard)

    def compared(images: Any, prompts: Any, condition_images: Any, condition_videos: Any, condition_audios: Any) -> Any:
        return condition_images, condition_videos, condition_audios

    (image,), (video,), (sound,) = signature_of(compared).call(compared, Samples(torch.zeros(1, 3, 4, 4), [prompt]))
    assert image.shape == (3, 4, 5)
    assert image[:, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert video.shape == (3, 3, 4, 5)
    torch.testing.assert_close(video[:, :, 0, 0], torch.tensor([[1.0] * 3, [0.0, 0.2, 0.4], [0.0] * 3]))
    assert sound.rate == 400
    torch.testing.assert_close(sound.wave, torch.tensor([[0.5, -1.0]]), rtol=0, atol=1e-4)
    check_records({"compared": compared}, [prompt])
    check_records({"swapped": swapped}, [prompt, Prompt("b")])
    refuses(
        "evaluator 'compared' takes condition_images, and prompt 'b' has none",
        check_records,
        {"compared": compared},
        [prompt, Prompt("b")],
        label="evaluator",
    )
    refuses(
        "condition_audios, and prompt 'b' has none: give its record a column audio",
        check_records,
        {"compared": compared},
        [prompt, Prompt("b", image=tmp_path / "red.png", video=tmp_path / "clip.npy")],
    )
    broken = Prompt("b", image=tmp_path / "red.png", video=b"no video", audio=b"RIFF no sound")
    with pytest.raises(UsageError, match=r"a video of 8 bytes cannot be read as a video"):
        signature_of(compared).call(compared, Samples(torch.zeros(1, 3, 4, 4), [broken]))


def test_condition_images_may_be_optional(tmp_path: Path) -> None:
    """A parameter with a default is passed them where every prompt has one, and prompts without are no error."""

    def scored(images: Any, prompts: Any, condition_images: Any = None) -> Any:
        return condition_images

    Image.new("RGB", (5, 4), (255, 0, 0)).save(tmp_path / "red.png")
    image, plain, blank = Prompt("redder", image=tmp_path / "red.png"), Prompt("b"), torch.zeros(2, 3, 4, 4)
    found = signature_of(scored)
    assert (found.takes("condition_images"), found.accepts("condition_images")) == (False, True)
    assert found.call(scored, Samples(blank, [image, plain])) is None
    assert len(found.call(scored, Samples(blank, [image, image]))) == 2
    check_records({"scored": scored}, [plain])


WRONG: list[tuple[Any, str]] = [
    (lambda images: images, r"has the signature \(images\), expected .*: it takes no prompts"),
    (lambda prompts, metadata: 0, "it takes none of images, videos, latents"),
    (lambda images, prompts, record: 0, "there is nothing to pass for its parameter record"),
    (lambda x, images, prompts: 0, "two of its parameters stand for the same"),
    (lambda images, prompts, groups, /: 0, "there is nothing to pass for its parameter groups"),
    (Scorer, "is a class, expected a function"),
    (3, "is of type int, expected a function"),
]


@pytest.mark.parametrize(("reward", "says"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_called_is_refused(reward: Any, says: str) -> None:
    """In one line that says why."""
    with pytest.raises(ValueError, match=says) as error:
        signature_of(reward)
    assert "\n" not in str(error.value)
    assert reward_problem(reward) == str(error.value)


def test_a_function_without_a_signature_gets_images_and_prompts() -> None:
    """As some functions written in C."""
    assert signature_of(max).positional == ("images", "prompts")
    assert not signature_of(max).takes("group")
    assert signature_of(everything).takes("group")
