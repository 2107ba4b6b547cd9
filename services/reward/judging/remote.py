"""Stand-ins for a program's functions, classes and objects, for use in tests.

They define which operation of a test is sent to the program, and which is decided here. An object of the program must
not decide whether a test passes, unless the test created that object itself from a class of the program.

Always allowed are operations that only read data: calls, attributes, items, iteration, length, truth, conversion.
Operations that an object of the program would decide, or from which it could learn an expected result (`==`, order,
arithmetic with a second operand, `in`, `isinstance`), are sent only if an operand was created by the test from a class
that it names; the verdict then reports this (`World.weaker`). Otherwise `==` with such an object is False and the other
operations are errors, so an object that claims to equal everything equals nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from services.reward.judging.program import Program

MAX_ITEMS = 1_000_000
FIRST_BATCH, MAX_BATCH = 1, 256
READABLE = ("__name__", "__doc__", "__dict__")


class Refused(TypeError):
    """An operation that the program's own object would decide."""


class World:
    """All stand-ins of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.classes: set[int] = set()
        """Handles of classes that the tests use by name."""
        self.made_by_tests: set[int] = set()
        """Handles of objects that tests made from those classes, or computed from such objects by operators."""
        self.weaker: set[str] = set()
        """Names of types whose objects decided the result of a test."""
        self._stand_ins: dict[int, RemoteObject] = {}
        program.make_handle = self.make
        program.number_of = number_of

    def make(self, number: int, what: str, type_name: str) -> RemoteObject:
        """The stand-in for a handle; the same for the same number."""
        if number not in self._stand_ins:
            kind = {"async": AsyncFunction, "iterator": RemoteIterator}.get(what, RemoteObject)
            self._stand_ins[number] = kind(Identity(self, number, what, type_name))
        return self._stand_ins[number]

    def may_decide(self, *operands: Any) -> bool:
        """Whether one of the operands was created by the test; if so, the verdict is marked as weaker."""
        identities = [identity_of(operand) for operand in operands if isinstance(operand, RemoteObject)]
        if not any(identity.number in self.made_by_tests for identity in identities):
            return False
        self.weaker.update(identity.type_name for identity in identities)
        return True


@dataclass(frozen=True)
class Identity:
    """The object of the program that a stand-in represents."""

    world: World
    number: int
    what: str
    type_name: str


def identity_of(stand_in: RemoteObject) -> Identity:
    """Identity of a stand-in, without a request to the program."""
    identity: Identity = object.__getattribute__(stand_in, "_stand_in_for")
    return identity


def number_of(value: Any) -> int | None:
    """The handle of a stand-in, None for anything else."""
    return identity_of(value).number if isinstance(value, RemoteObject) else None


def _ask(stand_in: RemoteObject, kind: str, *operands: Any) -> Any:
    return identity_of(stand_in).world.program.ask(kind, *operands)


def _read(stand_in: RemoteObject, operation: str, *operands: Any) -> Any:
    return _ask(stand_in, "do", operation, (stand_in, *operands))


def _decide(operation: str, *operands: Any) -> Any:
    stand_in = next(operand for operand in operands if isinstance(operand, RemoteObject))
    identity = identity_of(stand_in)
    if not identity.world.may_decide(*operands):
        raise Refused(
            f"an object of type {identity.type_name}, which the program defines, must not determine the result "
            "of a test"
        )
    result = _ask(stand_in, "do", operation, operands)
    if isinstance(result, RemoteObject):
        identity.world.made_by_tests.add(identity_of(result).number)
    return result


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected a value of type {kind.__name__}, got {type(value).__name__}")
    return value


class RemoteObject:
    """Stand-in for an object of the program that is not plain data."""

    __slots__ = ("_stand_in_for",)

    def __init__(self, identity: Identity) -> None:
        object.__setattr__(self, "_stand_in_for", identity)

    # ---- reading

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = _ask(self, "call", self, args, kwargs)
        identity = identity_of(self)
        if identity.number in identity.world.classes and isinstance(result, RemoteObject):
            identity.world.made_by_tests.add(identity_of(result).number)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in READABLE:
            raise AttributeError(name)
        return _ask(self, "get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return _read(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _read(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _read(self, "delitem", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(_read(self, "iter"))

    def __bool__(self) -> bool:
        return _read(self, "bool") is True

    def __len__(self) -> int:
        return int(_of_type(int, _read(self, "len")))

    def __str__(self) -> str:
        return str(_of_type(str, _read(self, "str")))

    def __repr__(self) -> str:
        return str(_of_type(str, _read(self, "repr")))

    def __int__(self) -> int:
        return int(_of_type(int, _read(self, "int")))

    def __float__(self) -> float:
        return float(_of_type(float, _read(self, "float")))

    def __index__(self) -> int:
        return int(_of_type(int, _read(self, "index")))

    def __abs__(self) -> Any:
        return _read(self, "abs")

    def __neg__(self) -> Any:
        return _read(self, "neg")

    def __round__(self, digits: int | None = None) -> Any:
        return _read(self, "round", *([] if digits is None else [digits]))

    # ---- deciding

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        if self is other or not identity_of(self).world.may_decide(self, other):
            return self is other
        return _decide("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        if self is other or not identity_of(self).world.may_decide(self, other):
            return self is not other
        return _decide("ne", self, other) is True

    def __contains__(self, item: Any) -> bool:
        if not isinstance(item, RemoteObject):
            return any(item == member for member in self)
        return _decide("contains", self, item) is True

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and _decide("isinstance", instance, self) is True


def _operator(operation: str, is_swapped: bool) -> Callable[[RemoteObject, Any], Any]:
    def operate(self: RemoteObject, other: Any) -> Any:
        return _decide(operation, other, self) if is_swapped else _decide(operation, self, other)

    return operate


for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _operator(_name, False))
for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    _operation = f"{_name}_" if _name in ("and", "or") else _name
    setattr(RemoteObject, f"__{_name}__", _operator(_operation, False))
    setattr(RemoteObject, f"__r{_name}__", _operator(_operation, True))


class RemoteIterator(RemoteObject):
    """A generator or another iterator of the program."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        """Items in growing batches: one at first, so that an endless generator is not run far ahead of a test."""
        size, total = FIRST_BATCH, 0
        while total < MAX_ITEMS:
            items = _of_type(list, _ask(self, "take", self, size))
            yield from items
            if len(items) < size:
                return
            total += size
            size = min(2 * size, MAX_BATCH)
        raise Refused(f"an iterator of the program yields more than {MAX_ITEMS} items")

    def __next__(self) -> Any:
        return _read(self, "next")


class AsyncFunction(RemoteObject):
    """An `async def` of the program: a call here returns an awaitable, and the program runs it to its end."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        async def result() -> Any:
            return _ask(self, "call", self, args, kwargs)

        return result()


def _program_doc(stand_in: RemoteObject) -> Any:
    return _ask(stand_in, "get", stand_in, "__doc__")


for _kind in (RemoteObject, RemoteIterator, AsyncFunction):  # otherwise a test would see the docstrings above
    _kind.__doc__ = property(_program_doc)  # type: ignore[assignment]
