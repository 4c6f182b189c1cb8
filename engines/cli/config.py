"""`fluvial config RECIPE [--field value ...]`: print the configuration that a training run would have, as TOML or JSON."""

import json
from typing import Any

import tomli_w

from fluvial.engines.cli import train
from fluvial.engines.cli.listing import JSON, paragraphs, without
from fluvial.engines.run.record import as_record

USAGE = """usage: fluvial config RECIPE [--field value ...] [--json]

Print the configuration of fluvial train RECIPE with these fields, as TOML: fluvial config grpo > run.toml, edit it, and
fluvial train run.toml. What is not set is left out, and has its default. --json prints JSON, with all fields.
"""


def run(args: list[str]) -> None:
    """Print a configuration."""
    if not args or args[0] in ("-h", "--help"):
        print(paragraphs(USAGE), end="")
        return
    args, as_json = without(args, JSON)
    record = as_record(train.configure("config", args))
    print(json.dumps(record, indent=2) if as_json else tomli_w.dumps(drop_unset(record)), end="\n" if as_json else "")


def drop_unset(record: Any) -> Any:
    """Return a record without the fields that are null, which TOML cannot write and which is their default."""
    if not isinstance(record, dict):
        return record
    return {name: drop_unset(value) for name, value in record.items() if value is not None}
