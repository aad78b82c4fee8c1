"""Losses written with torch.func and kin, all means over the examples of a batch, and a small net that they train."""

from typing import Any

import torch
import torch.nn.functional as F
from models import generator
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from fzero import optim, random, tree

EXAMPLES, WIDTH = 4, 5  # of one rank; a multiple of two
NORM = 4.0  # of a private gradient


def params(dtype: torch.dtype = torch.float32) -> Any:
    k = random.split(random.key(21), 4)
    sizes = [(WIDTH, 7), (7, 6), (6, 1)]
    layers = [
        {
            "w": random.normal(key, size).to(dtype) * 0.5,
            "b": random.normal(random.fold_in(key, 1), size[1]).to(dtype) * 0.1,
        }
        for key, size in zip(k, sizes, strict=False)
    ]
    return {"layers": layers, "scale": torch.tensor(1.3, dtype=dtype)}


def net(p: Any, x: Tensor) -> Tensor:
    """x (..., WIDTH) to (...)."""
    *hidden, last = p["layers"]
    for layer in hidden:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ last["w"] + last["b"]).squeeze(-1) * p["scale"]


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Any:
    made = torch.randn((EXAMPLES, 2 * WIDTH + 1), generator=generator(rank, step)).to(dtype)
    keys = random.split(random.fold_in(random.fold_in(random.key(5), step), rank), EXAMPLES)
    x, v, y = made.split([WIDTH, WIDTH, 1], dim=1)
    return {"x": x.contiguous(), "v": v.contiguous(), "y": y[:, 0].contiguous(), "key": keys}


def one_loss(p: Any, example: Any) -> Tensor:
    return (net(p, example["x"]) - example["y"]).square()


# --- losses -----------------------------------------------------------------------------------------------------------


def mapped(p: Any, b: Any) -> Tensor:
    """vmap over examples; and over two copies of the parameters."""
    two = tree.map(lambda x: torch.stack([x, 2 * x]), p)
    both = vmap(vmap(one_loss, in_dims=(None, 0)), in_dims=(0, None))(two, b)
    return vmap(one_loss, in_dims=(None, 0))(p, b).mean() + 0.1 * both.mean()


def penalty(p: Any, b: Any) -> Tensor:
    """WGAN-GP: the norm of the gradient in the input, by torch.func."""
    gradients = vmap(grad(net, argnums=1), in_dims=(None, 0))(p, b["x"])
    return vmap(one_loss, (None, 0))(p, b).mean() + (gradients.norm(dim=1) - 1).square().mean()


def old_penalty(p: Any, b: Any) -> Tensor:
    """The same by double backward."""
    x = b["x"].detach().requires_grad_()
    out = net(p, x)
    (gradients,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - b["y"]).square().mean() + (gradients.norm(dim=1) - 1).square().mean()


def directional(p: Any, b: Any) -> Tensor:
    """jvp in the input along v, for all examples at once."""
    out, tangent = jvp(lambda x: net(p, x), (b["x"],), (b["v"],))
    return (out - b["y"]).square().mean() + 0.3 * tangent.square().mean()


def along_params(p: Any, b: Any) -> Tensor:
    """jvp in the parameters, along themselves."""
    out, tangent = jvp(lambda q: net(q, b["x"]), (p,), (tree.map(torch.sin, p),))
    return (out - b["y"]).square().mean() + 0.1 * tangent.square().mean()


def laplacian(p: Any, b: Any) -> Tensor:
    """A physics-informed loss: the trace of the Hessian in the input (forward over reverse)."""
    second = vmap(hessian(net, argnums=1), in_dims=(None, 0))(p, b["x"])
    return (second.diagonal(dim1=1, dim2=2).sum(1) - torch.sin(b["y"])).square().mean()


def jacobians(p: Any, b: Any) -> Tensor:
    """jacrev and jacfwd of a vector function, and a vjp."""

    def hidden(x: Tensor) -> Tensor:
        return torch.tanh(x @ p["layers"][0]["w"] + p["layers"][0]["b"]) @ p["layers"][1]["w"]

    forward, reverse = vmap(jacfwd(hidden))(b["x"]), vmap(jacrev(hidden))(b["x"])
    out, pull = vjp(lambda x: net(p, x), b["x"])
    (pulled,) = pull(b["y"])
    return forward.square().mean() + (reverse * forward).mean() + pulled.square().mean() + out.mean()


def curvature(p: Any, b: Any) -> Tensor:
    """A Hessian-vector product in the parameters, forward over reverse, along a fixed direction."""

    def whole(q: Any) -> Tensor:
        return vmap(one_loss, (None, 0))(q, b).mean()

    direction = tree.map(torch.cos, p)
    _, product = jvp(grad(whole), (p,), (tree.map(torch.Tensor.detach, direction),))
    # Linear in the product: the square of a mean would not be a mean over examples.
    pairs = zip(tree.flatten(product)[1], tree.flatten(direction)[1], strict=True)
    return whole(p) + 0.05 * torch.stack([(h * d.detach()).sum() for h, d in pairs]).sum()


def maml(p: Any, b: Any) -> Tensor:
    """Each example is a task: two inner steps of momentum SGD on it, then its loss elsewhere."""
    tx = optim.sgd(0.05, momentum=0.9)

    def task(example: Any) -> Tensor:
        fast, state = p, tx.init(p)
        for _ in range(2):
            updates, state = tx.update(grad(one_loss)(fast, example), state, fast)
            fast = optim.apply_updates(fast, updates)
        return one_loss(fast, {"x": example["v"], "y": example["y"]})

    return vmap(task)(b).mean()


