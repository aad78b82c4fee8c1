"""control: `torch.func`, checkpoints, draws from the ambient generator, and what is known only when it runs."""

from __future__ import annotations

from lab.fuzz.ops.rows import Row

FUNC: dict[str, Row] = {
    "grad": lambda g: f"torch.func.grad(lambda t: (t * t.sin()).sum())({g.full()})",
    "grad_two": lambda g: (
        f"torch.func.grad(lambda t, u: (t * u.cos()).sum(), argnums=(0, 1))({(x := g.full())}, {g.like(x)})"
    ),
    "vmap": lambda g: (
        f"torch.func.vmap(lambda t: t.{g.some('cumsum(0)', 'flip(0)', 'softmax(0)', 'sort()[0]', 'roll(1)')})("
        f"{g.full(2)})"
    ),
    "vmap_pair": lambda g: f"torch.func.vmap(torch.outer)({(x := g.single(2, 2))}, {g.like(x)})",
    "vmap_grad": lambda g: f"torch.func.vmap(torch.func.grad(lambda t: t.pow(3).sum()))({g.full(2)})",
    "jvp": lambda g: f"torch.func.jvp(lambda t: torch.tanh(t) * t, ({(x := g.full())},), ({g.like(x)},))",
    "vjp": lambda g: f"torch.func.vjp(lambda t: t.exp().sum(0), {(x := g.full(1))})[1]({x}[0])[0]",
    "jacrev": lambda g: f"torch.func.jacrev(lambda t: t.sin() * t.sum())({g.full(1, 1)})",
    "jacfwd": lambda g: f"torch.func.jacfwd(lambda t: t.cumsum(0).square())({g.full(1, 1)})",
    "hessian": lambda g: f"torch.func.hessian(lambda t: t.pow(3).sum() * t.sin().sum())({g.full(1, 1)})",
    "functionalized": lambda g: f"torch.func.vmap(lambda t: t.clone().mul_(2.0).add_(t))({g.full(2)})",
    "autograd_grad": lambda g: (
        f"torch.autograd.grad((({(x := g.full())} + 0.0).sin() * {x}).sum(), {x}, create_graph=True)[0]"
    ),
    "checkpoint": lambda g: (
        f"torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t) * t.exp(), {g.full()}, use_reentrant=False)"
    ),
    "linearize_free": lambda g: (
        f"torch.func.jvp(torch.func.grad(lambda t: t.pow(3).sum()), ({(x := g.full())},), ({g.like(x)},))[1]"
    ),
    "no_grad": lambda g: f"{(x := g.full())} * torch.no_grad()(lambda: {x}.sin())()",
    "closure": lambda g: f"[{g.full()} * k for k in (1.0, 2.0)][1]",
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
    "attention_dropout": lambda g: (
        f"F.scaled_dot_product_attention({g.fitted((1, 1, 3, 4))}, {g.fitted((1, 1, 3, 4))}, {g.fitted((1, 1, 3, 4))}"
        ", dropout_p=0.4)"
    ),
    "multinomial": lambda g: f"torch.multinomial(F.softmax({g.single(1, 2)}.detach(), -1), 1)",
}  # fmt: skip

DYNAMIC: dict[str, Row] = {  # no static program can compute them: refused with a reason
    "nonzero": lambda g: f"({g.full(1)} > 0.1).nonzero()",
    "boolean_index": lambda g: f"{(x := g.full(1))}[{x} > -9.0]",
    "masked_select": lambda g: f"torch.masked_select({(x := g.full(1))}, {x} > -9.0)",
    "unique": lambda g: f"torch.unique({g.ints()})",
    "item": lambda g: f"{(x := g.full())} * {x}.sum().item()",
    "branch": lambda g: f"({(x := g.full())} if {x}.sum() > -99.0 else {x}.sin())",
}  # fmt: skip
