"""The ops of small losses on CUDA, and the programs of small models, by name, as one line of JSON: run by
test_fake_cuda_command.py in the process of `fzero fake-cuda`, and read by test_elsewhere.py in one without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fzero
from benchmarks.model import Size, empty_model
from fzero.interop import from_module
from fzero.ir import fx_nodes

ROWS, WIDTH = 4, 16
CLOSED_OVER = torch.ones(WIDTH)


def heads(x: Tensor, count: int = 2, width: int = 8) -> Tensor:
    """x (ROWS, WIDTH) as heads: (1, count, ROWS, width)."""
    return x.repeat(1, count * width // WIDTH + 1)[:, : count * width].view(1, ROWS, count, width).transpose(1, 2)


def gru_cell(x: Tensor) -> Tensor:
    weights = x.new_ones(3 * WIDTH, WIDTH), x.new_ones(3 * WIDTH, WIDTH), x.new_ones(3 * WIDTH), x.new_ones(3 * WIDTH)
    return torch.gru_cell(x, x.tanh(), *weights)


def lstm_cell(x: Tensor) -> Tensor:
    return torch.lstm_cell(x, [x.tanh(), x.cos()], x.new_ones(4 * WIDTH, WIDTH), x.new_ones(4 * WIDTH, WIDTH))[1]


def ctc_loss(x: Tensor) -> Tensor:
    scores = x[None].expand(6, -1, -1).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(ROWS, 3, dtype=torch.int64, device=x.device), [6] * ROWS, [3] * ROWS)


def margin_loss(x: Tensor) -> Tensor:
    return F.multi_margin_loss(x, torch.zeros(ROWS, dtype=torch.int64, device=x.device))


def by_products(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.5)


def dropped(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), dropout_p=0.5)


def dropped_in_a_layer(x: Tensor) -> Tensor:
    weights, bias = x.new_ones(3 * WIDTH, WIDTH), x.new_zeros(3 * WIDTH)
    out = x.new_ones(WIDTH, WIDTH), x.new_zeros(WIDTH)
    own = F.multi_head_attention_forward(
        x, x, x, WIDTH, 2, weights, bias, None, None, False, 0.5, *out, need_weights=False
    )
    return own[0]


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x))


def attended_by_rows(x: Tensor) -> Tensor:
    return vmap(lambda q: F.scaled_dot_product_attention(q[None], q[None], q[None])[0])(heads(x).repeat(2, 1, 1, 1))


def recomputed(x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return checkpoint(lambda y: F.rms_norm(y @ y.new_ones(WIDTH, WIDTH), (WIDTH,)).tanh(), x, use_reentrant=False)


def autocast_by_device(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = x @ x.new_ones(WIDTH, WIDTH)
        with torch.autocast(x.device.type, enabled=False):
            return y.float() @ x.new_ones(WIDTH, WIDTH)


def autocast_asked(x: Tensor) -> Tensor:
    with torch.autocast("cuda"):
        y = x.to(torch.get_autocast_dtype("cuda"))
        return y.tanh() if torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda") else x.exp()


class OfDtypes(torch.autograd.Function):
    """A function that says how autocast casts it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient @ gradient.new_ones(WIDTH, WIDTH)


