"""ops: the table of expressions, by group. A row is a name and a function of a `Draw` that gives a line of a loss.

Lines after "!" work in place. What a row gives need not be valid: it is run in eager PyTorch when it is drawn, and
drawn again where that raises.
"""

from __future__ import annotations

from collections.abc import Callable

from fzero.fuzz.operands import Draw

Row = Callable[[Draw], str]


def _unary(*names: str) -> dict[str, Row]:
    return {name: (lambda g, name=name: f"torch.{name}({g.x()})") for name in names}


def _activation(*names: str) -> dict[str, Row]:
    return {name: (lambda g, name=name: f"F.{name}({g.x()})") for name in names}


def _binary(*names: str) -> dict[str, Row]:
    def row(g: Draw, name: str) -> str:
        x = g.x()
        return f"torch.{name}({x}, {g.wide(x)})"

    return {name: (lambda g, name=name: row(g, name)) for name in names}


def _over(*names: str) -> dict[str, Row]:
    """Reductions: whole, or over a dimension."""

    def row(g: Draw, name: str) -> str:
        x = g.full()
        how = g.some("", f", dim={g.dim()}", f", dim={g.dim()}, keepdim=True") if g.value(x).ndim else ""
        return f"torch.{name}({x}{how})"

    return {name: (lambda g, name=name: row(g, name)) for name in names}


def _along(*texts: str) -> dict[str, Row]:
    """Of one dimension: {x} and {d}."""

    def row(g: Draw, text: str) -> str:
        x = g.full(1)
        return text.format(x=x, d=g.dim(x))

    return {text.split("(")[0].split(".")[-1]: (lambda g, text=text: row(g, text)) for text in texts}


def _losses(*names: str) -> dict[str, Row]:
    def row(g: Draw, name: str) -> str:
        x = g.full(1)
        return f'F.{name}({x}, {g.like(x)}, reduction="{g.some("mean", "sum", "none")}")'

    return {name: (lambda g, name=name: row(g, name)) for name in names}


# --- arithmetic -------------------------------------------------------------------------------------------------------

POINTWISE: dict[str, Row] = {
    **_unary(
        "sin", "cos", "tanh", "sigmoid", "exp", "expm1", "erf", "erfc", "atan", "asinh", "sinh", "cosh", "square", "neg",
        "abs", "sgn", "floor", "ceil", "round", "trunc", "frac", "sinc", "deg2rad", "exp2", "positive", "relu", "logit_tame",
    ),
    "log": lambda g: f"torch.log({g.x()}.abs() + 0.5)",
    "log2": lambda g: f"torch.log2({g.x()}.square() + 1.0)",
    "log10": lambda g: f"torch.log10({g.x()}.square() + 1.0)",
    "log1p": lambda g: f"torch.log1p({g.x()}.square())",
    "sqrt": lambda g: f"torch.sqrt({g.x()}.square() + 0.3)",
    "rsqrt": lambda g: f"torch.rsqrt({g.x()}.square() + 0.5)",
    "reciprocal": lambda g: f"torch.reciprocal({g.x()}.abs() + 0.7)",
    "acos": lambda g: f"torch.acos(torch.tanh({g.x()}) * 0.8)",
    "asin": lambda g: f"torch.asin(torch.tanh({g.x()}) * 0.8)",
    "atanh": lambda g: f"torch.atanh(torch.tanh({g.x()}) * 0.8)",
    "acosh": lambda g: f"torch.acosh({g.x()}.square() + 1.5)",
    "tan": lambda g: f"torch.tan(torch.tanh({g.x()}))",
    "lgamma": lambda g: f"torch.lgamma({g.x()}.abs() + 0.5)",
    "digamma": lambda g: f"torch.digamma({g.x()}.abs() + 0.5)",
    "i0": lambda g: f"torch.special.i0({g.x()})",
    "i1e": lambda g: f"torch.special.i1e({g.x()})",
    "entr": lambda g: f"torch.special.entr({g.x()}.abs() + 0.1)",
    "ndtr": lambda g: f"torch.special.ndtr({g.x()})",
    "erfinv": lambda g: f"torch.erfinv(torch.tanh({g.x()}) * 0.7)",
    "logit": lambda g: f"torch.logit(torch.sigmoid({g.x()}), eps=0.1)",
    **_binary("add", "sub", "mul", "maximum", "minimum", "fmax", "fmin", "atan2", "logaddexp", "logaddexp2", "copysign"),
    "scaled": lambda g: f"{g.x()} * {g.number_text()} + {g.number_text()}",
    "reversed": lambda g: f"{g.number_text()} - {g.x()}",
    "add_alpha": lambda g: f"torch.add({(x := g.x())}, {g.wide(x)}, alpha={g.number_text()})",
    "rsub": lambda g: f"torch.rsub({(x := g.x())}, {g.wide(x)})",
    "div": lambda g: f"{(x := g.x())} / ({g.wide(x)}.abs() + 0.6)",
    "floor_divide": lambda g: f"torch.div({g.x()}, 0.37, rounding_mode='{g.some('floor', 'trunc')}')",
    "remainder": lambda g: f"torch.remainder({g.x()}, {g.some(0.7, -1.3)})",
    "fmod": lambda g: f"torch.fmod({g.x()}, 0.7)",
    "pow": lambda g: f"{g.x()} ** {g.some(2, 3)}",
    "pow_tensor": lambda g: f"torch.pow({(x := g.x())}.abs() + 0.5, {g.wide(x)})",
    "rpow": lambda g: f"{g.some(2.0, 0.5)} ** {g.x()}",
    "float_power": lambda g: f"torch.float_power({g.x()}.abs() + 0.5, 1.5)",
    "hypot": lambda g: f"torch.hypot({(x := g.x())}, {g.wide(x)} + 3.0)",
    "xlogy": lambda g: f"torch.xlogy({(x := g.x())}, {g.wide(x)}.abs() + 0.5)",
    "lerp": lambda g: f"torch.lerp({(x := g.x())}, {g.like(x)}, {g.some('0.3', g.like(x))})",
    "addcmul": lambda g: f"torch.addcmul({(x := g.x())}, {g.wide(x)}, {g.like(x)}, value={g.number_text()})",
    "addcdiv": lambda g: f"torch.addcdiv({(x := g.x())}, {g.like(x)}, {g.like(x)}.square() + 1.0, value=0.5)",
    "clamp": lambda g: f"{g.x()}.clamp({g.some('-0.6, 0.7', 'min=-0.2', 'max=0.4')})",
    "clamp_tensor": lambda g: f"torch.clamp({(x := g.x())}, min={g.like(x)} - 0.5)",
    "where": lambda g: f"torch.where({g.mask(x := g.x())}, {x}, {g.like(x)})",
    "where_number": lambda g: f"torch.where({g.mask(x := g.x())}, {x}, {g.number_text()})",
    "masked_fill": lambda g: f"{(x := g.x())}.masked_fill({g.mask(x)}, {g.number_text()})",
    "nan_to_num": lambda g: f"torch.nan_to_num({(x := g.x())} / {x}.round(), 0.3, 2.0, -2.0)",
    "heaviside": lambda g: f"{(x := g.x())} * torch.heaviside({x}.detach(), {x}.detach())",
    "low": lambda g: f"{g.x()}.to(torch.bfloat16)",
    "half": lambda g: f"({g.x()}.to(torch.float16) * 2).to(torch.float32)",
    "wide": lambda g: f"{g.x()}.to(torch.float64)",
    "narrow_dtype": lambda g: f"{g.pick(lambda x: x.dtype.is_floating_point)}.to(torch.float32)",
    "type_as": lambda g: f"{g.pick(lambda x: x.dtype.is_floating_point)}.type_as({g.x()})",
    "detach": lambda g: f"{g.x()}.detach() * {g.last}",
    "promoted": lambda g: f"{g.x()} + {g.pick(lambda x: x.ndim == 0)}",
}  # fmt: skip
POINTWISE.pop("logit_tame")