def maml_loop(p: Any, b: Any) -> Tensor:
    """With a Python loop over tasks of two examples each, and old-style autograd."""
    losses = []
    for x, v, y in zip(*(b[name].split(2) for name in ("x", "v", "y")), strict=True):
        _, leaves, spec = tree.flatten(p)
        for _ in range(2):
            inner = (net(tree.unflatten(spec, leaves), x) - y).square().mean()
            gradients = torch.autograd.grad(inner, leaves, create_graph=True)
            leaves = [leaf - 0.05 * g for leaf, g in zip(leaves, gradients, strict=True)]
        losses.append((net(tree.unflatten(spec, leaves), v) - y).square().mean())
    return torch.stack(losses).mean()


def rematerialised(p: Any, b: Any) -> Tensor:
    """torch.utils.checkpoint around layers, under double backward."""
    x = b["x"].detach().requires_grad_()

    def layer(h: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return torch.tanh(h @ w + bias)

    h = x
    for one in p["layers"][:-1]:
        h = checkpoint(layer, h, one["w"], one["b"], use_reentrant=False)
    out = (h @ p["layers"][-1]["w"] + p["layers"][-1]["b"]).squeeze(-1) * p["scale"]
    return (out - b["y"]).square().mean()


def rematerialised_penalty(p: Any, b: Any) -> Tensor:
    """Double backward through a checkpointed function."""
    x = b["x"].detach().requires_grad_()
    out = checkpoint(net, p, x, use_reentrant=False)
    (gradients,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (out - b["y"]).square().mean() + (gradients.norm(dim=1) - 1).square().mean()


def dropped(p: Any, b: Any) -> Tensor:
    """A key for each example: its mask is its own wherever it is computed; and its gradient penalised."""

    def one(q: Any, x: Tensor, key: Tensor) -> Tensor:
        hidden = random.dropout(key, torch.tanh(x @ q["layers"][0]["w"] + q["layers"][0]["b"]), 0.3)
        noise = random.normal(random.fold_in(key, 1), (7,)).to(x.dtype)
        hidden = torch.tanh((hidden + 0.1 * noise) @ q["layers"][1]["w"] + q["layers"][1]["b"])
        return (hidden @ q["layers"][2]["w"] + q["layers"][2]["b"]).squeeze(-1) * q["scale"]

    gradients, out = vmap(grad_and_value(one, argnums=1), in_dims=(None, 0, 0))(p, b["x"], b["key"])
    return (out - b["y"]).square().mean() + gradients.square().mean()


def clip_factors(p: Any, b: Any, norm: float) -> Tensor:
    """min(1, norm / |g|) of every example's gradient, as constants."""
    frozen = tree.map(torch.Tensor.detach, p)
    gradients = vmap(grad(one_loss), in_dims=(None, 0))(frozen, b)
    squares = torch.stack([g.reshape(g.shape[0], -1).square().sum(1) for g in tree.flatten(gradients)[1]])
    return (norm / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0).detach()


def two_pass(p: Any, b: Any) -> Tensor:
    """DP-SGD as one loss: weighing examples by constants clips their gradients."""
    return (clip_factors(p, b, NORM) * vmap(one_loss, in_dims=(None, 0))(p, b)).mean()


class Cube(torch.autograd.Function):
    """x**3 with a derivative of its own, which vmap and a second derivative go through."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def own_derivative(p: Any, b: Any) -> Tensor:
    """An autograd Function under vmap and double backward."""

    def one(x: Tensor) -> Tensor:
        return Cube.apply(net(p, x))

    gradients, out = vmap(grad_and_value(one))(b["x"])
    return (out - b["y"]).square().mean() + gradients.square().mean()


class Module(torch.nn.Module):
    """As `net`, with attention and a norm in it, as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(1, 4)
        self.norm = torch.nn.LayerNorm(4, eps=0.5)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.into(x.unsqueeze(-1)))
        h = h + F.scaled_dot_product_attention(h, h, h)
        return self.out(h).mean((-2, -1))


MODULE = Module().requires_grad_(False)


def of_a_module(p: Any, b: Any) -> Tensor:
    """Per-example gradients of an nn.Module called with parameters, and their penalty."""
    names = [("into", 0), ("out", 2)]
    weights = {f"{name}.bias": p["layers"][i]["b"][: getattr(MODULE, name).bias.numel()] for name, i in names}
    weights["into.weight"], weights["out.weight"] = p["layers"][1]["w"][:4, :1], p["layers"][2]["w"][:4].T
    weights["norm.weight"], weights["norm.bias"] = p["layers"][0]["b"][:4] + p["scale"], p["layers"][0]["w"][0, :4]

    def one(q: Any, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(MODULE, q, (x,)) - y).square()

    gradients, losses = vmap(grad_and_value(one), in_dims=(None, 0, 0))(weights, b["x"], b["y"])
    return losses.mean() + 0.1 * gradients["into.weight"].square().mean()


def dual(p: Any, b: Any) -> Tensor:
    """Forward-mode by hand, with torch.autograd.forward_ad."""
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(net(p, forward_ad.make_dual(b["x"], b["v"])))
    return (out - b["y"]).square().mean() + 0.3 * tangent.square().mean()
