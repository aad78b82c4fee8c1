"""bytecode: what the lines of a function read and write by name, from its code: `WIDTH`, `cfg.alpha`, `TABLE["a"][i]`.

A `NameChain` is a name and the steps that follow it. The code is read once, in order, with a stack of chains for
values. An instruction that is not known here ends the chains on the stack: what they were given to may read all of
them. So every name that a line loads is in some chain of that line.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any


@dataclass(frozen=True)
class ConstantKey:
    """A subscript that is written as a constant: the "a" of `TABLE["a"]`."""

    value: Any


@dataclass(frozen=True)
class Get:
    """The step of `table.get(key)`."""

    key: ConstantKey | NameChain


@dataclass(frozen=True)
class Within:
    """The step of `key in table`."""

    key: ConstantKey | NameChain


@dataclass(frozen=True)
class Named:
    """The step of `getattr(owner, name)`, where a chain gives the name."""

    key: NameChain


Step = str | ConstantKey | Get | Within | Named  # and NameChain


@dataclass(frozen=True)
class NameChain:
    """A name, and the steps that follow it.

    scope: "local", "free" (of a function around this one), "global", or "module" of a name that is imported.
    steps: attributes as text; subscripts as a `ConstantKey`, or as a NameChain that gives the key; and what some
    calls read.
    """

    name: str
    scope: str
    steps: tuple[Step | NameChain, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(map(_step_text, self.steps))


def _step_text(step: Step | NameChain) -> str:
    if isinstance(step, str):
        return f".{step}"
    if isinstance(step, (Get, Within)):
        step = step.key
    if isinstance(step, Named):
        return f".{{{step.key}}}"
    return f"[{step.value!r}]" if isinstance(step, ConstantKey) else f"[{step}]"


@dataclass(frozen=True)
class Use:
    """What a line does with a chain. at: the offset of its instruction, if the line may run without it (`a and cfg.b`);
    else None. callee: the chain of the function that a read value is given to, if that is known. after: the line has
    written to the chain before (`n += 1; return n`). dropped: it is called, and the result is not used."""

    chain: NameChain
    at: int | None = None
    callee: NameChain | None = None
    after: bool = False
    dropped: bool = False


@dataclass(frozen=True)
class Lines:
    """What the lines of one code object name, by line.

    updates: those of `writes` that the same instruction reads (`x += 1`): such a read by itself decides nothing. seeds:
    chains that are called, with an argument, to set a generator's state. offsets: those of all uses, with their lines.
    """

    reads: Mapping[int, tuple[Use, ...]]
    writes: Mapping[int, tuple[Use, ...]]
    updates: Mapping[int, tuple[Use, ...]]
    seeds: Mapping[int, tuple[Use, ...]]
    offsets: Mapping[int, int]


@dataclass(eq=False)
class _Load:
    """A chain on the stack, the line of its name, and what `Use` has of it."""

    chain: NameChain
    line: int
    at: int | None = None
    callee: NameChain | None = None
    after: bool = False
    dropped: bool = False


@dataclass(frozen=True, eq=False)
class _Result:
    """What a call of a chain gave, on the stack."""

    callee: _Load


@dataclass
class _Machine:
    """Reads instructions in order. `loads` holds every chain that was loaded and is not part of a longer one. `at`: the
    offset of the instruction, if its line has a jump before it."""

    code: CodeType
    stack: list[Any] = field(default_factory=list)
    loads: dict[_Load, None] = field(default_factory=dict)
    writes: dict[int, list[Use]] = field(default_factory=dict)
    updated: dict[int, list[Use]] = field(default_factory=dict)
    seeded: dict[int, list[Use]] = field(default_factory=dict)
    at: int | None = None

    @functools.cached_property
    def loaded(self) -> frozenset[str]:
        """The local variables that are read."""
        return frozenset(op.argval for op in dis.get_instructions(self.code) if op.opname.startswith("LOAD_FAST"))

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else None

    def load(self, name: str, scope: str, line: int) -> None:
        self._put(_Load(NameChain(name, scope), line, self.at))

    def _put(self, load: _Load) -> None:
        load.after = any(use.chain == load.chain for use in self.writes.get(load.line, ()))
        self.loads[load] = None
        self.stack.append(load)

    def extend(self, owner: Any, step: Step | NameChain) -> None:
        if not isinstance(owner, _Load):
            self.stack.append(None)
            return
        if owner not in self.stack:  # COPY leaves another use of it
            self.loads.pop(owner, None)
        chain = NameChain(owner.chain.name, owner.chain.scope, (*owner.chain.steps, step))
        self._put(_Load(chain, owner.line, owner.at))

    def write(self, line: int, chain: NameChain | None) -> None:
        if chain is not None:
            self.writes.setdefault(line, []).append(Use(chain, self.at))

    def scope_of(self, name: str) -> str:
        return "free" if name in self.code.co_freevars else "local"

    def run(self, op: dis.Instruction, line: int) -> None:
        """Follows one instruction (Python 3.11 to 3.13)."""
        name, argument, depth = op.opname, op.argval, op.arg or 0
        if name in _NO_EFFECT:
            return
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.load(argument, "global", line)
        elif name.startswith("LOAD_FAST") or name == "STORE_FAST_LOAD_FAST":
            names = argument if isinstance(argument, tuple) else (argument,)
            if name.startswith("STORE"):
                self.pop()
                names = names[1:]
            for local in names:
                self.load(local, "local", line)
        elif name == "LOAD_DEREF":
            self.load(argument, self.scope_of(argument), line)
        elif name == "LOAD_CONST":
            self.stack.append(ConstantKey(argument))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self.extend(self.pop(), argument)
        elif name == "BINARY_SUBSCR":
            self._subscript()
        elif name == "BINARY_OP":
            self._operate(op, line)
        elif name == "IMPORT_NAME":
            of_names, level = self.pop(), self.pop()
            self.load(argument, "module", line) if level == ConstantKey(0) and of_names != ConstantKey(
                None
            ) else self.stack.append(None)
        elif name == "IMPORT_FROM":
            self.stack.append(self.stack[-1] if self.stack else None)
            self.extend(self.pop(), argument)
        elif name == "COPY":
            self.stack.append(self.stack[-depth] if 0 < depth <= len(self.stack) else None)
        elif name == "SWAP" and 0 < depth <= len(self.stack):
            self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]
        elif name.startswith("STORE_"):
            self._store(name, argument, line)
        elif name == "CONTAINS_OP":
            owner, key = self.pop(), self.pop()
            self.extend(owner if isinstance(key, (_Load, ConstantKey)) else None, Within(_key(key)))
            self.stack[-1] = None
        elif name in ("CALL", "CALL_KW"):
            self._call(depth, named=name == "CALL_KW")
        elif name == "POP_TOP":
            if isinstance(result := self.pop(), _Result):
                result.callee.dropped = True
        elif name == "IS_OP":
            other, value = self.pop(), self.pop()
            self._test(value, other == ConstantKey(None))
            self.stack.append(None)
        elif name.endswith(("_IF_NONE", "_IF_NOT_NONE")):
            self._test(self.pop(), True)
        elif name.startswith("POP_JUMP") or name == "UNARY_NOT":
            self._truth(self.pop())
            self.stack.clear() if name != "UNARY_NOT" else self.stack.append(None)
        elif name == "RETURN_VALUE" and isinstance(value := self.pop(), _Load):
            value.callee = RETURNED
        elif name != "TO_BOOL":  # which comes before a jump or a `not` since 3.13: these take the truth
            self.stack.clear()

    def _subscript(self) -> None:
        key, owner = self.pop(), self.pop()
        if isinstance(key, _Load):
            self.extend(owner, key.chain)
        elif isinstance(key, ConstantKey):
            self.extend(owner, key)
        else:
            self.stack.append(None)

    def _operate(self, op: dis.Instruction, line: int) -> None:
        self.pop()
        left = self.pop()
        if op.argrepr.endswith("=") and isinstance(left, _Load):
            self.loads.pop(left, None)
            self.updated.setdefault(line, []).append(Use(left.chain, self.at))
        self.stack.append(None)

    def _call(self, arguments: int, named: bool) -> None:
        if named:
            self.pop()  # the names
        given = [self.pop() for _ in range(arguments)]
        callee = self.pop()
        if isinstance(callee, _Load) and given and not named:
            first, chain = given[-1], callee.chain
            if chain in _BY_NAME and len(given) > 1 and isinstance(given[-2], (ConstantKey, _Load)):
                name = _key(given[-2])
                self.extend(first, name.value if isinstance(name, ConstantKey) else Named(name))
                return
            self._test(first, chain == _IS_INSTANCE)
            if chain == _TYPE and len(given) == 1:
                self.extend(first, "__class__")
                return
            last = chain.steps[-1] if chain.steps else chain.name
            if last in ("get", "getenv") and isinstance(first, (ConstantKey, _Load)):
                self.loads.pop(callee, None)
                shorter = _ENVIRON if last == "getenv" else NameChain(chain.name, chain.scope, chain.steps[:-1])
                self.extend(_Load(shorter, callee.line, callee.at), Get(_key(first)))
                return
            if last in _SEEDS and first != ConstantKey(None):
                self.seeded.setdefault(callee.line, []).append(Use(chain, callee.at))
        for load in given:
            if isinstance(load, _Load) and load.callee is None:
                load.callee = callee.chain if isinstance(callee, _Load) else None
        self.stack.append(_Result(callee) if isinstance(callee, _Load) else None)

    def _test(self, value: Any, for_none: bool) -> None:
        if isinstance(value, _Load) and for_none:
            value.callee = TESTED

    def _truth(self, value: Any) -> None:
        if isinstance(value, _Load):
            value.callee = TRUTH

    def _store(self, name: str, argument: Any, line: int) -> None:
        if name == "STORE_FAST" and self.stack and argument in self.loaded:
            self._test(self.stack[-1], True)
        if name in ("STORE_GLOBAL", "STORE_NAME"):
            self.pop()
            self.write(line, NameChain(argument, "global"))
        elif name == "STORE_DEREF":
            self.pop()
            if argument in self.code.co_freevars:
                self.write(line, NameChain(argument, "free"))
        elif name == "STORE_ATTR":
            owner, _ = self.pop(), self.pop()
            self.write(line, self._longer(owner, argument))
        elif name == "STORE_SUBSCR":
            key, owner, _ = self.pop(), self.pop(), self.pop()
            self.write(line, self._longer(owner, _key(key) if isinstance(key, (_Load, ConstantKey)) else None))
        elif name == "STORE_FAST_STORE_FAST":
            self.pop()
            self.pop()
        else:
            self.pop()

    def _longer(self, owner: Any, step: str | ConstantKey | NameChain | None) -> NameChain | None:
        """The chain of what is written; its owner is not read by that."""
        if not isinstance(owner, _Load) or step is None:
            return None
        self.loads.pop(owner, None)
        return NameChain(owner.chain.name, owner.chain.scope, (*owner.chain.steps, step))


def _key(key: _Load | ConstantKey) -> ConstantKey | NameChain:
    return key.chain if isinstance(key, _Load) else key


RETURNED = NameChain("return", "return")  # what the value of a `return` is given to
TESTED = NameChain("is None", "tested")  # to a test that reads nothing of it, or a variable, whose own chains say it
TRUTH = NameChain("bool", "tested")  # to a test of its truth
_ENVIRON = NameChain("os", "module", ("environ",))
_IS_INSTANCE = NameChain("isinstance", "global")
_TYPE = NameChain("type", "global")
_SEEDS = {"seed", "setstate", "set_state"}  # of a generator
_BY_NAME = {NameChain("getattr", "global"), NameChain("hasattr", "global")}  # `getattr(cfg, "alpha")` reads `cfg.alpha`
_NO_EFFECT = {
    "RESUME",
    "CACHE",
    "NOP",
    "PRECALL",
    "KW_NAMES",
    "EXTENDED_ARG",
    "COPY_FREE_VARS",
    "MAKE_CELL",
    "PUSH_NULL",
}


_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)


@functools.lru_cache(maxsize=4096)
def lines_of(code: CodeType) -> Lines:
    """What each line of a function names. An `x += 1` of a variable that outlives the call is no read of it, but one of
    `updates`."""
    machine = _Machine(code)
    jumping: set[int] = set()  # lines
    start: int | None = None  # of an instruction, with what extends its argument
    for op in dis.get_instructions(code):
        line = op.positions.lineno if op.positions and op.positions.lineno else code.co_firstlineno
        start = op.offset if start is None else start
        machine.at = start if line in jumping else None
        machine.run(op, line)
        jumping |= {line} if op.opcode in _JUMPS else set()
        start = start if op.opname == "EXTENDED_ARG" else None
    reads: dict[int, list[Use]] = {}
    for load in machine.loads:
        reads.setdefault(load.line, []).append(Use(load.chain, load.at, load.callee, load.after, load.dropped))
    found = (reads, machine.writes, machine.updated, machine.seeded)
    offsets = {use.at: line for uses in found for line, x in uses.items() for use in x if use.at is not None}
    named, writes, updates, seeds = ({line: tuple(dict.fromkeys(x)) for line, x in uses.items()} for uses in found)
    return Lines(named, writes, updates, seeds, offsets)