ACTIVATIONS: dict[str, Row] = {
    **_activation(
        "gelu", "silu", "elu", "selu", "celu", "mish", "softplus", "softsign", "leaky_relu", "logsigmoid", "hardtanh",
        "hardswish", "hardsigmoid", "tanhshrink", "softshrink", "hardshrink", "relu6",
    ),
    "gelu_tanh": lambda g: f'F.gelu({g.x()}, approximate="tanh")',
    "threshold": lambda g: f"F.threshold({g.x()}, 0.1, -0.3)",
    "prelu": lambda g: f"F.prelu({g.single(2)}, torch.tensor(0.3))",
    "rrelu_eval": lambda g: f"F.rrelu({g.x()}, training=False)",
    **_along("F.softmax({x}, {d})", "F.log_softmax({x}, {d})", "F.softmin({x}, {d})", "F.normalize({x}, dim={d}, eps=0.1)"),
    "glu": lambda g: f"F.glu(torch.cat([{(x := g.full(1))}, {x}.sin()], {(d := g.dim(x))}), {d})",
    "softmax_masked": lambda g: f"F.softmax({(x := g.full(1))}.masked_fill(({x} > {x}.amax({(d := g.dim(x))}, True) - 0.1)"
    f".logical_not(), float('-inf')), {d})",
    "cosine_similarity": lambda g: f"F.cosine_similarity({(x := g.full(1))} + 2.0, {g.like(x)}, dim={g.dim(x)}, eps=0.1)",
    "pairwise_distance": lambda g: f"F.pairwise_distance({(x := g.full(2, 2))}, {g.like(x)} + 3.0)",
}  # fmt: skip

# --- views and shapes -------------------------------------------------------------------------------------------------


def _view(g: Draw) -> str:
    x = g.x()
    return f"{x}.{g.some('reshape', 'view', 'contiguous().view')}({g.shape(g.value(x).numel())})"


def _split(g: Draw) -> str:
    x = g.full(1)
    d = g.dim(x)
    size = g.size(d, x)
    first = g.int(0, size)
    whole = g.some(f"torch.split({x}, {g.int(max(1, size // 3), size)}, {d})", f"{x}.chunk({g.int(1, 3)}, {d})",
                   f"torch.split({x}, [{first}, {size - first}], {d})", f"torch.tensor_split({x}, 2, {d})")  # fmt: skip
    return str(whole)


def _expand(g: Draw) -> str:
    x = g.x()
    shape = [g.int(2, 3) if size == 1 else -1 for size in g.value(x).shape]
    return f"{x}.expand({[g.int(1, 3), *shape]})"


def _narrow(g: Draw) -> str:
    x = g.full(1)
    d = g.dim(x)
    start, length = g.within(d, x)
    return f"{x}.narrow({d}, {start}, {length})"


def _unfold(g: Draw) -> str:
    x = g.full(1)
    d = g.dim(x)
    return f"{x}.unfold({d}, {(n := g.int(1, g.size(d, x)))}, {g.int(1, n)})"


def _as_strided(g: Draw) -> str:
    """Within x's own memory, overlapping or not, through its strides or others."""
    x = g.full()
    count = g.value(x).numel()
    shape, strides, reach = [], [], 0
    for _ in range(g.int(1, 3)):
        stride = g.int(0 if shape else 1, 3)
        most = (count - 1 - reach) // stride + 1 if stride else 3
        shape.append(g.int(1, min(max(most, 1), 4)))
        strides.append(stride)
        reach += (shape[-1] - 1) * stride
    if reach >= count:
        return f"{x}.contiguous().as_strided(({count},), (1,))"
    start = g.int(0, count - 1 - reach)
    own = g.some(f"{x}.contiguous()", f"{x}.clone()", f"({x} * 1.5)", f"{x}.reshape(-1)[:]")
    return f"{own}.as_strided({tuple(shape)}, {tuple(strides)}{g.some('', '') if not start else f', {start}'})"


def _einops(g: Draw) -> str:
    x = g.x(2, 4)
    letters = "abcd"[: g.value(x).ndim]
    result = list(letters)
    g.rng.shuffle(result)
    return f'torch.einsum("{letters}->{"".join(result[: g.int(0, len(result))])}", {x})'


