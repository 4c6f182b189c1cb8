"""Adapters of a rollout server: several that act together, of several networks, and those that are unloaded."""

from pathlib import Path

import torch
from helpers.weight_servers import Served, ask, base, listed, run, served
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.models.lora import find_lora_layers


def write_lora(path: Path, rank: int, *layers: str) -> None:
    sizes = {"into": (24, 24), "out": (24, 16)}
    generator, tensors = torch.Generator().manual_seed(rank), dict[str, Tensor]()
    for layer in layers:
        inputs, outputs = sizes[layer]
        tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        tensors[f"{layer}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    save_file(tensors, path)


def test_several_adapters_act_together(tmp_path: Path) -> None:
    """Of other ranks and other layers, each with its own strength and alpha; without one of them as if it had never been."""
    server, expected = served(tmp_path), base()
    paths = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    write_lora(paths[0], 2, "into", "out")
    write_lora(paths[1], 3, "into")
    both = {"lora_nickname": ["x", "y"], "strength": [0.5, -0.2], "lora_alpha": [None, 6]}
    assert ask(server, "/v1/set_lora", lora_path=[*map(str, paths)], **both).status == 200
    with torch.no_grad():
        for path, scale in zip(paths, (0.5, -0.2 * 6 / 3), strict=True):
            held = load_file(path)
            for layer in {key.partition(".")[0] for key in held}:
                expected.get_parameter(f"{layer}.weight").add_(
                    scale * held[f"{layer}.lora_B.weight"] @ held[f"{layer}.lora_A.weight"]
                )
    torch.testing.assert_close(run(server.weights.module), run(expected), rtol=1e-4, atol=1e-5)
    (active,) = listed(server)["active"]["transformer"]
    assert (active["nickname"], active["nicknames"], active["strengths"]) == ("x,y", ["x", "y"], [0.5, -0.2])
    with_both, version = run(server.weights.module), server.weights.version
    assert ask(server, "/v1/unmerge_lora_weights").status == 200
    assert ask(server, "/v1/set_lora", **both).status == 200  # from memory
    assert torch.equal(run(server.weights.module), with_both)
    found = ask(server, "/unload_lora_adapter", lora_name="x").value
    assert (found["success"], found["loaded_adapters"], found["weight_version"]) == (True, {"y": str(paths[1])}, version + 3)
    alone = served(tmp_path)
    ask(alone, "/v1/set_lora", lora_nickname="y", lora_path=str(paths[1]), strength=-0.2, lora_alpha=6)
    assert torch.equal(run(server.weights.module), run(alone.weights.module))
    assert server.weights.list_checksums() == alone.weights.list_checksums()


def test_an_adapter_that_is_unloaded_is_forgotten(tmp_path: Path) -> None:
    """Where it acts on nothing the weights, and their version, stay as they are."""
    server = served(tmp_path)
    plain, lora = run(server.weights.module), {"lora_nickname": "a", "lora_path": str(tmp_path / "a.safetensors")}
    write_lora(tmp_path / "a.safetensors", 2, "into")
    assert ask(server, "/v1/set_lora", **lora).status == 200
    assert ask(server, "/v1/unmerge_lora_weights").value["weight_version"] == 2
    assert ask(server, "/unload_lora_adapter", lora_name="a", weight_version=9).value["weight_version"] == 2
    assert listed(server) == {"loaded_adapters": [], "active": {}}
    for path, value, says in (
        ("/v1/set_lora", {"lora_nickname": "a"}, "adapter a of transformer is not loaded"),
        ("/v1/merge_lora_weights", {}, "no adapter was set for transformer"),
        ("/unload_lora_adapter", {"lora_name": "a"}, "adapter a is not loaded"),
    ):
        answer = ask(server, path, **value)
        assert (answer.status, says in answer.value["message"]) == (400, True)
    assert ask(server, "/v1/set_lora", **lora).status == 200
    assert ask(server, "/unload_lora_adapter", lora_name="a", weight_version=9).value["weight_version"] == 9
    assert torch.equal(run(server.weights.module), plain)
    assert not find_lora_layers(server.weights.module)


def test_adapters_of_two_networks(tmp_path: Path) -> None:
    """Each has those whose target it is; a network that is no target keeps its own."""
    server = Served(nn.ModuleDict({"transformer": base(), "transformer_2": base()}).eval(), [tmp_path])
    paths = {name: tmp_path / f"{name}.safetensors" for name in "xy"}
    write_lora(paths["x"], 2, "into")
    write_lora(paths["y"], 3, "into")
    names = ["transformer", "transformer_2"]
    value = {"lora_nickname": ["x", "y"], "lora_path": [*map(str, paths.values())], "target": names}
    assert ask(server, "/v1/set_lora", **value).status == 200
    active = {name: each[0]["nicknames"] for name, each in listed(server)["active"].items()}
    assert active == {"transformer": ["x"], "transformer_2": ["y"]}
    one = {"lora_nickname": "y", "lora_path": str(paths["y"]), "target": "transformer"}
    assert ask(server, "/v1/set_lora", **one).status == 200
    assert [each[0]["nicknames"] for each in listed(server)["active"].values()] == [["y"], ["y"]]
    assert ask(server, "/unload_lora_adapter", lora_name="y").value["loaded_adapters"] == {"x": str(paths["x"])}
    assert listed(server)["active"] == {}
