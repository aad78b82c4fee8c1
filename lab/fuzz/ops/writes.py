"""writes: work in place, on what is there and on new copies, through chains of views."""

from __future__ import annotations

from lab.fuzz.operands import Draw
from lab.fuzz.ops.rows import Row


def _part(g: Draw, v: str) -> str:
    """A view of v to write through: one or two steps."""
    ways = [v, f"{v}.view(-1)", f"{v}[{g.slices(v)}]", f"{v}[{g.slices(v)}]"]
    if g.value(v).ndim:
        d = g.dim(v)
        start, length = g.within(d, v)
        ways += [f"{v}.narrow({d}, {start}, {length})", f"{v}.select({d}, {start})", f"{v}.unbind({d})[{start}]"]
        ways += [f"{v}.split(1, {d})[{start}]", f"{v}.permute({g.order(v)})", f"{v}.unfold({d}, {length}, {length})"]
        ways += [f"{v}.permute({g.order(v)})[0]", f"{v}.flatten()[1:]"]
    if g.value(v).ndim > 1:
        ways += [f"{v}.diagonal(0, {', '.join(map(str, g.two(v)))})", f"{v}.transpose{g.two(v)}[..., ::2]"]
    if g.rng.random() < 0.1:
        size = g.value(v).numel()
        ways = [f"{v}.as_strided(({max(1, size // 2)},), (2,))", f"{v}.as_strided((2,), (1,), {max(0, size - 2)})"]
    return str(g.some(*ways))


def _owned(g: Draw) -> tuple[str, str]:
    """(lines that make something to write to, its name): a fresh clone, or what is there."""
    if g.rng.random() < 0.45:
        return "", g.write()
    x = g.full()
    kind = g.some(
        "{x}.clone()", "{x}.clone()", "({x} + 0.1)", "({x} * 1.5)", "torch.zeros_like({x})", "torch.ones_like({x})"
    )
    g.add(kind.format(x=x))
    return "", g.last


def _write(g: Draw) -> str:
    _, v = _owned(g)
    part = _part(g, v)
    value = eval(part, g.names)
    n = g.number_text
    other = g.some(n(), n(), f"{g.single()}.mean()", f"fit({g.single()}, {tuple(value.shape)})")
    ways = [
        f"mul_({other})", f"add_({other})", f"sub_({other}, alpha=0.5)", f"fill_({n()})", f"fill_({g.single()}.mean())",
        f"copy_({g.single()}.mean())", f"copy_(fit({g.single()}, {tuple(value.shape)}))", "tanh_()", "sin_()", "neg_()",
        "zero_()", "clamp_(-0.3, 0.6)", "relu_()", f"masked_fill_({part} > 0.2, {n()})", "div_(2.5)", "square_()",
        "exp_().clamp_(max=3.0)", f"addcmul_({part}.sin(), {part}.detach(), value=0.3)", f"lerp_({part}.cos(), 0.4)",
        "abs_().add_(0.1)", "pow_(2)", "sigmoid_()",
    ]  # fmt: skip
    return f"!{part}.{g.some(*ways)}"


def _assign(g: Draw) -> str:
    _, v = _owned(g)
    index = g.slices(v)
    value = eval(f"{v}[{index}]", g.names)
    right = g.some(
        g.number_text(), f"fit({g.single()}, {tuple(value.shape)})", f"{g.single()}.sum()", f"{v}[{index}] * 0.5"
    )
    return f"!{v}[{index}] {g.some('=', '=', '+=', '*=')} {right}"