VIEWS: dict[str, Row] = {
    "view": _view,
    "permute": lambda g: f"{(x := g.x(1))}.permute({g.order(x)})",
    "transpose": lambda g: f"{(x := g.x(2))}.transpose{g.two(x)}",
    "t": lambda g: f"{g.x(2, 2)}.t()",
    "mT": lambda g: f"{g.x(2)}.mT",
    "movedim": lambda g: f"{(x := g.x(2))}.movedim{g.two(x)}",
    "flatten": lambda g: f"{g.x(2)}.flatten({g.some(0, 1)})",
    "unflatten": lambda g: f"{(x := g.full(1))}.unflatten({(d := g.dim(x))}, {g.shape(g.size(d, x))})",
    "squeeze": lambda g: f"{g.x()}.squeeze()",
    "unsqueeze": lambda g: f"{(x := g.x())}.unsqueeze({g.int(0, g.value(x).ndim)})",
    "expand": _expand,
    "expand_as": lambda g: f"{(x := g.x())}[None].expand_as(torch.stack([{x}, {x}]))",
    "narrow": _narrow,
    "select": lambda g: f"{(x := g.full(1))}.select({(d := g.dim(x))}, {g.int(-g.size(d, x), g.size(d, x) - 1)})",
    "slices": lambda g: f"{(x := g.full(1))}[{g.slices(x)}]",
    "slices_twice": lambda g: f"{(x := g.full(1))}[{g.slices(x)}][..., None]",
    "split": _split,
    "unbind": lambda g: f"{(x := g.full(1))}.unbind({g.dim(x)})",
    "diagonal": lambda g: f"{(x := g.full(2))}.diagonal({g.int(-1, 1)}, {', '.join(map(str, g.two(x)))})",
    "unfold": _unfold,
    "as_strided": _as_strided,
    "detour": lambda g: f"{(x := g.x(2))}.transpose{(ab := g.two(x))}.contiguous().transpose{ab}",
    "swapaxes": lambda g: f"{(x := g.x(2))}.swapaxes{g.two(x)}",
    "flip": lambda g: f"{(x := g.x(1))}.flip({g.dims(x)})",
    "roll": lambda g: f"{(x := g.full(1))}.roll({g.int(-2, 3)}, {g.dim(x)})",
    "rot90": lambda g: f"torch.rot90({(x := g.full(2))}, {g.int(1, 3)}, {g.two(x)})",
    "repeat": lambda g: f"{(x := g.x())}.repeat({[g.int(1, 2) for _ in range(g.value(x).ndim)] or [2]})",
    "tile": lambda g: f"torch.tile({g.x()}, ({g.int(1, 2)}, 2))",
    "repeat_interleave": lambda g: f"{(x := g.full(1))}.repeat_interleave({g.int(1, 3)}, {g.dim(x)})",
    "cat": lambda g: f"torch.cat([{(x := g.full(1))}, {g.like(x)}, {x}], {g.dim(x)})",
    "stack": lambda g: f"torch.stack([{(x := g.x())}, {g.like(x)}], {g.int(0, g.value(x).ndim)})",
    "hstack": lambda g: f"torch.hstack([{(x := g.full())}, {g.like(x)}])",
    "meshgrid": lambda g: f'torch.meshgrid({g.full(1, 1)}, {g.full(1, 1)}, indexing="{g.some("ij", "xy")}")',
    "tril": lambda g: f"{g.x(2)}.tril({g.int(-1, 1)})",
    "triu": lambda g: f"{g.x(2)}.triu({g.int(-1, 1)})",
    "diag_embed": lambda g: f"torch.diag_embed({g.full(1)}, {g.int(-1, 1)})",
    "diagflat": lambda g: f"torch.diagflat({g.x(0, 1)})",
    "clone": lambda g: f"{g.x()}.clone()",
    "contiguous": lambda g: f"{(x := g.x(2))}.transpose{g.two(x)}.contiguous()",
    "channels_last": lambda g: f"{g.full(4, 4)}.contiguous(memory_format=torch.channels_last)",
    "pixel_shuffle": lambda g: f"F.pixel_shuffle({g.fitted((1, 4, 2, 3))}, 2)",
    "pixel_unshuffle": lambda g: f"F.pixel_unshuffle({g.fitted((1, 2, 4, 2))}, 2)",
    "broadcast_tensors": lambda g: f"torch.broadcast_tensors({(x := g.x())}, {g.wide(x)})",
    "atleast_3d": lambda g: f"torch.atleast_3d({g.x(0, 2)})",
    "block_diag": lambda g: f"torch.block_diag({g.full(2, 2)}, {g.full(0, 2)})",
    "sum_to_size": lambda g: f"{(x := g.full(1))}.sum_to_size({[1 if g.some(0, 1) else s for s in g.value(x).shape]})",
    "einsum_one": _einops,
    "pad": lambda g: f"F.pad({g.x(1)}, ({g.int(0, 2)}, {g.int(-1, 2)}), value={g.number_text()})",
    "pad_reflect": lambda g: f'F.pad({g.fitted((2, 4))}, ({g.int(0, 2)}, 1), mode="{g.some("reflect", "replicate", "circular")}")',
    "pad_2d": lambda g: f'F.pad({g.fitted((1, 2, 3, 4))}, (1, {g.int(0, 2)}, 0, 2), mode="{g.some("reflect", "replicate")}")',
}  # fmt: skip

# --- work in place ----------------------------------------------------------------------------------------------------


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
    kind = g.some("{x}.clone()", "{x}.clone()", "({x} + 0.1)", "({x} * 1.5)", "torch.zeros_like({x})", "torch.ones_like({x})")
    g.add(kind.format(x=x))
    return "", g.last


def _write(g: Draw) -> str:
    _, v = _owned(g)
    part = _part(g, v)
    value = eval(part, g.names)
    n = g.number_text
    other = g.some(n(), n(), f"{g.single()}.mean()", f"fit({g.single()}, {tuple(value.shape)})")
    ways = [f"{part}.mul_({other})", f"{part}.add_({other})", f"{part}.sub_({other}, alpha=0.5)", f"{part}.fill_({n()})",
            f"{part}.copy_({other if 'v' in other or 'p' in other else g.single() + '.mean()'})", f"{part}.tanh_()",
            f"{part}.sin_()", f"{part}.neg_()", f"{part}.zero_()", f"{part}.clamp_(-0.3, 0.6)", f"{part}.relu_()",
            f"{part}.masked_fill_({part} > 0.2, {n()})", f"{part}.div_(2.5)", f"{part}.square_()", f"{part}.exp_().clamp_(max=3.0)",
            f"{part}.addcmul_({part}.sin(), {part}.detach(), value=0.3)", f"{part}.lerp_({part}.cos(), 0.4)", f"{part}.abs_().add_(0.1)",
            f"{part}.pow_(2)", f"{part}.sigmoid_()", f"torch.add({part}.detach(), 1.0, out=torch.empty(0))"][:-1]  # fmt: skip
    return "!" + str(g.some(*ways))


def _assign(g: Draw) -> str:
    _, v = _owned(g)
    at = g.slices(v)
    value = eval(f"{v}[{at}]", g.names)
    right = g.some(g.number_text(), f"fit({g.single()}, {tuple(value.shape)})", f"{g.single()}.sum()", f"{v}[{at}] * 0.5")
    return f"!{v}[{at}] {g.some('=', '=', '+=', '*=')} {right}"


