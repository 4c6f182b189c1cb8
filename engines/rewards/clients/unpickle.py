"""Read a pickle of numbers, texts, lists and dicts, without running anything that it names.

pickle.loads calls whatever function a pickle names: who answers a request would run code in the training process. This is a
small interpreter of the opcodes that plain data needs. Any other opcode ends it.
"""

import pickletools
import struct
from typing import Any, NamedTuple

MOST_OPCODES = 1_000_000
NAMES = {
    "numpy dtype",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
}  # a score is often a number of numpy
FORMATS = {"f8": "<d", "f4": "<f", "f2": "<e", "i8": "<q", "i4": "<i", "u1": "<B", "b1": "<?"}
PLAIN = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES",
    "BINBYTES",
}  # fmt: skip
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class ForbiddenPickleError(Exception):
    """The pickle is damaged, or holds more than plain data."""


class _Mark:
    """Start of the elements of a list, tuple or dict on the stack."""


class _Name(NamedTuple):
    """A function that the pickle names; it is never looked up."""

    name: str


class _Dtype(NamedTuple):
    """A dtype of numpy."""

    code: str


def loads(data: bytes) -> Any:
    """Return the value of a pickle of None, bools, numbers, numbers of numpy, texts, bytes, lists, tuples and dicts.

    Raises:
        ForbiddenPickleError: it holds anything else, or is damaged.
    """
    try:
        return _Machine().run(data)
    except ForbiddenPickleError:
        raise
    except Exception as error:  # a damaged pickle takes from an empty stack, or appends to what is no list
        raise ForbiddenPickleError("the pickle is damaged") from error


class _Machine:
    """The stack and the memory of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """Return what is left on the stack at the end."""
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > MOST_OPCODES:
                raise ForbiddenPickleError(f"the pickle has more than {MOST_OPCODES} operations")
            if opcode.name == "STOP":
                (value,) = self.stack
                return value
            self.step(opcode.name, argument)
        raise ForbiddenPickleError("the pickle has no end")

    def step(self, name: str, argument: Any) -> None:
        """Carry out an opcode."""
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in PLAIN:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            stack.append(_Mark)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in TUPLES:
            count = TUPLES[name]
            taken = tuple(stack.pop() for _ in range(count))
            stack.append(taken[::-1])
        elif name == "TUPLE":
            stack.append(tuple(self.marked()))
        elif name in ("APPEND", "APPENDS"):
            values = self.marked() if name == "APPENDS" else [stack.pop()]
            self.top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self.marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            self.top(dict).update(zip(values[::2], values[1::2], strict=True))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self.memory[len(self.memory) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memory[argument])
        else:
            self.numpy(name, argument)

    def numpy(self, name: str, argument: Any) -> None:
        """Carry out an opcode of a number of numpy, the only object that is known."""
        stack = self.stack
        if name in ("GLOBAL", "STACK_GLOBAL"):
            attribute = "" if name == "GLOBAL" else stack.pop()
            found = argument if name == "GLOBAL" else f"{stack.pop()} {attribute}"
            if found not in NAMES:
                raise ForbiddenPickleError(f"the pickle names {str(found)[:80].replace(' ', '.')}, which is not plain data")
            stack.append(_Name(found))
        elif name == "REDUCE":
            arguments, function = stack.pop(), self.popped(_Name)
            if function.name == "numpy dtype":
                stack.append(_Dtype(arguments[0]))
            else:
                dtype, raw = arguments
                if not isinstance(dtype, _Dtype) or dtype.code not in FORMATS:
                    raise ForbiddenPickleError("the pickle holds an array or an object of numpy, which is not plain data")
                (value,) = struct.unpack(FORMATS[dtype.code], raw)
                stack.append(value)
        elif name == "BUILD":
            state = stack.pop()
            self.top(_Dtype)
            if state[1] not in ("<", "|"):
                raise ForbiddenPickleError("the pickle holds big-endian numbers")
        else:
            raise ForbiddenPickleError(f"the pickle has the operation {name}, which plain data does not need")

    def marked(self) -> list[Any]:
        """Take what stands above the last mark, and the mark."""
        start = len(self.stack) - 1 - self.stack[::-1].index(_Mark)
        values = self.stack[start + 1 :]
        del self.stack[start:]
        return values

    def top(self, kind: type) -> Any:
        """Return the top of the stack, which must be of a type."""
        value = self.stack[-1]
        if type(value) is not kind:
            raise ForbiddenPickleError("the pickle is damaged")
        return value

    def popped(self, kind: type) -> Any:
        """Take the top of the stack, which must be of a type."""
        value = self.top(kind)
        self.stack.pop()
        return value
