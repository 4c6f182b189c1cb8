"""Read a pickle of numbers, texts, lists and dicts, without running anything that it names.

pickle.loads calls whatever function a pickle names: who answers a request would run code in the training process. Here the
opcodes of a pickle are compared with those of plain data before it is read, and its names are looked up in a table
of numpy's numbers alone.
"""

import io
import pickle
import pickletools
import struct
from typing import Any

MOST_OPCODES = 1_000_000
FORMATS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}
OPCODES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "SHORT_BINBYTES BINBYTES MARK EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "TUPLE MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)  # the last four make numbers of numpy


class ForbiddenPickleError(Exception):
    """The pickle is damaged, or holds more than plain data."""


class _Dtype:
    """A dtype of numpy, as the pickle of a number makes it."""

    def __init__(self, code: str, *flags: object) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise ForbiddenPickleError("the pickle holds big-endian numbers")


class _Scalar:
    """The function of numpy that makes a number, in whose place this one stands."""

    __slots__ = ()  # a pickle cannot set attributes

    def __call__(self, dtype: Any, raw: bytes) -> Any:
        if not isinstance(dtype, _Dtype) or dtype.code not in FORMATS:
            raise ForbiddenPickleError("the pickle holds an array or an object of numpy, which is not plain data")
        (value,) = struct.unpack(FORMATS[dtype.code], raw)
        return value


# A score is often a number of numpy.
NAMES: dict[str, Any] = {
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray.scalar": _Scalar(),
    "numpy._core.multiarray.scalar": _Scalar(),
}


class Nowhere(io.StringIO):
    """File that keeps nothing."""

    def write(self, text: str) -> int:
        """Return the length of a text."""
        return len(text)


class _Unpickler(pickle.Unpickler):
    """Knows the names of numbers of numpy alone, and never imports."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        full = f"{module}.{name}"
        if full not in NAMES:
            raise ForbiddenPickleError(f"the pickle names {full[:80]}, which is not plain data")
        return NAMES[full]


def loads(data: bytes) -> Any:
    """Return the value of a pickle of None, bools, numbers, numbers of numpy, texts, bytes, lists, tuples and dicts.

    Raises:
        ForbiddenPickleError: it holds anything else, or is damaged.
    """
    known = frozenset(OPCODES.split())
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > MOST_OPCODES:
                raise ForbiddenPickleError(f"the pickle has more than {MOST_OPCODES} operations")
            if opcode.name not in known:
                raise ForbiddenPickleError(f"the pickle has the operation {opcode.name}, which plain data does not need")
            if opcode.name == "LONG_BINPUT" and (argument or 0) > number:  # a place in memory that would take gigabytes
                raise ForbiddenPickleError("the pickle is damaged")
        # It raises for a stack that does not end with one value. Indented lines would be as long as the stack is deep.
        pickletools.dis(data, out=Nowhere(), indentlevel=0)
        return _Unpickler(io.BytesIO(data)).load()
    except ForbiddenPickleError:
        raise
    except Exception as error:  # a damaged pickle takes from an empty stack, or appends to what is no list
        raise ForbiddenPickleError("the pickle is damaged") from error