def _put(g: Draw) -> str:
    _, v = _owned(g)
    if not g.value(v).ndim:
        raise ValueError
    size = g.size(0, v)
    index = g.index(size)
    picked = eval(f"{v}[{index}]", g.names)
    right = f"fit({g.single()}, {tuple(picked.shape)})"
    ways = [f"{v}.index_put_(({index},), {right}, accumulate=True)", f"{v}[{index}] = {g.number_text()}",
            f"{v}[{v} > 0.3] = {g.number_text()}", f"{v}.index_put_(({v} < 0,), torch.tensor({g.number_text()}, dtype={v}.dtype))"]  # fmt: skip
    d = g.dim(v)
    size = g.size(d, v)
    flat = f"{index}.flatten()[:{size}] % {size}"
    count = eval(f"({flat}).numel()", g.names)
    shape = list(g.value(v).shape)
    shape[d] = count
    source = f"fit({g.single()}, {tuple(shape)})"
    ways += [f"{v}.index_add_({d}, {flat}, {source}, alpha=0.7)", f"{v}.index_fill_({d}, {flat}, {g.number_text()})",
             f"{v}.index_copy_({d}, torch.arange({size}).flip(0)[:{count}], {source})",
             f"{v}.scatter_({d}, fit({index}, {tuple(shape)}) % {size}, {g.number_text()})",
             f"{v}.scatter_add_({d}, fit({index}, {tuple(shape)}) % {size}, {source})",
             f"{v}.scatter_reduce_({d}, fit({index}, {tuple(shape)}) % {size}, {source}, '{g.some('sum', 'amax', 'mean', 'prod')}')",
             f"{v}.masked_scatter_({v} > 0, fit({g.single()}, {tuple(g.value(v).shape)}))",
             f"{v}.index_reduce_({d}, {flat}, {source}, '{g.some('amax', 'mean', 'amin')}')"]  # fmt: skip
    return "!" + str(g.some(*ways))


def _shape_in_place(g: Draw) -> str:
    v = g.write(2)
    return f"!{v}.{g.some('transpose_' + str(g.two(v)), 'unsqueeze_(0)', 'squeeze_()', 'swapaxes_' + str(g.two(v)))}"


def _whole(g: Draw) -> str:
    _, v = _owned(g)
    return "!" + str(g.some(
        f"F.relu({v}, inplace=True)", f"F.elu({v}, inplace=True)", f"F.leaky_relu_({v}, 0.2)", f"F.hardtanh_({v}, -0.5, 0.5)",
        f"F.threshold_({v}, 0.1, 0.3)", f"F.silu({v}, inplace=True)", f"{v}.diagonal(0, -2, -1).fill_(0.3)",
        f"{v}.fill_diagonal_(0.7)", f"{v}.tril_()", f"{v}.triu_(1)", f"{v}.cumsum_(0)", f"{v}.fmod_(0.7)", f"{v}.clamp_min_(-0.1)",
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
    "slice_scatter": lambda g: f"torch.slice_scatter({(x := g.full(1))}, {x}.narrow({(d := g.dim(x))}, 0, 1) * 2.0, {d}, 0, 1)",
    "select_scatter": lambda g: f"torch.select_scatter({(x := g.full(1))}, {x}.select({(d := g.dim(x))}, 0).sin(), {d}, -1)",
    "diagonal_scatter": lambda g: f"torch.diagonal_scatter({(x := g.full(2, 2))}, {x}.diagonal().cos())",
    "as_strided_scatter": lambda g: f"torch.as_strided_scatter({(x := g.full())}.contiguous(), {x}.flatten()[:1] * 3.0, (1,), (1,), 0)",
    "into_zeros": lambda g: f"torch.zeros({tuple(g.value(x := g.full(1)).shape)}, dtype={x}.dtype).copy_({x}).mul_(0.5)",
}  # fmt: skip

# --- reductions, sorts, indices ---------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Row] = {
    **_over("sum", "mean", "prod", "std", "var", "amax", "amin", "norm"),
    "logsumexp": lambda g: f"torch.logsumexp({(x := g.full(1))}, {g.dims(x)})",
    "sum_dims": lambda g: f"{(x := g.full(2))}.sum({g.dims(x)}, keepdim={g.some(True, False)})",
    "mean_dims": lambda g: f"{(x := g.full(2))}.mean({g.dims(x)})",
    "var_mean": lambda g: f"torch.var_mean({(x := g.full(1))}, {g.dims(x)}, correction=0)",
    "std_mean": lambda g: f"torch.std_mean({(x := g.full(1))}, dim={g.dim(x)}, correction=0, keepdim=True)",
    "max": lambda g: f"{(x := g.full(1))}.{g.some('max', 'min')}({g.dim(x)})",
    "max_all": lambda g: f"{g.full()}.{g.some('max', 'min', 'median')}()",
    "aminmax": lambda g: f"torch.aminmax({(x := g.full(1))}, dim={g.dim(x)})",
    "median": lambda g: f"{(x := g.full(1))}.median({g.dim(x)})",
    "nanmean": lambda g: f"torch.nanmean({(x := g.full(1))}, {g.dim(x)})",
    "nansum": lambda g: f"torch.nansum({(x := g.full(1))}, {g.dim(x)})",
    "quantile": lambda g: f"torch.quantile({(x := g.single(1))}, 0.4, {g.dim(x)})",
    "kthvalue": lambda g: f"torch.kthvalue({(x := g.full(1))}, 1, {g.dim(x)})",
    "mode_values": lambda g: f"torch.mode({(x := g.full(1))}, {g.dim(x)})",
    "vector_norm": lambda g: f"torch.linalg.vector_norm({(x := g.full(1))} + 2.0, {g.some(1, 2, 3, 0.5, 'torch.inf')}, {g.dims(x)})",
    "matrix_norm": lambda g: f"torch.linalg.matrix_norm({g.full(2)} + 1.0{g.some('', ', 1', ', torch.inf', ', 2')})",
    "dist": lambda g: f"torch.dist({(x := g.full())}, {g.like(x)} + 2.0, {g.some(1, 2)})",
    "count_nonzero": lambda g: f"torch.count_nonzero({g.full(1)} > 0.1)",
    "any": lambda g: f"({g.full(1)} > 0.3).{g.some('any', 'all')}({g.dim()})",
    "trace": lambda g: f"torch.trace({g.full(2, 2)})",
    **_along("torch.cumsum({x}, {d})", "torch.cumprod({x}, {d})", "torch.logcumsumexp({x}, {d})", "torch.cummax({x}, {d})",
             "torch.cummin({x}, {d})", "torch.diff({x}, dim={d})", "torch.trapezoid({x}, dim={d})", "torch.gradient({x}, dim={d})",
             "torch.cumulative_trapezoid({x}, dim={d})", "torch.renorm({x}, 2, {d}, 0.8)"),
}  # fmt: skip