def narrow(fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """A function of a product, under autocast."""

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            return fn(x @ x.new_ones(WIDTH, WIDTH)).float()

    return call


def attended(count: int = 2, width: int = 8, **options: Any) -> Callable[[Tensor], Tensor]:
    """Attention of 2 heads in k and v, in bf16."""

    def call(x: Tensor) -> Tensor:
        x = x.bfloat16()
        given = {name: value(x) if callable(value) else value for name, value in options.items()}
        return F.scaled_dot_product_attention(heads(x, count, width), heads(x, 2, width), heads(x, 2, width), **given)

    return call


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "the device by name": lambda x: x.to("cuda").tanh(),
    "gru cell": gru_cell,
    "ctc": ctc_loss,
    "margin": margin_loss,
    "attention": attended(),
    "shared heads": attended(4, enable_gqa=True),
    "mask": attended(attn_mask=lambda x: torch.ones(ROWS, ROWS, dtype=torch.bool, device=x.device).tril()),
    "mask with a gradient": attended(attn_mask=lambda x: x[:, :ROWS]),
    "wide": attended(width=256),
    "dropout by products": by_products,
    "dropout": dropped,
    "dropout in a layer": dropped_in_a_layer,
    "dropout of values": lambda x: F.dropout(x, 0.1),
    "no dropout": lambda x: F.dropout(x.tanh(), 0.1, False),
    "dropout, grad": lambda x: grad(lambda y: F.dropout(y, 0.1).square().sum())(x),
    "dropout, vmap": lambda x: vmap(lambda y: F.dropout(y, 0.1), randomness="different")(x),
    "attention, vmap": attended_by_rows,
    "softmax of fp16 to fp32, vmap": lambda x: vmap(lambda y: F.softmax(y.half(), -1, dtype=torch.float32))(x),
    "lstm cell": lstm_cell,
    "recomputed in autocast": recomputed,
    "autocast by the device of a tensor": autocast_by_device,
    "autocast, asked for": autocast_asked,
    "autocast, a function of dtypes": narrow(OfDtypes.apply, torch.bfloat16),
    "autocast": autocast,
    "autocast, norms": narrow(lambda y: F.layer_norm(F.rms_norm(y, (WIDTH,)), (WIDTH,)), torch.bfloat16),
    "autocast, softmax": narrow(lambda y: y.softmax(-1) @ y.cumsum(-1).t(), torch.bfloat16),
    "autocast, cross entropy": narrow(
        lambda y: F.cross_entropy(y, torch.zeros(ROWS, dtype=torch.int64, device=y.device)), torch.bfloat16
    ),
    "autocast in its dtype": narrow(lambda y: torch.einsum("ij,kj->ik", y, y.exp()).sum(-1) + F.gelu(y).norm()),
    "autocast, losses": narrow(
        lambda y: F.mse_loss(y, y.square()) + F.binary_cross_entropy_with_logits(y, y.sigmoid())
    ),
    "softmax of fp16 to fp32": lambda x: (
        F.softmax(x.half(), -1, dtype=torch.float32) + F.log_softmax(x.half(), 0, dtype=torch.float32)
    ),
    "capability": lambda x: x.tanh() if torch.cuda.get_device_capability(x.device)[0] == 9 else x.exp(),
    "settings": lambda x: x.tanh() if "PyTorch" in torch.__config__.show() else x.exp(),
    "closed over": lambda x: x + CLOSED_OVER,
}


def ops(fn: Callable[[Tensor], Tensor]) -> list[str]:
    """The names of the ops of a step with a loss, or its error."""
    spec = fzero.Spec(loss=lambda p, x: fn(p * x).float().sum(), optimizer=fzero.optim.sgd(0.1), device="cuda")
    state = torch.empty(ROWS, WIDTH)
    try:
        low = fzero.lower(spec, state, torch.empty(ROWS, WIDTH), world_size=1, key=fzero.random.key(0))
    except fzero.FzeroError as error:
        return [str(error)]
    nodes = [n for gm in low.program.segments.values() for n in gm.graph.nodes if fx_nodes.is_compute(n)]
    return sorted({str(n.target) for n in nodes})


def model(family: str) -> tuple[Any, Callable[[Any, Any], Tensor], Any]:
    """(the shapes of the parameters, the loss, the batch) of a language model."""
    size = Size(2, width=32, heads=4, vocabulary=64, sequence=16, batch=2, inner=64, family=family)
    with torch.device("meta"):
        params, buffers, apply = from_module(empty_model(size))
    tokens = torch.empty(2, 16, dtype=torch.int64, device="meta")
    return params, lambda p, b: apply(p, buffers, b["x"], b["y"]), {"x": tokens, "y": tokens}


