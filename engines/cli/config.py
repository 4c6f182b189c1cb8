"""`fluvial config RECIPE [--field value ...]`: print the configuration that a training run would have, as JSON."""

import json

from fluvial.engines.cli import train
from fluvial.engines.cli.listing import JSON, paragraphs, without
from fluvial.engines.run.record import as_record

USAGE = """usage: fluvial config RECIPE [--field value ...] [--json]

Print the configuration of fluvial train RECIPE with these fields, as JSON. fluvial train --config FILE trains it; FILE may
be TOML as well. JSON is its only form, so that --json may be typed or not.
"""


def run(args: list[str]) -> None:
    """Print a configuration."""
    if not args or args[0] in ("-h", "--help"):
        print(paragraphs(USAGE), end="")
        return
    args, _ = without(args, JSON)  # the only form that it has
    print(json.dumps(as_record(train.configured("config", args)), indent=2))