def _put(g: Draw) -> str:
    _, v = _owned(g)
    if not g.value(v).ndim:
        raise ValueError
    size = g.size(0, v)
    index = g.index(size)
    picked = eval(f"{v}[{index}]", g.names)
    right = f"fit({g.single()}, {tuple(picked.shape)})"
    ways = [f"{v}.index_put_(({index},), {right}, accumulate=True)", f"{v}[{index}] = {g.number_text()}",
            f"{v}[{v} > 0.3] = {g.number_text()}",
            f"{v}.index_put_(({v} < 0,), torch.tensor({g.number_text()}, dtype={v}.dtype))"]  # fmt: skip
    d = g.dim(v)
    size = g.size(d, v)
    flat = f"{index}.flatten()[:{size}] % {size}"
    count = eval(f"({flat}).numel()", g.names)
    shape = list(g.value(v).shape)
    shape[d] = count
    source = f"fit({g.single()}, {tuple(shape)})"
    indices = f"fit({index}, {tuple(shape)}) % {size}"
    ways += [f"{v}.index_add_({d}, {flat}, {source}, alpha=0.7)", f"{v}.index_fill_({d}, {flat}, {g.number_text()})",
             f"{v}.index_copy_({d}, torch.arange({size}).flip(0)[:{count}], {source})",
             f"{v}.scatter_({d}, {indices}, {g.number_text()})",
             f"{v}.scatter_add_({d}, {indices}, {source})",
             f"{v}.scatter_reduce_({d}, {indices}, {source}, '{g.some('sum', 'amax', 'mean', 'prod')}')",
             f"{v}.masked_scatter_({v} > 0, fit({g.single()}, {tuple(g.value(v).shape)}).clone())",
             f"{v}.index_reduce_({d}, {flat}, {source}, '{g.some('amax', 'mean', 'amin')}')"]  # fmt: skip
    return "!" + str(g.some(*ways))


def _shape_in_place(g: Draw) -> str:
    v = g.write(2)
    return f"!{v}.{g.some('transpose_' + str(g.two(v)), 'unsqueeze_(0)', 'squeeze_()', 'swapaxes_' + str(g.two(v)))}"


def _whole(g: Draw) -> str:
    _, v = _owned(g)
    return "!" + str(g.some(
        f"F.relu({v}, inplace=True)", f"F.elu({v}, inplace=True)", f"F.leaky_relu_({v}, 0.2)",
        f"F.hardtanh_({v}, -0.5, 0.5)",
        f"F.threshold_({v}, 0.1, 0.3)", f"F.silu({v}, inplace=True)", f"{v}.diagonal(0, -2, -1).fill_(0.3)",
        f"{v}.fill_diagonal_(0.7)", f"{v}.tril_()", f"{v}.triu_(1)", f"{v}.cumsum_(0)",
        f"{v}.fmod_(0.7)", f"{v}.clamp_min_(-0.1)",
    ))  # fmt: skip


WRITES: dict[str, Row] = {
    "write": _write,
    "write_2": _write,
    "write_3": _write,
    "assign": _assign,
    "assign_2": _assign,
    "put": _put,
    "put_2": _put,
    "whole": _whole,
    "shape_in_place": _shape_in_place,
    "augmented": lambda g: f"!{(v := g.write())} {g.some('+=', '-=', '*=')} {g.wide(v)}",
    "slice_scatter": lambda g: (
        f"torch.slice_scatter({(x := g.full(1))}, {x}.narrow({(d := g.dim(x))}, 0, 1) * 2.0, {d}, 0, 1)"
    ),
    "select_scatter": lambda g: (
        f"torch.select_scatter({(x := g.full(1))}, {x}.select({(d := g.dim(x))}, 0).sin(), {d}, -1)"
    ),
    "diagonal_scatter": lambda g: f"torch.diagonal_scatter({(x := g.full(2, 2))}, {x}.diagonal().cos())",
    "as_strided_scatter": lambda g: (
        f"torch.as_strided_scatter(({(x := g.full())} * 1.0).contiguous(), {x}.flatten()[:1] * 3.0, (1,), (1,), 0)"
    ),
    "into_zeros": lambda g: (
        f"torch.zeros({tuple(g.value(x := g.full(1)).shape)}, dtype={x}.dtype).copy_({x}).mul_(0.5)"
    ),
}  # fmt: skip
