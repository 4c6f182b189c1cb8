"""A malicious page in a real browser on the machine of a server: nothing that it sends changes or stops anything."""

import json
import time
from pathlib import Path

import pytest
from helpers import chromium, launch

from fluvial.engines.extensions.wire.client import HttpClient

CHANGES = ("/release_memory_occupation", "/v1/set_lora", "/v1/unmerge_lora_weights", "/update_weights_from_disk")
PATHS = (*CHANGES, "/v1/images/generations", "/rollout/generate")
# Ways in which a page of another site sends a request without asking first, or asks and is answered no.
PAGE = """<!doctype html><title>attack</title><body><script>
const base = BASE, paths = PATHS, body = JSON.stringify({prompt: "1", lora_nickname: "x", model_path: "/"});
const types = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"];
const told = [];
async function ask(url, options) {
  try { const reply = await fetch(url, options); told.push(reply.type === "opaque" ? 0 : reply.status); }
  catch (error) { told.push(0); }
}
async function attack() {
  for (const path of paths) {
    for (const type of types) for (const mode of ["no-cors", "cors"])
      await ask(base + path, {method: "POST", mode, body, headers: {"Content-Type": type}});
    await ask(base + path, {method: "POST", mode: "no-cors", body: new Blob([body])});
    await ask(base + path, {method: "PUT", mode: "cors", body});
    navigator.sendBeacon(base + path, new Blob([body], {type: "text/plain"}));
    for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.name = "f" + Math.random();
      const form = document.body.appendChild(document.createElement("form"));
      Object.assign(form, {action: base + path, method: "POST", enctype, target: frame.name});
      const field = form.appendChild(document.createElement("input"));
      Object.assign(field, {name: body.slice(0, -1) + ', "x": "', value: '"}'});
      form.submit();
      await new Promise(done => setTimeout(done, 50));
    }
  }
  window.over = true;
}
attack();
</script>"""


@pytest.mark.long
@pytest.mark.skipif(chromium.binary() is None, reason="needs Chromium: apt-get install chromium")
def test_a_page_stops_changes_and_reads_nothing(tmp_path: Path) -> None:
    """By fetch in all modes, beacons and forms; a program on the machine is obeyed afterwards."""
    with launch.start("serve", "helpers.tiny_jobs:Tiny", "--port", "0", "--micro-batch", "1", "--steps", "2") as server:
        url, until = server.address(), time.monotonic() + 240
        page = tmp_path / "attack.html"
        page.write_text(PAGE.replace("BASE", json.dumps(url)).replace("PATHS", json.dumps(PATHS)))
        client = HttpClient(url)
        with chromium.tab() as tab:
            tab.open(page)
            while not tab.value("window.over === true"):
                assert time.monotonic() < until, "the page does not end"
                time.sleep(0.1)
            answers = tab.value("told")
            sent = [each for each in tab.requests() if each.startswith(url)]
        assert {each.removeprefix(url) for each in sent} == {*PATHS}
        assert answers == [0] * (10 * len(PATHS))  # it reads not even a status
        health = client.get("/health")
        assert (health["released"], health["weight_version"], health["samples"]) == (False, 0, 0)
        assert client.get("/v1/list_loras")["loaded_adapters"] == []
        assert client.post("/release_memory_occupation", {})["success"] is True
        assert client.get("/health")["released"] is True
        assert server.poll() is None
        assert server.stderr == ""
