"""reductions: sums, norms, sorts, and reading and writing by index."""

from __future__ import annotations

import torch

from lab.fuzz.ops.rows import Row, along, over

REDUCTIONS: dict[str, Row] = {
    **over("sum", "mean", "prod", "std", "var", "amax", "amin", "norm"),
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
    "vector_norm": lambda g: (
        f"torch.linalg.vector_norm({(x := g.full(1))} + 2.0, {g.some(1, 2, 3, 0.5, 'torch.inf')}, {g.dims(x)})"
    ),
    "matrix_norm": lambda g: f"torch.linalg.matrix_norm({g.full(2)} + 1.0{g.some('', ', 1', ', torch.inf', ', 2')})",
    "dist": lambda g: f"torch.dist({(x := g.full())}, {g.like(x)} + 2.0, {g.some(1, 2)})",
    "count_nonzero": lambda g: f"torch.count_nonzero({g.full(1)} > 0.1)",
    "any": lambda g: f"({g.full(1)} > 0.3).{g.some('any', 'all')}({g.dim()})",
    "trace": lambda g: f"torch.trace({g.full(2, 2)})",
    **along("torch.cumsum({x}, {d})", "torch.cumprod({x}, {d})", "torch.logcumsumexp({x}, {d})",
             "torch.cummax({x}, {d})", "torch.cummin({x}, {d})", "torch.diff({x}, dim={d})",
             "torch.trapezoid({x}, dim={d})", "torch.gradient({x}, dim={d})",
             "torch.cumulative_trapezoid({x}, dim={d})", "torch.renorm({x}, 2, {d}, 0.8)"),
}  # fmt: skip

INDEXING: dict[str, Row] = {
    "sort": lambda g: f"torch.sort({(x := g.full(1))}, {g.dim(x)}, descending={g.some(True, False)})",
    "msort": lambda g: f"torch.msort({g.full(1)})",
    "argsort": lambda g: f"torch.argsort({(x := g.full(1))}, {g.dim(x)})",
    "topk": lambda g: f"torch.topk({(x := g.full(1))}, {g.int(1, 2)}, {g.dim(x)}, largest={g.some(True, False)})",
    "argmax": lambda g: f"{(x := g.full(1))}.{g.some('argmax', 'argmin')}({g.dim(x)}, keepdim={g.some(True, False)})",
    "gather": lambda g: f"torch.gather({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}))",
    "take_along_dim": lambda g: (
        f"torch.take_along_dim({(x := g.full(1))}, {x}.argmax({(d := g.dim(x))}, keepdim=True), {d})"
    ),
    "index": lambda g: f"{(x := g.full(1))}[{g.index(g.size(0, x))}]",
    "index_two": lambda g: (
        f"{(x := g.full(2))}[{g.index(g.size(0, x))}, {(between := g.some(':', '...'))}, "
        f"{g.index(g.size(min(2, g.value(x).ndim - 1) if between == ':' else -1, x))}]"
    ),
    "index_both": lambda g: f"{(x := g.full(2))}[{(i := g.ints())} % {g.size(0, x)}, {i} % {g.size(1, x)}]",
    "index_list": lambda g: f"{g.full(1)}[[0, -1, 0]]",
    "index_select": lambda g: (
        f"torch.index_select({(x := g.full(1))}, {(d := g.dim(x))}, {g.index(g.size(d, x))}.flatten())"
    ),
    "take": lambda g: f"torch.take({(x := g.full())}, {g.index(g.value(x).numel())})",
    "embedding": lambda g: (
        f"F.embedding({g.index(g.size(0, x := g.single(2, 2)))}, {x}"
        f"{g.some('', ', padding_idx=0', ', scale_grad_by_freq=True')})"
    ),
    "embedding_bag": lambda g: (
        f"F.embedding_bag({g.index(g.size(0, x := g.single(2, 2)))}, {x}, mode='{g.some('sum', 'mean', 'max')}')"
    ),
    "one_hot": lambda g: f"F.one_hot({g.ints()} % 4, 4)",
    "searchsorted": lambda g: f"torch.searchsorted({(x := g.full(1))}.detach().sort(-1)[0], {x}.detach())",
    "bucketize": lambda g: f"torch.bucketize({g.full()}.detach(), torch.tensor([-0.5, 0.0, 0.4]))",
    "scatter": lambda g: f"torch.scatter({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}), {g.like(x)})",
    "scatter_add": lambda g: (
        f"torch.scatter_add({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argmax({d}, keepdim=True), {g.like(x)})"
    ),
    "scatter_reduce": lambda g: (
        f"torch.scatter_reduce({(x := g.full(1))}, {(d := g.dim(x))}, {x}.argsort({d}) // 2, {g.like(x)}, "
        f"'{g.some('sum', 'mean', 'amax', 'prod')}')"
    ),
    "index_add": lambda g: (
        f"torch.index_add({(x := g.full(1))}, 0, torch.zeros({g.size(0, x)}, dtype=torch.int64), {g.like(x)})"
    ),
    "index_copy": lambda g: f"torch.index_copy({(x := g.full(1))}, 0, torch.arange({g.size(0, x)}), {g.like(x)})",
    "index_fill": lambda g: f"torch.index_fill({(x := g.full(1))}, {g.dim(x)}, torch.tensor([0]), {g.number_text()})",
    "index_put": lambda g: (
        f"torch.index_put({(x := g.full(1))}, ({g.index(g.size(0, x))},), {x}.sum(), accumulate=True)"
    ),
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
