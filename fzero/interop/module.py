"""module: an `nn.Module` as `(params, buffers, apply)`.

`from_module` copies the module once, without its parameters and buffers: these become meta tensors. Each call of
`apply` copies that again, with the given tensors in their place. The module may refer to a parameter in several places.
Tied weights have two; others are a list (`nn.LSTM`), a hook or a lambda (`fzero.interop.closures`). The copy refers to
the given tensor in all of them.

The module itself is never touched, and nothing has to be put back. Code that runs later, such as the recomputation of
`torch.utils.checkpoint` in a backward, still finds the tensors that the forward saw. A copy costs no tensor memory, and
some milliseconds for a large model. A captured step pays that once, when it is traced.

A write of the forward to a buffer: see `mutable`. A write to another attribute of the module is dropped with the copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero import tree
from fzero._torch_compat import is_fake, unwatched, version
from fzero.capture.context import active
from fzero.capture.provenance import describe
from fzero.capture.reads.host_draws import apart
from fzero.capture.reads.module_parts import standing_in
from fzero.capture.refuse import Refused
from fzero.errors import CaptureError, TreeError, leaf_name
from fzero.interop import _hf_compat, closures, refused_modules
from fzero.interop.guard import Guard

log = logging.getLogger("fzero")


class Functional(NamedTuple):
    """The result of `from_module`: dicts of detached tensors, and the forward as a function.

    `params` and `buffers` are keyed by dotted name, as in `module.named_parameters()`. Parameters share the module's
    memory (`fzero.init` copies them); buffers are copies.
    """

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    apply: Apply


@dataclass(frozen=True)
class Apply:
    """`apply(params, buffers, *args, **kwargs)`: the module's forward as a pure function. Nothing in it changes.

    Returns the module's output, or `(output, new_buffers)` with `mutable`: True, or names of those that may be written.
    `frozen` names the parameters that did not require grad, `trainable` the others. Raises TreeError for a name that is
    missing or unknown, and for another shape. dtypes are free: parameters cast to bfloat16 run in bfloat16.
    """

    name: str
    mutable: bool | tuple[str, ...]
    frozen: tuple[str, ...]
    _module: nn.Module = field(repr=False)
    _others: tuple[Tensor, ...] = field(repr=False)  # tensors that are neither parameters nor buffers
    _bound: tuple[closures.Bound, ...] = field(repr=False)  # functions and weak references that refer to parts of it

    @property
    def trainable(self) -> tuple[str, ...]:
        """The parameters that required grad. `Spec(trainable=...)` takes them to leave the frozen ones alone."""
        return tuple(name for name, _ in self._module.named_parameters() if name not in self.frozen)

    def __call__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a copy of the module with these tensors in place of its own. Raises TreeError for tensors that do not
        fit, CaptureError for a forward that writes where it must not."""
        return self.call(params, buffers, lambda module: module(*args, **kwargs))

    def call(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], function: Callable[[nn.Module], Any]
    ) -> Any:
        """`function` of that copy of the module, for a function that calls the module itself. Returns and raises as a
        plain call does.

        >>> linear = torch.nn.Linear(2, 1, bias=False)
        >>> params, buffers, apply = from_module(linear)
        >>> apply.call({"weight": torch.ones(1, 2)}, buffers, lambda module: module(torch.ones(2)) * 10)
        tensor([20.])
        """
        memo: dict[int, Any] = {id(value): value for value in self._others}
        memo |= self._placed("params", self._module.named_parameters(), params)
        traced = active() is not None or any(map(is_fake, params.values()))
        placed = buffers
        may = self.mutable if isinstance(self.mutable, tuple) else tuple(buffers) if self.mutable else ()
        if (may or not traced) and isinstance(buffers, Mapping):  # traced writes are refused as they happen
            placed = {
                name: _writable(value, traced) if not traced or name in may else value
                for name, value in buffers.items()
            }
        memo |= self._placed("buffers", self._module.named_buffers(), placed)
        with unwatched(), apart():  # a part that is copied by pickle has no fake tensors in it
            module, _, copies = closures.copied(self._module, self._bound, memo)
        versions = {name: version(value) for name, value in placed.items()}
        before = [version(value) for value in self._others]
        flags = {name: value.requires_grad for name, value in placed.items()}
        try:
            with _hf_compat.capturing(module) if traced else Guard(self.name, params), standing_in(copies.values()):
                output = function(module)
        except Refused as error:
            for name, value in placed.items():
                if error.written is value:
                    raise self._writes(name) from None
            if traced:
                raise
            raise CaptureError(str(error)) from None
        finally:
            for name, value in placed.items():  # a forward may set it, as of a sum of losses that begins with a buffer
                if value.requires_grad != flags[name] and value.is_leaf:
                    value.requires_grad_(flags[name])
        if before != [version(value) for value in self._others]:
            raise CaptureError(f"{self.name} writes to a tensor that is no buffer: register it with register_buffer")
        buffers_after = dict(module.named_buffers())
        for name, value in placed.items():
            if name not in may and (buffers_after.get(name) is not value or version(value) != versions[name]):
                raise self._writes(name)
        return (output, {name: buffers_after[name] for name in may}) if self.mutable else output

    def shallower(self, stacks: Collection[tuple[str, ...]], depth: int) -> Apply:
        """The same of a module with the first `depth` layers of its stacks (`nn.ModuleList`, `nn.Sequential`), which
        takes the parameters of these. stacks: the paths of them, or of leaves that end in them.

        >>> apply = from_module(torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(9)])).apply
        >>> len(apply.shallower([()], 2).trainable)
        4
        """
        module, bound, _ = closures.copied(self._module, self._bound, {id(value): value for value in self._others})
        ends = {".".join(stack[n:]) for stack in stacks for n in range(len(stack) + 1)}
        for name, part in list(module.named_modules()):
            if name in ends and isinstance(part, (nn.ModuleList, nn.Sequential)):
                del part[depth:]
        kept = tuple(path for path, _ in module.named_parameters() if path in self.frozen)
        return replace(self, frozen=kept, _module=module, _bound=bound)

    def _writes(self, buffer: str) -> CaptureError:
        return CaptureError(
            f"{self.name} writes to its buffer {buffer!r}: take the new values, as in "
            "params, buffers, apply = from_module(module, mutable=True); "
            "output, buffers = apply(params, buffers, ...). Or call module.eval() first"
        )

    def _placed(
        self, tree_name: str, own: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """The tensors by the identity of the meta tensor that each of them replaces. Raises TreeError."""
        known = dict(own)
        if not isinstance(tensors, Mapping):
            raise TreeError(
                f"apply({tree_name}) of {self.name} is {describe(tensors)}: needed a dict by dotted name, as "
                "from_module made"
            )
        for name in known.keys() - tensors.keys():
            raise TreeError(
                f"{leaf_name(tree_name, name)} of {self.name} is missing: pass every name that from_module returned"
            )
        for name, value in tensors.items():
            if name not in known:
                raise TreeError(
                    f"{leaf_name(tree_name, name)}: {self.name} has no such name.{tree.suggest(name, known)}"
                )
            if not isinstance(value, Tensor) or value.shape != known[name].shape:
                raise TreeError(
                    f"{leaf_name(tree_name, name)} is {describe(value)}, {self.name} needs {describe(known[name])}"
                )
        return {id(known[name]): value for name, value in tensors.items()}


def from_module(module: nn.Module, *, train: bool | None = None, mutable: bool | tuple[str, ...] = False) -> Functional:
    """Returns `(params, buffers, apply)` of a module, and leaves the module unchanged.

    module: its modes, parameters, gradients, buffers and hooks are not written to.

    `apply(params, buffers, *args, **kwargs)` is `module(*args, **kwargs)` with these tensors in the place of its own.
    It runs in the mode (training or evaluation, per submodule) that the module is in now. train: another mode. Tied
    parameters appear once, under their first name, and stay tied.

    mutable: whether `apply` returns `(output, new_buffers)` instead of the output. The argument alone decides that, so
    that a call has one type. Modules that write to their buffers, as BatchNorm does in training, need it; without it
    that is an error. The given buffers are never written to. Names of buffers: the new values of those alone, and a
    write to another is an error.

    Parameters that do not require grad are among `params` and named in `apply.frozen`. The others then require grad,
    and `fzero.init` reads from that which ones train, unless `Spec(trainable=)` says it.

    Raises TreeError for a module that a pure function cannot express. Such a module has lazy or quantised parameters,
    buffers on the meta device, a wrapper (DDP, `torch.compile`), or state outside parameters and buffers. Parameters on
    the meta device are enough for `fzero.lower`.

    >>> linear = torch.nn.Linear(2, 1)
    >>> params, buffers, apply = from_module(linear)
    >>> {name: tuple(value.shape) for name, value in params.items()}
    {'weight': (1, 2), 'bias': (1,)}
    >>> torch.equal(apply(params, buffers, torch.ones(3, 2)), linear(torch.ones(3, 2)))
    True
    """
    refused_modules.unusable(module)
    if not mutable:
        refused_modules.written(module, module.training if train is None else train, train is not None)
    frozen = tuple(path for path, value in module.named_parameters() if not value.requires_grad)
    params = {
        name: value.detach().requires_grad_(bool(frozen) and name not in frozen)
        for name, value in module.named_parameters()
    }
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    name = type(module).__name__
    skeleton, others, bound = _without_tensors(module)
    if train is not None:
        skeleton.train(train)
    if frozen:
        log.info(
            "fzero: %s has %d frozen parameters (requires_grad=False): %s. They are among params and stay as they are, "
            "unless Spec(trainable=...) names them",
            name,
            len(frozen),
            ", ".join(frozen[:3]) + (", ..." if len(frozen) > 3 else ""),
        )
    _hf_compat.install()
    return Functional(params, buffers, Apply(name, mutable, frozen, skeleton, others, bound))


def _without_tensors(module: nn.Module) -> tuple[nn.Module, tuple[Tensor, ...], tuple[closures.Bound, ...]]:
    """Returns a copy with meta tensors for parameters and buffers, copies of all other tensors in it, and the copied
    closures."""
    memo: dict[int, Any] = {}
    for value in module.parameters():
        memo[id(value)] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    ours = {id(value) for value in memo.values()}
    for weight in _hf_compat.recomputed(module):
        memo[id(weight)] = torch.empty_like(weight, device="meta")
    try:
        skeleton, bound, copies = closures.copied(module, closures.bound(module), memo)
    except Exception as error:
        raise TreeError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}), and apply needs a copy "
            "without its parameters. Keep locks, files, process groups and tensors with a graph off the module"
        ) from error
    _check_copies(skeleton, ours, copies.strays)
    if path := closures.leak(skeleton, closures.own(module)):
        raise TreeError(
            f"{type(module).__name__} sees its own weights through {path}, which a copy cannot follow: apply would use "
            "those that the module has now. Write it with self, as a method, or pass it what it needs"
        )
    others = tuple(v for v in copies.values() if isinstance(v, Tensor) and id(v) not in ours)
    return skeleton, others, bound


