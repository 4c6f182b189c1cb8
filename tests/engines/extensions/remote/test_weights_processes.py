"""Weight sync in several processes: two ranks push what one does, and a trainer that is killed leaves nothing to take."""

import asyncio
from pathlib import Path

import asgi
import launch
import pushes
import pytest
import torch
from weight_servers import adapted, base, engine_of, run, served

from fluvial.engines.engine.world import init_world
from fluvial.engines.extensions.remote.push_folder import LOCK
from fluvial.engines.extensions.remote.weight_sync import WeightSync


def test_two_ranks_push_what_one_does(tmp_path: Path) -> None:
    """The same bytes, and a server that computes the same."""
    main, other = launch.on_ranks(2, "pushes:pushes", tmp_path / "two")
    with init_world() as world:
        one = pushes.pushes(world, str(tmp_path / "one"))
    assert main == one
    for method, found in other.items():
        assert found == {name: one[method][name] for name in ("failed", "without servers")}
    assert all(found["sent"] for found in one.values())
    assert one["lora"]["without servers"] == "no server took the weights of update 4: there is none"
    assert list((tmp_path / "two").iterdir()) == []


@pytest.mark.parametrize("method", ["auto", "full"])
def test_a_trainer_that_is_killed_leaves_nothing_to_take(tmp_path: Path, method: str) -> None:
    """Its last complete push stays until another trainer comes; the one it was writing is hidden."""
    with launch.Process("pushes:killed", tmp_path, method, environment=launch.environment()) as process:
        assert process.wait(120) == -9
    (left,) = tmp_path.iterdir()
    names = sorted(path.name for path in left.iterdir())
    whole, half = ("lora-1", ".lora-2") if method == "auto" else ("weights-1", ".weights-2")
    assert names == sorted([LOCK, whole, half])
    server = served(tmp_path)
    before = run(server.weights.module)

    def asked(name: str) -> asgi.Answer:
        if method == "auto":
            call = asgi.call(server.app, "/v1/set_lora", {"lora_nickname": "a", "lora_path": str(left / name)})
        else:
            call = asgi.call(server.app, "/update_weights_from_disk", {"model_path": str(left / name)})
        return asyncio.run(call)

    assert asked(half).status == 400
    assert asked(half).value["message"].endswith("is hidden, as the files of an unfinished export are")
    (left / half).rename(left / "named")  # even then
    assert asked("named").status == 400
    assert torch.equal(run(server.weights.module), before)
    assert server.weights.version == 0
    assert asked(whole).status == 200
    with init_world() as world:
        sync = WeightSync(world, folder=tmp_path)
        assert not left.exists()
        again = WeightSync(world, folder=tmp_path)  # of a trainer beside it, whose folder is in use
        assert sync.path.exists()
        assert sync.push(engine_of(adapted(base()), world), 1, [server.client]) == {}
        again.close()
        sync.close()