def layers(*of: nn.Module, shape: tuple[int, ...]) -> Callable[[], tuple[Any, Callable[[Any, Any], Tensor], Any]]:
    """The same of layers, one after the other, on a batch of this shape."""

    def made() -> tuple[Any, Callable[[Any, Any], Tensor], Any]:
        params, buffers, apply = from_module(nn.Sequential(*of))

        def loss(p: Any, x: Tensor) -> Tensor:
            y = apply(p, buffers, x)
            return (y[0] if isinstance(y, tuple) else y).float().square().mean()

        return params, loss, torch.empty(shape)

    return made


def scanned(p: Any, x: Tensor) -> Tensor:
    last, each = fzero.scan(lambda carry, row: (carry * p["w"] + row, carry.tanh()), x[:, 0], x.transpose(0, 1))
    return (last.sum() + each.sum()).float()


def spectrum(p: Any, x: Tensor) -> Tensor:
    return torch.fft.rfftn((x * p["w"]).float(), dim=(0, 1)).abs().sum()


def channels_last(p: Any, x: Tensor) -> Tensor:
    x = (x * p["w"][:, None, None]).contiguous(memory_format=torch.channels_last)
    return F.group_norm(x, 2, p["w"]).tanh().float().sum()


def mixed(p: Any, x: Tensor) -> Tensor:
    """What the lists of autocast say of the processor and of a device otherwise."""
    y = x @ p["w"]
    found = [y.softmax(-1), y.log_softmax(-1), y.cumsum(-1), y.exp(), y.rsqrt(), F.softplus(y), F.rms_norm(y, (16,))]
    sums = [y.sum(-1), y.norm(dim=-1), y.logsumexp(-1), torch.cat([y, x]).sum(-1)[:2], torch.addcmul(x, y, y).sum(-1)]
    products = [F.mse_loss(y, x), torch.einsum("bsw,btw->bst", y, x).mean(), F.cross_entropy(y, y.detach().argmax(1))]
    return sum(z.float().mean() for z in (*found, *sums, *products))  # type: ignore[return-value]


MODELS: dict[str, Callable[[], tuple[Any, Callable[[Any, Any], Tensor], Any]]] = {
    "gpt": lambda: model("gpt"),
    "llama": lambda: model("llama"),
    "convolutions": layers(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2, bias=False),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(2),
        shape=(2, 3, 16, 16),
    ),
    "one dim": layers(nn.Conv1d(4, 8, 3, padding=1), nn.Mish(), nn.Conv1d(8, 8, 4, groups=8), shape=(2, 4, 12)),
    "norms": layers(nn.LayerNorm(16), nn.RMSNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Softmax(-1), shape=(2, 8, 16)),
    "recurrent": layers(nn.LSTM(16, 8, 2, batch_first=True), shape=(2, 6, 16)),
    "scan": lambda: ({"w": torch.empty(16)}, scanned, torch.empty(2, 8, 16)),
    "spectrum": lambda: ({"w": torch.empty(16)}, spectrum, torch.empty(2, 8, 16)),
    "channels last": lambda: ({"w": torch.empty(4)}, channels_last, torch.empty(2, 4, 8, 8)),
    "losses": lambda: ({"w": torch.empty(16, 16)}, mixed, torch.empty(2, 8, 16)),
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "zero 3": {"mesh": {"dp": 2}, "zero": 3},
    "autocast": {"mesh": {"dp": 2}, "precision": "autocast"},
    "autocast of fp16": {"mesh": {"dp": 2}, "zero": 2, "precision": "autocast_fp16"},
    "bf16": {"mesh": {"dp": 2}, "zero": 1, "precision": "bf16", "microbatches": 2, "remat": "full"},
}


def program(name: str, fields: Mapping[str, Any]) -> list[Any]:
    """What a program of a model says: its ops and peak, and those of its segments."""
    params, loss, batch = MODELS[name]()
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-3), device="cuda", **fields)
    lowered = fzero.lower(spec, params, batch, world_size=2)
    graphs = [str(gm.graph) for gm in lowered.program.segments.values()]
    return [lowered.memory.peak, str(lowered.program), graphs]


if __name__ == "__main__":
    programs = {f"{name}, {how}": program(name, fields) for name in MODELS for how, fields in SPECS.items()}
    print(json.dumps({"ops": {name: ops(fn) for name, fn in LOSSES.items()}, "programs": programs}))