INDEXING: dict[str, Row] = {
    "sort": lambda g: f"torch.sort({(x := g.full(1))}, {g.dim(x)}, descending={g.some(True, False)})",
    "msort": lambda g: f"torch.msort({g.full(1)})",
    "argsort": lambda g: f"torch.argsort({(x := g.full(1))}, {g.dim(x)})",
    "topk": lambda g: f"torch.topk({(x := g.full(1))}, {g.int(1, 2)}, {g.dim(x)}, largest={g.some(True, False)})",
    "argmax": lambda g: f"{(x := g.full(1))}.{g.some('argmax', 'argmin')}({g.dim(x)}, keepdim={g.some(True, False)})",
    "gather": lambda g: f"torch.gather({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}))",
    "take_along_dim": lambda g: f"torch.take_along_dim({(x := g.full(1))}, {x}.argmax({(d := g.dim(x))}, keepdim=True), {d})",
    "index": lambda g: f"{(x := g.full(1))}[{g.index(g.size(0, x))}]",
    "index_two": lambda g: f"{(x := g.full(2))}[{g.index(g.size(0, x))}, {g.some(':', '...')}, {g.index(g.size(-1, x))}]",
    "index_both": lambda g: f"{(x := g.full(2))}[{(i := g.ints())} % {g.size(0, x)}, {i} % {g.size(1, x)}]",
    "index_list": lambda g: f"{(x := g.full(1))}[[0, -1, 0]]",
    "index_select": lambda g: f"torch.index_select({(x := g.full(1))}, {(d := g.dim(x))}, {g.index(g.size(d, x))}.flatten())",
    "take": lambda g: f"torch.take({(x := g.full())}, {g.index(g.value(x).numel())})",
    "embedding": lambda g: f"F.embedding({g.index(g.size(0, x := g.single(2, 2)))}, {x}{g.some('', ', padding_idx=0', ', scale_grad_by_freq=True')})",
    "embedding_bag": lambda g: f"F.embedding_bag({g.index(g.size(0, x := g.single(2, 2)))}, {x}, mode='{g.some('sum', 'mean', 'max')}')",
    "one_hot": lambda g: f"F.one_hot({g.ints()} % 4, 4)",
    "searchsorted": lambda g: f"torch.searchsorted({(x := g.full(1))}.detach().sort(-1)[0], {x}.detach())",
    "bucketize": lambda g: f"torch.bucketize({g.full()}.detach(), torch.tensor([-0.5, 0.0, 0.4]))",
    "scatter": lambda g: f"torch.scatter({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}), {g.like(x)})",
    "scatter_add": lambda g: f"torch.scatter_add({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argmax({d}, keepdim=True), {g.like(x)})",
    "scatter_reduce": lambda g: f"torch.scatter_reduce({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}) // 2, {g.like(x)}, '{g.some('sum', 'mean', 'amax', 'prod')}')",
    "index_add": lambda g: f"torch.index_add({(x := g.full(1))}, 0, torch.zeros({g.size(0, x)}, dtype=torch.int64), {g.like(x)})",
    "index_copy": lambda g: f"torch.index_copy({(x := g.full(1))}, 0, torch.arange({g.size(0, x)}), {g.like(x)})",
    "index_fill": lambda g: f"torch.index_fill({(x := g.full(1))}, {g.dim(x)}, torch.tensor([0]), {g.number_text()})",
    "index_put": lambda g: f"torch.index_put({(x := g.full(1))}, ({g.index(g.size(0, x))},), {x}.sum(), accumulate=True)",
    "masked_scatter": lambda g: f"torch.masked_scatter({(x := g.full())}, {g.mask(x)}, {g.like(x)})",
    "tril_indices": lambda g: f"{(x := g.full(2, 2))}[torch.tril_indices({g.size(0, x)}, {g.size(1, x)}).unbind(0)]",
    "argwhere_free": lambda g: f"torch.where({(x := g.full())} > 0, {x}, {x}.new_zeros(()))",
    "isin": lambda g: f"torch.isin({g.ints()}, torch.tensor([1, 2]))",
    "compare": lambda g: f"({(x := g.x())} {g.some('>', '<=', '==', '!=')} {g.wide(x)})",
    "logical": lambda g: f"(({(x := g.x())} > 0) {g.some('&', '|', '^')} ({g.wide(x)} < 0.4))",
    "bits": lambda g: f"({g.ints()} {g.some('&', '|', '^', '<<', '>>')} 1)",
    "integer": lambda g: f"({g.ints()} {g.some('*', '+', '-', '//', '%')} {g.int(1, 4)})",
    "to_float": lambda g: f"{g.ints()}.to(torch.float32) * {g.number_text()}",
    "from_mask": lambda g: f"{g.pick(lambda x: x.dtype is torch.bool)} * 1.5",
    "isfinite": lambda g: f"torch.isfinite({g.x()}).sum()",
    "cumsum_ints": lambda g: f"{g.pick(lambda x: x.dtype is torch.int64 and x.ndim > 0)}.cumsum(0)",
    "combinations": lambda g: f"torch.combinations({g.full(1, 1)}, 2)",
    "cartesian_prod": lambda g: f"torch.cartesian_prod({g.full(1, 1)}, {g.full(1, 1)})",
    "vander": lambda g: f"torch.vander({g.full(1, 1)}, 3)",
    "histc_free": lambda g: f"torch.bincount({g.ints()}.flatten() % 4, minlength=4)",
}  # fmt: skip

# --- products and solutions -------------------------------------------------------------------------------------------


def _square(g: Draw) -> str:
    """A well-conditioned square matrix, or a few."""
    n = g.int(1, 4)
    x = g.fitted(g.some((n, n), (2, n, n)))
    return f"({x} * 0.3 + 2.0 * torch.eye({n}))"


def _positive(g: Draw) -> str:
    n = g.int(1, 3)
    x = g.fitted((n, n))
    return f"({x} @ {x}.mT * 0.2 + torch.eye({n}))"


def _tall(g: Draw) -> str:
    """A matrix of full rank with distinct singular values."""
    n = g.int(1, 3)
    return f"(fit({g.single()}, ({n + 1}, {n})) * 0.2 + torch.eye({n + 1}, {n}) * torch.arange(1.0, {n + 1}))"


def _matmul(g: Draw) -> str:
    x = g.single(1)
    n = g.size(-1, x)
    return f"{x} @ {g.fitted(g.some((n, g.int(1, 4)), (n,), (2, n, 3)))}"


