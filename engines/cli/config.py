"""`fluvial config RECIPE [--field value ...]`: print the settings of a training run, only those that differ or all."""

import json

from fluvial.engines.cli import train
from fluvial.engines.cli.listing import JSON, drop_flag, format_paragraphs

USAGE = """usage: fluvial config RECIPE [--config FILE] [--field value ...] [--all] [--json]

Print the settings of a run that differ from RECIPE, as TOML: fluvial config grpo --sampling.group 8 > my.toml, edit it, and
fluvial train my.toml. --all prints every setting below its help. --json prints the whole run, in the format of its
config.json.

A file may be TOML, YAML or JSON. It names its recipe and the settings that differ, such as optimizer.lr; flags override it.
A list instead of one value is a sweep: one run per value. engines/run/files/examples has ten complete files.
"""
ALL = "--all"


def run(args: list[str]) -> None:
    """Print a configuration."""
    if not args:
        print(format_paragraphs(USAGE), end="")
        return
    args, as_json = drop_flag(args, JSON)
    args, whole = drop_flag(args, ALL)
    if as_json:
        from fluvial.engines.run.record import as_record

        print(json.dumps(as_record(train.configure("config", args)), indent=2))
        return
    from fluvial.engines.run.files import write

    for each in train.configure_all("config", args):
        if each.name:
            print(f"# {each.name}")
        if whole:
            print(write.write_all(each.recipe, each.config), end="")
        else:
            print(write.write_differences(each.recipe, each.config, each.base), end="")
