"""bytecode: what the lines of a function read and write by name, from its code: `WIDTH`, `cfg.alpha`, `TABLE["a"][i]`.

A `NameChain` is a name and the steps that follow it. The code is read once, in order, with a stack of chains for
values. An instruction that is not known here ends the chains on the stack: what they were given to may read all of
them. So every name that a line loads is in some chain of that line.
"""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from fzero.capture.reads.chains import (
    PURE,
    Computed,
    ConstantKey,
    Get,
    Key,
    Lines,
    NameChain,
    Named,
    Step,
    Use,
    Within,
)


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


@dataclass(frozen=True, eq=False)
class _Made:
    """A number or a text that the line makes, on the stack. callee: of the function that made it."""

    key: Computed
    callee: _Load | None = None


_Known = (_Load, ConstantKey, _Made)  # what may be a key


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

    @functools.cached_property
    def cells(self) -> frozenset[str]:
        """The variables that lie in cells."""
        return frozenset((*self.code.co_freevars, *self.code.co_cellvars))

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else None

    def load(self, name: str, scope: str, line: int) -> None:
        self._put(_Load(NameChain(name, scope), line, self.at))

    def _put(self, load: _Load) -> None:
        load.after = any(use.chain == load.chain for use in self.writes.get(load.line, ()))
        self.loads[load] = None
        self.stack.append(load)

    def extend(self, owner: Any, step: Step | NameChain) -> None:
        if isinstance(owner, _Result):
            callee = owner.callee
            self._put(_Load(NameChain(f"{callee.chain}()", "result", (step,), callee.chain), callee.line, callee.at))
            return
        if not isinstance(owner, _Load):
            self.stack.append(None)
            return
        if owner not in self.stack:  # COPY leaves another use of it
            self.loads.pop(owner, None)
        self._put(_Load(_longer(owner.chain, step), owner.line, owner.at))

    def write(self, line: int, chain: NameChain | None) -> None:
        if chain is not None:
            self.writes.setdefault(line, []).append(Use(chain, self.at))

    def scope_of(self, name: str) -> str:
        return "free" if name in self.code.co_freevars else "local"

    def run(self, op: dis.Instruction, line: int) -> None:
        """Follows one instruction (Python 3.11 to 3.14)."""
        name, argument, depth = op.opname, op.argval, op.arg or 0
        if name in _NO_EFFECT:
            return
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            self.load(argument, "global", line)
        elif name.startswith("LOAD_FAST") or name == "STORE_FAST_LOAD_FAST":
            self._load_locals(argument if isinstance(argument, tuple) else (argument,), name.startswith("STORE"), line)
        elif name == "LOAD_DEREF":
            self.load(argument, self.scope_of(argument), line)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"):
            self.stack.append(ConstantKey(argument))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self.extend(self.pop(), argument)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and op.argrepr == "[]"):  # since 3.14
            self._subscript()
        elif name == "BINARY_OP":
            self._operate(op, line)
        elif name in ("FORMAT_VALUE", "FORMAT_SIMPLE") and not depth:
            self._make("format", [self.pop()])
        elif name == "BUILD_STRING":
            self._make("join", [self.pop() for _ in range(depth)][::-1])
        elif name == "MATCH_CLASS":
            self._match(depth)
        elif name == "IMPORT_NAME":
            self._import(argument, line)
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
            self.extend(owner if isinstance(key, _Known) else None, Within(_key(key)))
            self.stack[-1] = None
        elif name in ("CALL", "CALL_KW"):
            self._call(depth, named=name == "CALL_KW")
        elif name == "POP_TOP":
            if isinstance(result := self.pop(), (_Result, _Made)) and result.callee:
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

    def _load_locals(self, names: tuple[str, ...], stores: bool, line: int) -> None:
        """Loads these; the first one is written to if it `stores`."""
        if stores:
            self.pop()
        for local in names[stores:]:
            if local in self.cells:  # the cell itself, for a function within: LOAD_CLOSURE before Python 3.13
                self.stack.append(None)
            else:
                self.load(local, "local", line)

    def _import(self, name: str, line: int) -> None:
        of_names, level = self.pop(), self.pop()
        if level == ConstantKey(0) and of_names != ConstantKey(None):
            self.load(name, "module", line)
        else:
            self.stack.append(None)

    def _subscript(self) -> None:
        key, owner = self.pop(), self.pop()
        if isinstance(key, _Known):
            self.extend(owner, _key(key))
        else:
            self.stack.append(None)

    def _make(self, how: str, parts: list[Any], callee: _Load | None = None) -> None:
        """Puts what is made of these on the stack, where they are known."""
        known = all(isinstance(part, _Known) for part in parts)
        self.stack.append(_Made(Computed(how, tuple(map(_key, parts))), callee) if known else None)

    def _match(self, positional: int) -> None:
        """`case Kind(a, b=c)`: the attributes that it asks of the value."""
        names, kind, value = self.pop(), self.pop(), self.pop()
        keys: list[Step] = list(names.value) if isinstance(names, ConstantKey) else []
        if isinstance(kind, _Load):
            fields = _longer(kind.chain, "__match_args__")
            keys += [Named(_longer(fields, ConstantKey(i))) for i in range(positional)]
        for key in keys if isinstance(value, _Load) else ():
            self.extend(value, key)
            self.pop()
        self._test(value, True)
        self.stack.append(None)

    def _operate(self, op: dis.Instruction, line: int) -> None:
        right, left = self.pop(), self.pop()
        if op.argrepr.endswith("=") and isinstance(left, _Load):
            self.loads.pop(left, None)
            self.updated.setdefault(line, []).append(Use(left.chain, self.at))
        if op.argrepr in ("+", "-", "*", "//", "%"):
            self._make(op.argrepr, [left, right])
        else:
            self.stack.append(None)

    def _call(self, arguments: int, named: bool) -> None:
        if named:
            self.pop()  # the names
        given = [self.pop() for _ in range(arguments)]
        callee = self.pop()
        if isinstance(callee, _Load) and not named and self._reads_by_call(callee, given):
            return
        for load in given:
            if isinstance(load, _Load) and load.callee is None:
                load.callee = callee.chain if isinstance(callee, _Load) else None
        if not isinstance(callee, _Load):
            self.stack.append(None)
        elif given and not named and callee.chain in _PURE and all(isinstance(part, _Known) for part in given):
            self._make(callee.chain.name, given[::-1], callee)
        else:
            self.stack.append(_Result(callee))

    def _reads_by_call(self, callee: _Load, given: list[Any]) -> bool:
        """Calls that read, or write, what a chain says: `getattr(cfg, "alpha")`, `table.get(key)`. given: the last
        argument first. Whether this is such a call; its result is on the stack then."""
        chain = callee.chain
        if chain == _GLOBALS and not given:
            self.loads.pop(callee, None)
            self._put(_Load(NameChain("globals()", "namespace"), callee.line, callee.at))
            return True
        if not given:
            return False
        first = given[-1]
        if chain in _BY_NAME and len(given) > 1 and isinstance(given[-2], _Known):
            name = _key(given[-2])
            step = name.value if isinstance(name, ConstantKey) else Named(name)
            if chain != _SET:
                self.extend(first, step)
                return True
            self.write(callee.line, self._longer(first, name.value if isinstance(name, ConstantKey) else None))
        self._test(first, chain == _IS_INSTANCE)
        if chain in _PARTS_OF and len(given) == 1:
            self.extend(first, _PARTS_OF[chain])
            return True
        last = chain.steps[-1] if chain.steps else chain.name
        if (last == "getenv" or (last in ("get", "setdefault") and chain.steps)) and isinstance(first, _Known):
            self.loads.pop(callee, None)
            shorter = (
                _ENVIRON if last == "getenv" else NameChain(chain.name, chain.scope, chain.steps[:-1], chain.called)
            )
            self.extend(_Load(shorter, callee.line, callee.at), Get(_key(first)))
            return True
        if last in _SEEDS and first != ConstantKey(None):
            self.seeded.setdefault(callee.line, []).append(Use(chain, callee.at))
        return False

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
            self.write(line, self._longer(owner, _key(key) if isinstance(key, _Known) else None))
        elif name == "STORE_FAST_STORE_FAST":
            self.pop()
            self.pop()
        else:
            self.pop()

    def _longer(self, owner: Any, step: Step | NameChain | None) -> NameChain | None:
        """The chain of what is written; its owner is not read by that."""
        if not isinstance(owner, _Load) or step is None:
            return None
        self.loads.pop(owner, None)
        return _longer(owner.chain, step)


def _key(key: _Load | ConstantKey | _Made) -> Key:
    return key.chain if isinstance(key, _Load) else key.key if isinstance(key, _Made) else key


def _longer(chain: NameChain, step: Step | NameChain) -> NameChain:
    return replace(chain, steps=(*chain.steps, step))


RETURNED = NameChain("return", "return")  # what the value of a `return` is given to
TESTED = NameChain("is None", "tested")  # to a test that reads nothing of it, or a variable, whose own chains say it
TRUTH = NameChain("bool", "tested")  # to a test of its truth
_ENVIRON = NameChain("os", "module", ("environ",))
_IS_INSTANCE = NameChain("isinstance", "global")
_GLOBALS = NameChain("globals", "global")
_PARTS_OF = {NameChain("type", "global"): "__class__", NameChain("vars", "global"): "__dict__"}
_SEEDS = {"seed", "setstate", "set_state"}  # of a generator
_PURE = {NameChain(name, "global") for name in PURE}
_SET = NameChain("setattr", "global")
_BY_NAME = {
    _SET,
    NameChain("getattr", "global"),
    NameChain("hasattr", "global"),
}  # `getattr(cfg, "alpha")` reads `cfg.alpha`
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
    "NOT_TAKEN",
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