LINALG: dict[str, Row] = {
    "matmul": _matmul,
    "mm": lambda g: f"torch.mm({(x := g.single(2, 2))}, {g.fitted((g.size(1, x), 3))})",
    "bmm": lambda g: f"torch.bmm({(x := g.single(3, 3))}, {g.fitted((g.size(0, x), g.size(2, x), 2))})",
    "mv": lambda g: f"torch.mv({(x := g.single(2, 2))}, {g.fitted((g.size(1, x),))})",
    "dot": lambda g: f"torch.dot({(x := g.single(1, 1))}, {g.like(x)})",
    "outer": lambda g: f"torch.outer({g.single(1, 1)}, {g.single(1, 1)})",
    "addmm": lambda g: f"torch.addmm({g.fitted((3,))}, {(x := g.single(2, 2))}, {g.fitted((g.size(1, x), 3))}, beta=0.5, alpha=2)",
    "baddbmm": lambda g: f"torch.baddbmm({g.fitted((1, 1, 2))}, {(x := g.single(3, 3))}, {g.fitted((g.size(0, x), g.size(2, x), 2))})",
    "addmv": lambda g: f"torch.addmv({g.fitted((g.size(0, x := g.single(2, 2)),))}, {x}, {g.fitted((g.size(1, x),))})",
    "addr": lambda g: f"torch.addr({g.fitted((2, 3))}, {g.fitted((2,))}, {g.fitted((3,))})",
    "linear": lambda g: f"F.linear({(x := g.single(1))}, {g.fitted((3, g.size(-1, x)))}, {g.fitted((3,))})",
    "bilinear": lambda g: f"F.bilinear({(x := g.single(2, 2))}, {g.fitted((g.size(0, x), 2))}, {g.fitted((3, g.size(1, x), 2))})",
    "einsum": lambda g: f'torch.einsum("{g.some("ij,jk->ik", "ij,kj->ik", "ij,jk->k", "ij,jk->ijk", "ij,jk->")}", {(x := g.single(2, 2))}, fit({x}, ({g.size(1, x)}, {g.size(1, x)})))',
    "einsum_batch": lambda g: f'torch.einsum("{g.some("...i,ij->...j", "...i,...i->...")}", {(x := g.single(2))}, fit({x}, ({g.size(-1, x)}, {g.size(-1, x)})))',
    "tensordot": lambda g: f"torch.tensordot({(x := g.single(2))}, {x}, dims=([{(d := g.dim(x))}], [{d}]))",
    "inner": lambda g: f"torch.inner({(x := g.single(1, 2))}, {g.like(x)})",
    "kron": lambda g: f"torch.kron({g.single(1, 2)}, {g.fitted((2, 2))})",
    "cross": lambda g: f"torch.linalg.cross({g.fitted((2, 3))}, {g.fitted((2, 3))})",
    "cdist": lambda g: f"torch.cdist({g.fitted((2, 3))}, {g.fitted((4, 3))} + 3.0)",
    "inv": lambda g: f"torch.linalg.inv({_square(g)})",
    "det": lambda g: f"torch.linalg.det({_square(g)})",
    "slogdet": lambda g: f"torch.linalg.slogdet({_square(g)})",
    "solve": lambda g: f"torch.linalg.solve({(a := _square(g))}, {a}.sin())",
    "solve_triangular": lambda g: f"torch.linalg.solve_triangular({(a := _positive(g))}.tril(), {a}.cos(), upper=False)",
    "cholesky": lambda g: f"torch.linalg.cholesky({_positive(g)})",
    "cholesky_solve": lambda g: f"torch.cholesky_solve({(a := _positive(g))}.sin(), torch.linalg.cholesky({a}))",
    "qr": lambda g: f"torch.linalg.qr({_tall(g)})",
    "svdvals": lambda g: f"torch.linalg.svdvals({_tall(g)})",
    "eigvalsh": lambda g: f"torch.linalg.eigvalsh({_positive(g)} * torch.arange(1.0, {g.int(2, 3)}).sum())",
    "pinv": lambda g: f"torch.linalg.pinv({_tall(g)})",
    "lstsq_free": lambda g: f"torch.linalg.lu_factor({_square(g)})[0]",
    "matrix_exp": lambda g: f"torch.linalg.matrix_exp({_square(g)} * 0.3)",
    "matrix_power": lambda g: f"torch.linalg.matrix_power({_square(g)}, {g.some(2, 3, -1)})",
    "chain_matmul": lambda g: f"torch.linalg.multi_dot([{g.fitted((2, 3))}, {g.fitted((3, 2))}, {g.fitted((2, 4))}])",
    "cov": lambda g: f"torch.cov({g.fitted((2, 5))})",
    "corrcoef": lambda g: f"torch.corrcoef({g.fitted((2, 5))} + wave({g.fitted((2, 5))}))",
    "householder": lambda g: f"torch.linalg.householder_product({g.fitted((3, 2))}, {g.fitted((2,))} * 0.3)",
}  # fmt: skip

# --- layers as functions ----------------------------------------------------------------------------------------------


def _attention(g: Draw) -> str:
    shape = (1, g.int(1, 2), g.int(1, 4), 4)
    mask = g.some("", ", is_causal=True", f", attn_mask=fit({g.single()}, ({shape[2]}, {shape[2]}))",
                  f", attn_mask=torch.ones({shape[2]}, {shape[2]}, dtype=torch.bool).tril()", ", scale=0.3")  # fmt: skip
    return f"F.scaled_dot_product_attention({g.fitted(shape)}, {g.fitted(shape)}, {g.fitted(shape)}{mask})"


def _pool(g: Draw, name: str, dims: int) -> str:
    shape = (1, g.int(1, 3), *(g.int(3, 5) for _ in range(dims)))
    how = g.some("2", "2, stride=1", "3, stride=1, padding=1", "2, ceil_mode=True") if "adaptive" not in name else str(g.int(1, 3))
    how = f"{g.some(1, 2, 2.0)}, 2" if name.startswith("lp") else how
    return f"F.{name}{dims}d({g.fitted(shape)}, {how})"


