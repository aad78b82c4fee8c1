"""views: other shapes, parts and orders of a tensor."""

from __future__ import annotations

from lab.fuzz.operands import Draw
from lab.fuzz.ops.rows import Row


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
    shape: list[int] = []
    strides: list[int] = []
    reach = 0
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
    return f"{own}.as_strided({tuple(shape)}, {tuple(strides)}{f', {start}' if start else ''})"


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
    "pad_reflect": lambda g: (
        f'F.pad({g.fitted((2, 4))}, ({g.int(0, 2)}, 1), mode="{g.some("reflect", "replicate", "circular")}")'
    ),
    "pad_2d": lambda g: (
        f'F.pad({g.fitted((1, 2, 3, 4))}, (1, {g.int(0, 2)}, 0, 2), mode="{g.some("reflect", "replicate")}")'
    ),
}  # fmt: skip
