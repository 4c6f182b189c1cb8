"""`python -P -m fluvial.engines`: the command line of `fluvial`, as a module for torchrun."""

from fluvial.engines.cli.main import main

if __name__ == "__main__":
    main()
