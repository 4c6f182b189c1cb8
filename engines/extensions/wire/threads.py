"""Work on several threads whose results are taken as they come."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], *, at_once: int
) -> Iterator[Iterator[tuple[int, Result | BaseException]]]:
    """Yield the place of each item with its result, or with what the function raised; drop work that is no longer needed.

    The threads are daemons: one that waits for a server keeps no process from ending.
    """
    left, over = list(reversed(list(enumerate(items)))), threading.Event()
    done: SimpleQueue[tuple[int, Result | BaseException]] = SimpleQueue()

    def work() -> None:
        while left and not over.is_set():
            try:
                place, item = left.pop()
            except IndexError:  # another thread was faster
                return
            try:
                done.put((place, function(item)))
            except BaseException as error:
                done.put((place, error))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield (done.get() for _ in items)
    finally:
        over.set()
