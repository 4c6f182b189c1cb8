"""Errors of a message, in one line."""


class WireError(ValueError):
    """A message breaks the schema, or is larger than its receiver takes. The text is one line for the other side."""

    def __init__(self, problem: str) -> None:
        super().__init__(" ".join(problem.split()))