def _check_copies(skeleton: nn.Module, ours: Collection[int], replaced: dict[int, Any]) -> None:
    """Raises TreeError for a module whose copy has tensors of its own in the place of those that it was given.

    ours: the ids of those that it was given. replaced: its own, which no part of it may hold elsewhere.
    """
    for path, part in skeleton.named_modules():
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        if strays := [name for name, value in own if id(value) not in ours]:
            raise _own_tensors(skeleton, ".".join(filter(None, (path, strays[0]))), part)
    if path := closures.leak(skeleton, replaced):
        raise _own_tensors(skeleton, path, skeleton)


def _own_tensors(skeleton: nn.Module, path: str, part: nn.Module) -> TreeError:
    return TreeError(
        f"{path!r} of {type(skeleton).__name__}: a copy of {type(part).__name__} makes its own tensors (it has a "
        "__deepcopy__), so apply could not put others in their place. Hold the modules as plain attributes (a loss of "
        "TorchRL: functional=False)"
    )


def _writable(value: Tensor, traced: bool) -> Tensor:
    """A copy that in-place work can be traced on. For a constant of a traced step it is the output of an op."""
    if traced and not is_fake(value):
        return torch.empty(value.shape, dtype=value.dtype, device=value.device).copy_(value)
    return value.clone()
