"""Errors that the user can correct. The command line prints them in one line and exits, without a traceback."""


class FluvialError(Exception):
    """Base class of all errors that the user can correct."""


class UsageError(FluvialError, ValueError):
    """The request cannot be carried out as stated. Exit code 2."""


class RunError(FluvialError, RuntimeError):
    """The run cannot go on. Exit code 1. What was saved before stays as it is."""


class ElsewhereError(RunError):
    """Another rank failed; its own message says why."""


class LostProcessError(RunError):
    """Another process of the run died or no longer answers."""
