"""A save that dies, at whatever moment, leaves the newest checkpoint whole: the one before, or the new one."""

import os
import tempfile
from collections.abc import Iterable
from typing import Any

import pytest
from helpers import launch
from workers.kills import SCENES


def every(scene: str, *, url: bool, full: bool, background: bool) -> tuple[str, tuple[str, dict[str, Any]]]:
    """Return a name and a case of kills.every_moment."""
    name = f"{scene}, {'url' if url else 'disk'}, {'full' if full else 'killed'}{', background' if background else ''}"
    return name, ("every", {"scene": scene, "url": url, "full": full, "background": background})


KILLED = dict(
    [every(scene, url=url, full=False, background=False) for scene in SCENES for url in (False, True)]
    + [every("an update again", url=url, full=False, background=True) for url in (False, True)]
)
FULL = dict(
    [every(scene, url=False, full=True, background=False) for scene in ("a new update", "an update again")]
    + [every("an update again", url=True, full=True, background=True)]
)
RANDOM = {
    name: ("any", {"rounds": 16, "url": "url" in name, "background": "background" in name})
    for name in ("disk", "disk, background", "url")
}
SHORT = ("a new update, disk, killed", "an update again, disk, full", "an update again, url, full, background")


def some(names: Iterable[str]) -> list[Any]:
    """Return names as parameters; `make test` runs one case of each kind, `make test-all` every one."""
    return [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in names]


def report(name: str) -> dict[str, Any]:
    """Return what the saves of a case left behind; in memory where there is such a folder, because they sync often."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="kills-", dir=memory) as folder:
        found: dict[str, Any] = launch.call("workers.kills:explore", folder, *{**KILLED, **FULL, **RANDOM}[name])
    return found


@pytest.mark.parametrize("name", some(KILLED))
def test_killed_at_every_operation(name: str) -> None:
    """Both outcomes are met, no other, and the next save clears up what is left."""
    found = report(name)
    assert {*found["outcomes"]} == {*map(str, SCENES[name.split(",")[0]][2])}
    assert found["operations"] >= 10
    assert sum(found["outcomes"].values()) == found["operations"] + 1


@pytest.mark.parametrize("name", some(FULL))
def test_the_disk_full_at_every_operation(name: str) -> None:
    """And full from then on: the message says so, and the one before is the newest, or the new one is there."""
    found = report(name)
    assert {*found["outcomes"]} == {*map(str, SCENES[name.split(",")[0]][2])}
    assert sum(found["outcomes"].values()) == found["operations"] + 1


@pytest.mark.parametrize("name", some(RANDOM))
def test_killed_at_any_time(name: str) -> None:
    """Some saves get through between the kills, and nothing is lost that was there."""
    found = report(name)
    assert found["updates"] == sorted(found["updates"])
    assert len(found["updates"]) == 17
    assert found["updates"][-1] > 5