def _conv(g: Draw, dims: int, transposed: bool) -> str:
    groups = g.some(1, 1, 2)
    c, o = 2 * groups, 2 * groups
    kernel = tuple(g.int(1, 2) for _ in range(dims))
    weight = (c, o // groups, *kernel) if transposed else (o, c // groups, *kernel)
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    how = g.some("", ", stride=2", ", padding=1", ", dilation=2") if dims < 3 else ""
    return f"F.{name}({g.fitted((1, c, *(3,) * dims))}, {g.fitted(weight)}, {g.some('None', g.fitted((o,)))}, groups={groups}{how})"


def _cross_entropy(g: Draw) -> str:
    x = g.single(2, 2)
    rows, classes = g.value(x).shape
    target = f"fit({g.ints()}, ({rows},)) % {classes}"
    how = g.some("", ", label_smoothing=0.1", f", weight=torch.arange(1.0, {classes + 1})", ", ignore_index=0, reduction='sum'", ", reduction='none'")
    return f"F.cross_entropy({x}, {target}{how})"


LAYERS: dict[str, Row] = {
    "attention": _attention,
    "attention_2": _attention,
    "layer_norm": lambda g: f"F.layer_norm({(x := g.single(1))}, ({g.size(-1, x)},), {g.some('None, None', g.fitted((g.size(-1, x),)) + ', ' + g.fitted((g.size(-1, x),)))}, 0.1)",
    "rms_norm": lambda g: f"F.rms_norm({(x := g.single(1))}, ({g.size(-1, x)},), {g.fitted((g.size(-1, x),))}, 0.1)",
    "group_norm": lambda g: f"F.group_norm({g.fitted((2, 4, 3))}, {g.some(1, 2, 4)}, {g.fitted((4,))}, {g.fitted((4,))}, 0.1)",
    "instance_norm": lambda g: f"F.instance_norm({g.fitted((2, 2, 4))}, eps=0.1)",
    "batch_norm": lambda g: f"F.batch_norm({g.fitted((3, 2, 2))}, None, None, {g.fitted((2,))}, {g.fitted((2,))}, True, 0.1, 0.1)",
    "batch_norm_eval": lambda g: f"F.batch_norm({g.fitted((3, 2))}, torch.zeros(2), torch.ones(2))",
    "local_response_norm": lambda g: f"F.local_response_norm({g.fitted((1, 4, 3))}, 2)",
    **{f"conv{d}d": (lambda g, d=d: _conv(g, d, False)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (lambda g, d=d: _conv(g, d, True)) for d in (1, 2, 3)},
    **{f"{n}{d}d": (lambda g, n=n, d=d: _pool(g, n, d)) for d in (1, 2, 3)
       for n in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")},
    "max_pool_indices": lambda g: f"F.max_pool2d({g.fitted((1, 2, 4, 4))}, 2, return_indices=True)",
    "max_unpool": lambda g: f"F.max_unpool2d(*F.max_pool2d({g.fitted((1, 2, 4, 4))}, 2, return_indices=True), 2)",
    "interpolate": lambda g: f"F.interpolate({g.fitted((1, 2, 2, 3))}, scale_factor=2, mode='{g.some('nearest', 'bilinear', 'bicubic', 'area', 'nearest-exact')}')",
    "interpolate_down": lambda g: f"F.interpolate({g.fitted((1, 1, 5, 4))}, size=(3, 2), mode='bilinear', align_corners={g.some(True, False)}, antialias={g.some(True, False)})",
    "interpolate_1d": lambda g: f"F.interpolate({g.fitted((1, 2, 4))}, size=7, mode='linear')",
    "grid_sample": lambda g: f"F.grid_sample({g.fitted((1, 2, 3, 3))}, torch.tanh({g.fitted((1, 2, 2, 2))}) * 0.8, mode='{g.some('bilinear', 'nearest', 'bicubic')}', align_corners=False)",
    "affine_grid": lambda g: f"F.affine_grid({g.fitted((1, 2, 3))}, (1, 1, 3, 2), align_corners=True)",
    "unfold_patches": lambda g: f"F.unfold({g.fitted((1, 2, 4, 4))}, 2, stride={g.some(1, 2)}, padding={g.some(0, 1)})",
    "fold": lambda g: f"F.fold({g.fitted((1, 8, 9))}, (4, 4), 2)",
    "cross_entropy": _cross_entropy,
    "nll_loss": lambda g: f"F.nll_loss(F.log_softmax({(x := g.single(2, 2))}, 1), fit({g.ints()}, ({g.size(0, x)},)) % {g.size(1, x)})",
    **_losses("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    "bce": lambda g: f"F.binary_cross_entropy(torch.sigmoid({(x := g.single())}), ({g.like(x)} > 0).to(torch.float32))",
    "bce_logits": lambda g: f"F.binary_cross_entropy_with_logits({(x := g.single())}, torch.sigmoid({g.like(x)}))",
    "kl_div": lambda g: f"F.kl_div(F.log_softmax({(x := g.single(2))}, -1), F.softmax({g.like(x)}, -1), reduction='{g.some('batchmean', 'sum')}')",
    "poisson_nll": lambda g: f"F.poisson_nll_loss({(x := g.single())}, {g.like(x)}.abs())",
    "gaussian_nll": lambda g: f"F.gaussian_nll_loss({(x := g.single(2))}, {g.like(x)}, {x}.square() + 0.5)",
    "soft_margin": lambda g: f"F.soft_margin_loss({(x := g.single(1))}, torch.sign({g.like(x)} + 0.01))",
    "hinge_embedding": lambda g: f"F.hinge_embedding_loss({(x := g.single(1))}, torch.sign({g.like(x)}.detach() + 0.01))",
    "multi_margin": lambda g: f"F.multi_margin_loss({(x := g.single(2, 2))}, fit({g.ints()}, ({g.size(0, x)},)) % {g.size(1, x)})",
    "multilabel_margin": lambda g: f"F.multilabel_soft_margin_loss({(x := g.single(2, 2))}, ({g.like(x)} > 0).to(torch.float32))",
    "triplet": lambda g: f"F.triplet_margin_loss({(x := g.single(2, 2))}, {g.like(x)} + 1.0, {g.like(x)} - 2.0)",
    "cosine_embedding": lambda g: f"F.cosine_embedding_loss({(x := g.single(2, 2))} + 2.0, {g.like(x)} - 1.0, torch.ones({g.size(0, x)}))",
    "margin_ranking": lambda g: f"F.margin_ranking_loss({(x := g.single(1))}, {g.like(x)}, torch.ones({tuple(g.value(x).shape)}))",
    "ctc": lambda g: f"F.ctc_loss(F.log_softmax({g.fitted((6, 1, 4))}, 2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))",
}  # fmt: skip

# --- complex numbers --------------------------------------------------------------------------------------------------

COMPLEX: dict[str, Row] = {
    "complex": lambda g: f"torch.complex({(x := g.full())}, {g.like(x)})",
    "polar": lambda g: f"torch.polar({(x := g.full())}.abs() + 0.1, {g.like(x)})",
    "view_as_complex": lambda g: f"torch.view_as_complex({g.fitted((g.int(1, 3), 2))}.contiguous())",
    "view_as_real": lambda g: f"torch.view_as_real({g.complex()}.resolve_conj())",
    "real": lambda g: f"{g.complex()}.{g.some('real', 'imag')}",
    "abs_complex": lambda g: f"{g.complex()}.abs()",
    "angle": lambda g: f"torch.angle({g.complex()} + 4.0)",
    "conj": lambda g: f"{g.complex()}.conj()",
    "resolve_conj": lambda g: f"{g.complex()}.conj().resolve_conj() * 2.0",
    "times": lambda g: f"{(z := g.complex())} * {g.some('(0.5 - 0.3j)', z + '.conj()', 1.5)}",
    "complex_exp": lambda g: f"torch.exp({g.complex()} * 0.3)",
    "complex_unary": lambda g: f"torch.{g.some('sin', 'tanh', 'sqrt', 'reciprocal', 'sigmoid', 'log')}({g.complex()} * 0.3 + 1.5)",
    "complex_div": lambda g: f"{(z := g.complex())} / ({z}.abs() + 1.0)",
    "complex_matmul": lambda g: f"{(z := g.complex(2))} @ {z}.mH",
    "complex_sum": lambda g: f"{g.complex()}.{g.some('sum', 'mean', 'cumsum')}({g.int(0, 0)})",
    "complex_view": lambda g: f"{(z := g.complex(1))}.{g.some('flip(0)', 'reshape(-1)', 'clone()', 'unsqueeze(0)', 'mT')}",
    "fft": lambda g: f"torch.fft.{g.some('fft', 'ifft')}({g.full(1)}, norm='{g.some('backward', 'ortho')}')",
    "rfft": lambda g: f"torch.fft.rfft({g.full(1)}, dim={g.dim()})",
    "irfft": lambda g: f"torch.fft.irfft({g.full(1)}, n={g.int(3, 5)})",
    "fft2": lambda g: f"torch.fft.{g.some('fft2', 'ifft2', 'fftn')}({g.full(2)})",
    "rfftn": lambda g: f"torch.fft.rfftn({g.full(2)})",
    "fftshift": lambda g: f"torch.fft.fftshift({g.full(1)})",
    "hfft": lambda g: f"torch.fft.hfft({g.full(1)}, n=4)",
    "stft": lambda g: f"torch.stft({g.fitted(g.some((8,), (2, 8)))}, 4, {g.int(1, 4)}, window=torch.hann_window(4), center={g.some(True, False)}, return_complex=True)",
    "istft": lambda g: f"torch.istft(torch.stft({g.fitted((8,))}, 4, 2, window=torch.ones(4), return_complex=True), 4, 2, window=torch.ones(4))",
}  # fmt: skip

# --- torch.func, checkpoints, control, ambient draws ------------------------------------------------------------------

FUNC: dict[str, Row] = {
    "grad": lambda g: f"torch.func.grad(lambda t: (t * t.sin()).sum())({g.full()})",
    "grad_two": lambda g: f"torch.func.grad(lambda t, u: (t * u.cos()).sum(), argnums=(0, 1))({(x := g.full())}, {g.like(x)})",
    "vmap": lambda g: f"torch.func.vmap(lambda t: t.{g.some('cumsum(0)', 'flip(0)', 'softmax(0)', 'sort()[0]', 'roll(1)')})({g.full(2)})",
    "vmap_pair": lambda g: f"torch.func.vmap(torch.outer)({(x := g.single(2, 2))}, {g.like(x)})",
    "vmap_grad": lambda g: f"torch.func.vmap(torch.func.grad(lambda t: t.pow(3).sum()))({g.full(2)})",
    "jvp": lambda g: f"torch.func.jvp(lambda t: torch.tanh(t) * t, ({(x := g.full())},), ({g.like(x)},))",
    "vjp": lambda g: f"torch.func.vjp(lambda t: t.exp().sum(0), {(x := g.full(1))})[1]({x}[0])[0]",
    "jacrev": lambda g: f"torch.func.jacrev(lambda t: t.sin() * t.sum())({g.full(1, 1)})",
    "jacfwd": lambda g: f"torch.func.jacfwd(lambda t: t.cumsum(0).square())({g.full(1, 1)})",
    "hessian": lambda g: f"torch.func.hessian(lambda t: t.pow(3).sum() * t.sin().sum())({g.full(1, 1)})",
    "functionalized": lambda g: f"torch.func.vmap(lambda t: t.clone().mul_(2.0).add_(t))({g.full(2)})",
    "autograd_grad": lambda g: f"torch.autograd.grad((({(x := g.full())} + 0.0).sin() * {x}).sum(), {x}, create_graph=True)[0]",
    "checkpoint": lambda g: f"torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t) * t.exp(), {g.full()}, use_reentrant=False)",
    "linearize_free": lambda g: f"torch.func.jvp(torch.func.grad(lambda t: t.pow(3).sum()), ({(x := g.full())},), ({g.like(x)},))[1]",
    "no_grad": lambda g: f"{(x := g.full())} * torch.no_grad()(lambda: {x}.sin())()",
    "closure": lambda g: f"[{(x := g.full())} * k for k in (1.0, 2.0)][1]",
}  # fmt: skip

DRAWS: dict[str, Row] = {
    "dropout": lambda g: f"F.dropout({g.full()}, {g.some(0.1, 0.5)})",
    "dropout2d": lambda g: f"F.dropout2d({g.fitted((2, 3, 2, 2))}, 0.4)",
    "alpha_dropout": lambda g: f"F.alpha_dropout({g.full()}, 0.3)",
    "rand_like": lambda g: f"{(x := g.full())} * torch.rand_like({x})",
    "randn": lambda g: f"{(x := g.single())} + torch.randn({tuple(g.value(x).shape)})",
    "bernoulli": lambda g: f"{(x := g.single())} * torch.bernoulli(torch.sigmoid({x}.detach()))",
    "randint": lambda g: "torch.randint(0, 3, (2, 2))",
    "randperm": lambda g: f"{(x := g.full(1))}[torch.randperm({g.size(0, x)})]",
    "uniform": lambda g: f"{(x := g.single())} + torch.zeros({tuple(g.value(x).shape)}).uniform_(-1, 1)",
    "normal_in_place": lambda g: f"{(x := g.single())} * torch.empty({tuple(g.value(x).shape)}).normal_()",
    "gumbel": lambda g: f"F.gumbel_softmax({g.single(1)}, tau=0.8)",
    "attention_dropout": lambda g: f"F.scaled_dot_product_attention({g.fitted((1, 1, 3, 4))}, {g.fitted((1, 1, 3, 4))}, {g.fitted((1, 1, 3, 4))}, dropout_p=0.4)",
    "multinomial": lambda g: f"torch.multinomial(F.softmax({g.single(1, 2)}.detach(), -1), 1)",
}  # fmt: skip

DYNAMIC: dict[str, Row] = {  # what no static program can compute: refused, and said why
    "nonzero": lambda g: f"({g.full(1)} > 0.1).nonzero()",
    "boolean_index": lambda g: f"{(x := g.full(1))}[{x} > -9.0]",
    "masked_select": lambda g: f"torch.masked_select({(x := g.full(1))}, {x} > -9.0)",
    "unique": lambda g: f"torch.unique({g.ints()})",
    "item": lambda g: f"{(x := g.full())} * {x}.sum().item()",
    "branch": lambda g: f"({(x := g.full())} if {x}.sum() > -99.0 else {x}.sin())",
}  # fmt: skip
