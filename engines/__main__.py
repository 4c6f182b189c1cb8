"""`python -P -m fluvial.engines`, which is what torchrun starts: the same command line as `fluvial`."""

from fluvial.engines.cli.main import main

if __name__ == "__main__":
    main()
