"""`fluvial models`: list the models that can be trained, one per line."""

from fluvial.engines.cli.listing import installed
from fluvial.engines.errors import UsageError
from fluvial.models.catalogue import KNOWN

FOOT = """
A model is named by its id on the Hub or by its folder. Other models of the same pipelines work as well. Models that predict
epsilon take the sampler ddim (recipe ddpo), models that predict a velocity take the others. Text encoders and VAE come on
top; fluvial plan works out the memory of training.

Any other flow pipeline of diffusers with a transformer can be named too. Without an adapter its calls are recorded and
replayed, and it is rejected with a reason if the replay gives another velocity. Your own adapter is named as module:name.
"""


def run(args: list[str]) -> None:
    """Print the table."""
    if args and args[0] not in ("-h", "--help"):
        raise UsageError(f"models takes no argument, got {args[0]!r} (fluvial --help)")
    print(f"{'--model':<48} {'makes':<9} {'predicts':<9} network, memory of its weights in bfloat16")
    print(f"{'handwriting':<48} {'codes':<9} {'velocity':<9} 0.6 million parameters, built in")
    print(f"{'handwriting-unet':<48} {'codes':<9} {'epsilon':<9} 0.7 million parameters, built in")
    print(f"{'words':<48} {'words':<9} {'velocity':<9} 1.3 million parameters, built in; needs fluvial[words]")
    for known in KNOWN:
        size = f"{known.billions:g} billion parameters, {known.gibibytes:.0f} GiB ({known.pipeline})"
        print(f"{known.example:<48} {known.makes:<9} {known.prediction:<9} {size}")
    print(FOOT, end="")
    for name, source in installed("models").items():
        print(f"\nAn installed package has an adapter for {name}: {source}")
