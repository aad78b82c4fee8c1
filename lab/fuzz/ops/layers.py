"""layers: `torch.nn.functional`: attention, norms, convolutions, pooling, losses."""

from __future__ import annotations

from functools import partial

from lab.fuzz.operands import Draw
from lab.fuzz.ops.rows import Row, losses


def _attention(g: Draw) -> str:
    shape = (1, g.int(1, 2), g.int(1, 4), 4)
    square = (shape[2], shape[2])
    masks = (f"fit({g.single()}, {square})", f"torch.ones({square}, dtype=torch.bool).tril()")
    mask = g.some("", ", is_causal=True", f", attn_mask={masks[0]}", f", attn_mask={masks[1]}", ", scale=0.3")
    return f"F.scaled_dot_product_attention({g.fitted(shape)}, {g.fitted(shape)}, {g.fitted(shape)}{mask})"


def _pool(g: Draw, name: str, dims: int) -> str:
    shape = (1, g.int(1, 3), *(g.int(3, 5) for _ in range(dims)))
    how = (
        g.some("2", "2, stride=1", "3, stride=1, padding=1", "2, ceil_mode=True")
        if "adaptive" not in name
        else str(g.int(1, 3))
    )
    how = f"{g.some(1, 2, 2.0)}, 2" if name.startswith("lp") else how
    return f"F.{name}{dims}d({g.fitted(shape)}, {how})"


