"""pointwise: arithmetic, functions and activations, element by element."""

from __future__ import annotations

from lab.fuzz.ops.rows import Row, activation, along, binary, unary

POINTWISE: dict[str, Row] = {
    **unary(
        "sin", "cos", "tanh", "sigmoid", "exp", "expm1", "erf", "erfc", "atan", "asinh", "sinh", "cosh", "square",
        "neg", "abs", "sgn", "floor", "ceil", "round", "trunc", "frac", "sinc", "deg2rad", "exp2", "positive", "relu",
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
    **binary("add", "sub", "mul", "maximum", "minimum", "fmax", "fmin", "atan2", "logaddexp", "logaddexp2", "copysign"),
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

ACTIVATIONS: dict[str, Row] = {
    **activation(
        "gelu", "silu", "elu", "selu", "celu", "mish", "softplus", "softsign", "leaky_relu", "logsigmoid", "hardtanh",
        "hardswish", "hardsigmoid", "tanhshrink", "softshrink", "hardshrink", "relu6",
    ),
    "gelu_tanh": lambda g: f'F.gelu({g.x()}, approximate="tanh")',
    "threshold": lambda g: f"F.threshold({g.x()}, 0.1, -0.3)",
    "prelu": lambda g: f"F.prelu({g.single(2)}, torch.tensor(0.3))",
    "rrelu_eval": lambda g: f"F.rrelu({g.x()}, training=False)",
    **along("F.softmax({x}, {d})", "F.log_softmax({x}, {d})", "F.softmin({x}, {d})"),
    **along("F.normalize({x}, dim={d}, eps=0.1)"),
    "glu": lambda g: f"F.glu(torch.cat([{(x := g.full(1))}, {x}.sin()], {(d := g.dim(x))}), {d})",
    "softmax_masked": lambda g: (
        f"F.softmax({(x := g.full(1))}.masked_fill({x} < {x}.amax({(d := g.dim(x))}, True) - 0.1, -torch.inf), {d})"
    ),
    "cosine_similarity": lambda g: (
        f"F.cosine_similarity({(x := g.full(1))} + 2.0, {g.like(x)}, dim={g.dim(x)}, eps=0.1)"
    ),
    "pairwise_distance": lambda g: f"F.pairwise_distance({(x := g.full(2, 2))}, {g.like(x)} + 3.0)",
}  # fmt: skip
