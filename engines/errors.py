"""Errors that a person can mend. The command line prints them in one line and exits; they are never a traceback."""


class FluvialError(Exception):
    """Anything that a person did or can mend."""


class UsageError(FluvialError, ValueError):
    """What was asked for cannot be done as asked: exit code 2."""


class RunError(FluvialError, RuntimeError):
    """The run cannot go on: exit code 1. What was saved before stays as it is."""


class ElsewhereError(RunError):
    """Another rank could not go on, and says so itself."""


class LostProcessError(RunError):
    """Another process of the run died, or no longer answers."""