def _conv(g: Draw, dims: int, transposed: bool) -> str:
    groups = g.some(1, 1, 2)
    c, o = 2 * groups, 2 * groups
    kernel = tuple(g.int(1, 2) for _ in range(dims))
    weight = (c, o // groups, *kernel) if transposed else (o, c // groups, *kernel)
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    how = g.some("", ", stride=2", ", padding=1", ", dilation=2") if dims < 3 else ""
    bias = g.some("None", g.fitted((o,)))
    return f"F.{name}({g.fitted((1, c, *(3,) * dims))}, {g.fitted(weight)}, {bias}, groups={groups}{how})"


def _cross_entropy(g: Draw) -> str:
    x = g.single(2, 2)
    rows, classes = g.value(x).shape
    target = f"fit({g.ints()}, ({rows},)) % {classes}"
    how = g.some(
        "",
        ", label_smoothing=0.1",
        f", weight=torch.arange(1.0, {classes + 1})",
        ", ignore_index=0, reduction='sum'",
        ", reduction='none'",
    )
    return f"F.cross_entropy({x}, {target}{how})"


LAYERS: dict[str, Row] = {
    "attention": _attention,
    "attention_2": _attention,
    "layer_norm": lambda g: (
        f"F.layer_norm({(x := g.single(1))}, ({g.size(-1, x)},), "
        f"{g.some('None, None', g.fitted((g.size(-1, x),)) + ', ' + g.fitted((g.size(-1, x),)))}, 0.1)"
    ),
    "rms_norm": lambda g: f"F.rms_norm({(x := g.single(1))}, ({g.size(-1, x)},), {g.fitted((g.size(-1, x),))}, 0.1)",
    "group_norm": lambda g: (
        f"F.group_norm({g.fitted((2, 4, 3))}, {g.some(1, 2, 4)}, {g.fitted((4,))}, {g.fitted((4,))}, 0.1)"
    ),
    "instance_norm": lambda g: f"F.instance_norm({g.fitted((2, 2, 4))}, eps=0.1)",
    "batch_norm": lambda g: (
        f"F.batch_norm({g.fitted((3, 2, 2))}, None, None, {g.fitted((2,))}, {g.fitted((2,))}, True, 0.1, 0.1)"
    ),
    "batch_norm_eval": lambda g: f"F.batch_norm({g.fitted((3, 2))}, torch.zeros(2), torch.ones(2))",
    "local_response_norm": lambda g: f"F.local_response_norm({g.fitted((1, 4, 3))}, 2)",
    **{f"conv{d}d": partial(_conv, dims=d, transposed=False) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": partial(_conv, dims=d, transposed=True) for d in (1, 2, 3)},
    **{f"{n}{d}d": partial(_pool, name=n, dims=d) for d in (1, 2, 3)
       for n in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")},
    "max_pool_indices": lambda g: f"F.max_pool2d({g.fitted((1, 2, 4, 4))}, 2, return_indices=True)",
    "max_unpool": lambda g: f"F.max_unpool2d(*F.max_pool2d({g.fitted((1, 2, 4, 4))}, 2, return_indices=True), 2)",
    "interpolate": lambda g: (
        f"F.interpolate({g.fitted((1, 2, 2, 3))}, scale_factor=2, "
        f"mode='{g.some('nearest', 'bilinear', 'bicubic', 'area', 'nearest-exact')}')"
    ),
    "interpolate_down": lambda g: (
        f"F.interpolate({g.fitted((1, 1, 5, 4))}, size=(3, 2), mode='bilinear', align_corners={g.some(True, False)}, "
        f"antialias={g.some(True, False)})"
    ),
    "interpolate_1d": lambda g: f"F.interpolate({g.fitted((1, 2, 4))}, size=7, mode='linear')",
    "grid_sample": lambda g: (
        f"F.grid_sample({g.fitted((1, 2, 3, 3))}, torch.tanh({g.fitted((1, 2, 2, 2))}) * 0.8, "
        f"mode='{g.some('bilinear', 'nearest', 'bicubic')}', align_corners=False)"
    ),
    "affine_grid": lambda g: f"F.affine_grid({g.fitted((1, 2, 3))}, (1, 1, 3, 2), align_corners=True)",
    "unfold_patches": lambda g: f"F.unfold({g.fitted((1, 2, 4, 4))}, 2, stride={g.some(1, 2)}, padding={g.some(0, 1)})",
    "fold": lambda g: f"F.fold({g.fitted((1, 8, 9))}, (4, 4), 2)",
    "cross_entropy": _cross_entropy,
    "nll_loss": lambda g: (
        f"F.nll_loss(F.log_softmax({(x := g.single(2, 2))}, 1), fit({g.ints()}, ({g.size(0, x)},)) % {g.size(1, x)})"
    ),
    **losses("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    "bce": lambda g: f"F.binary_cross_entropy(torch.sigmoid({(x := g.single())}), ({g.like(x)} > 0).to(torch.float32))",
    "bce_logits": lambda g: f"F.binary_cross_entropy_with_logits({(x := g.single())}, torch.sigmoid({g.like(x)}))",
    "kl_div": lambda g: (
        f"F.kl_div(F.log_softmax({(x := g.single(2))}, -1), F.softmax({g.like(x)}, -1), "
        f"reduction='{g.some('batchmean', 'sum')}')"
    ),
    "poisson_nll": lambda g: f"F.poisson_nll_loss({(x := g.single())}, {g.like(x)}.abs())",
    "gaussian_nll": lambda g: f"F.gaussian_nll_loss({(x := g.single(2))}, {g.like(x)}, {x}.square() + 0.5)",
    "soft_margin": lambda g: f"F.soft_margin_loss({(x := g.single(1))}, torch.sign({g.like(x)}.detach() + 0.01))",
    "hinge_embedding": lambda g: (
        f"F.hinge_embedding_loss({(x := g.single(1))}, torch.sign({g.like(x)}.detach() + 0.01))"
    ),
    "multi_margin": lambda g: (
        f"F.multi_margin_loss({(x := g.single(2, 2))}, fit({g.ints()}, ({g.size(0, x)},)) % {g.size(1, x)})"
    ),
    "multilabel_margin": lambda g: (
        f"F.multilabel_soft_margin_loss({(x := g.single(2, 2))}, ({g.like(x)} > 0).to(torch.float32))"
    ),
    "triplet": lambda g: f"F.triplet_margin_loss({(x := g.single(2, 2))}, {g.like(x)} + 1.0, {g.like(x)} - 2.0)",
    "cosine_embedding": lambda g: (
        f"F.cosine_embedding_loss({(x := g.single(2, 2))} + 2.0, {g.like(x)} - 1.0, torch.ones({g.size(0, x)}))"
    ),
    "margin_ranking": lambda g: (
        f"F.margin_ranking_loss({(x := g.single(1))}, {g.like(x)}, torch.ones({tuple(g.value(x).shape)}))"
    ),
    "ctc": lambda g: (
        f"F.ctc_loss(F.log_softmax({g.fitted((6, 1, 4))}, 2), torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor("
        "[2]))"
    ),
}  # fmt: skip
