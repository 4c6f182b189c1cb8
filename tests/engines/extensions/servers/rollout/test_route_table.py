"""The table of routes in serve's README: it has each route of the server, and says what each is tested against."""

import asyncio
import re
from pathlib import Path

import pytest
from helpers import asgi
from helpers import rollout_servers as servers
from starlette.routing import Route

ROOT = Path(__file__).parents[5]
TESTS = Path(__file__).parent
HEADER = ["route", "sglang", "`fluvial serve`", "tested against"]


def table() -> list[list[str]]:
    lines = (ROOT / "engines/extensions/servers/README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    start = cells.index(HEADER) + 2
    return cells[start : start + next(n for n, row in enumerate(cells[start:]) if len(row) < len(HEADER))]


def paths(cell: str) -> list[str]:
    return re.findall(r"`(?:GET |POST )?(/[^` ]+)`", cell)


@pytest.fixture(scope="module")
def routes() -> set[str]:
    app = servers.served().app
    while not hasattr(app, "routes"):
        app = app.app
    return {re.sub(r"\{.*\}", "NAME", route.path) for route in app.routes if isinstance(route, Route)}


def test_each_route_of_the_server_is_in_the_table(routes: set[str]) -> None:
    """And no cell is empty."""
    assert all(len(row) == len(HEADER) and all(row) for row in table())
    *has, lacks = table()
    named = {path for row in has for path in paths(row[0])}
    assert routes == named | {"/v1/model_info"}
    assert (lacks[2], lacks[3]) == ("no", "404")
    app = servers.served().app
    for path in paths(lacks[0]):
        assert asyncio.run(asgi.call(app, path, {})).status == 404, path


def test_each_route_of_the_table_is_asked_in_a_test_with_sglangs_code() -> None:
    tests = "".join((TESTS / f"test_sglang_{name}.py").read_text() for name in ("form", "routes"))
    by_client = {"/v1/set_lora": "client.set_lora(", "/v1/unmerge_lora_weights": "client.unset_lora("}
    by_client |= {f"/v1/videos{each}": "client.generate_video(" for each in ("", "/NAME", "/NAME/content")}
    for row in table()[:-1]:
        for path in paths(row[0]):
            asked = f'"{path.replace("NAME", "tiny")}"' in tests
            assert asked or (path in by_client and by_client[path] in tests), path
