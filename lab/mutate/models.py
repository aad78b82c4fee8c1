"""models: small models of every shape that fzero lowers without a pipeline or `tp`, and optimizers for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero import functional, optim, tree
from fzero.error_feedback import coded_error, coded_mean

ROWS = 6  # of a rank's batch: one, two or three microbatches divide it
Tx = optim.GradientTransformation


@dataclass(frozen=True)
class Model:
    """`params` and `batch` draw theirs from a generator; `step` makes a whole step from an optimizer, `state` its
    state; `part` is a path rule that some of the state's leaves match."""

    params: Callable[[torch.Generator], Any]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Tx], Callable[[Any, Any], Any]] | None = None
    state: Callable[[Any, Tx], Any] | None = None
    part: str = "layers/0/**"


# --- models -----------------------------------------------------------------------------------------------------------


def _normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g) * 0.4


def _layers(g: torch.Generator) -> Any:
    return {"layers": [{"w": _normal(g, 8, 8), "b": _normal(g, 8)} for _ in range(3)]}


def _wide(g: torch.Generator) -> Any:
    return {"layers": [{"w": _normal(g, 8, 256), "b": _normal(g, 256)}, {"w": _normal(g, 256, 8), "b": _normal(g, 8)}]}


def _pairs(g: torch.Generator) -> dict[str, Tensor]:
    return {"x": _normal(g, ROWS, 8), "y": _normal(g, ROWS, 8)}


def _mlp(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x


def _mlp_loss(params: Any, batch: Any) -> Tensor:
    return ((_mlp(params, batch["x"]) - batch["y"]) ** 2).mean()


def _low_loss(params: Any, batch: Any) -> Tensor:
    x = batch["x"].to(torch.bfloat16)
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["w"].to(torch.bfloat16) + layer["b"].to(torch.bfloat16))
    return ((x.float() - batch["y"]) ** 2).mean()


def _gpt_params(g: torch.Generator) -> Any:
    blocks = [
        {"norm": torch.ones(8), "qkv": _normal(g, 8, 24), "out": _normal(g, 8, 8), "up": _normal(g, 8, 16),
         "down": _normal(g, 16, 8)}
        for _ in range(2)
    ]  # fmt: skip
    return {"tokens": _normal(g, 12, 8), "positions": _normal(g, 4, 8), "blocks": blocks}


def _tokens(g: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(12, (ROWS, 4), generator=g) for name in ("inputs", "targets")}


def _gpt_loss(params: Any, batch: Any) -> Tensor:
    x = params["tokens"][batch["inputs"]] + params["positions"]
    for block in params["blocks"]:
        q, k, v = (F.layer_norm(x, (8,), block["norm"]) @ block["qkv"]).chunk(3, -1)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + weights @ v @ block["out"]
        x = x + F.gelu(x @ block["up"]) @ block["down"]
    logits = x @ params["tokens"].t()
    return F.cross_entropy(logits.view(-1, 12), batch["targets"].view(-1))


def _conv_params(g: torch.Generator) -> Any:
    convs = [{"kernel": _normal(g, 4, c, 3, 3), "bias": _normal(g, 4)} for c in (1, 4)]
    return {"convs": convs, "head": {"w": _normal(g, 4, 5), "b": _normal(g, 5)}}


def _images(g: torch.Generator) -> dict[str, Tensor]:
    return {"image": _normal(g, ROWS, 1, 5, 5), "label": torch.randint(5, (ROWS,), generator=g)}


def _conv_loss(params: Any, batch: Any) -> Tensor:
    x = batch["image"]
    for conv in params["convs"]:
        x = torch.relu(F.conv2d(x, conv["kernel"], conv["bias"], padding=1))
    return F.cross_entropy(x.mean((2, 3)) @ params["head"]["w"] + params["head"]["b"], batch["label"])


def _bag_params(g: torch.Generator) -> Any:
    return {"table": _normal(g, 20, 8), "hidden": _normal(g, 8, 8), "output": _normal(g, 20, 8)}


def _bags(g: torch.Generator) -> dict[str, Tensor]:
    return {"words": torch.randint(20, (ROWS, 3), generator=g), "next": torch.randint(20, (ROWS,), generator=g)}


def _bag_loss(params: Any, batch: Any) -> Tensor:
    x = torch.tanh(params["table"][batch["words"]].mean(1) @ params["hidden"])
    return F.cross_entropy(x @ params["output"].t(), batch["next"])


# --- steps of one's own -----------------------------------------------------------------------------------------------


def _averaged(tx: Tx) -> Callable[[Any, Any], Any]:
    """An EMA copy of the weights, a frozen subtree, and a drift that every rank keeps for itself."""

    def loss(params: Any, frozen: Any, batch: Any) -> Tensor:
        return ((_mlp(params, batch["x"]) @ frozen["w"] - batch["y"]) ** 2).mean()

    def step(state: Any, batch: Any) -> Any:
        value, grads = functional.value_and_grad(loss, batch_argnum=2)(state["params"], state["frozen"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optim.apply_updates(state["params"], updates)
        ema = tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["ema"], params)
        drift = state["drift"] + batch["x"].mean(0)
        new = {"params": params, "opt_state": opt_state, "ema": ema, "frozen": state["frozen"], "drift": drift}
        return new, {"loss": value, "drift": functional.pmax(drift.abs().max())}

    return step


def _averaged_state(params: Any, tx: Tx) -> Any:
    return {
        "params": params,
        "opt_state": tx.init(params),
        "ema": params,
        "frozen": {"w": torch.eye(8)},
        "drift": functional.per_rank(torch.zeros(8)),
    }


def _with_aux(tx: Tx) -> Callable[[Any, Any], Any]:
    """A loss with aux, whose mean over the ranks is kept as a running statistic."""

    def loss(params: Any, batch: Any) -> Any:
        x = _mlp(params, batch["x"])
        return ((x - batch["y"]) ** 2).mean(), {"mean": x.mean(0), "top": x.abs().amax()}

    def step(state: Any, batch: Any) -> Any:
        (value, aux), grads = functional.value_and_grad(loss, has_aux=True)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        mean = 0.5 * state["mean"] + 0.5 * functional.pmean(aux["mean"])
        new = {"params": optim.apply_updates(state["params"], updates), "opt_state": opt_state, "mean": mean}
        return new, {"loss": value, "top": functional.psum(aux["top"])}

    return step


def _partial(tx: Tx) -> Callable[[Any, Any], Any]:
    """Only the last layer is trained, so that most gradients go unread; the others change places every step."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = functional.value_and_grad(_mlp_loss)(state["params"], batch)
        first, second, last = state["params"]["layers"]
        updates, opt_state = tx.update(grads["layers"][2:], state["opt_state"], [last])
        (new,) = optim.apply_updates([last], updates)
        slow = tree.map(lambda s, p: torch.where(state["turn"] % 2 == 1, p, s), state["slow"], last)
        turn = state["turn"] + 1
        params = {"layers": [second, first, new]}
        return {"params": params, "opt_state": opt_state, "slow": slow, "turn": turn}, {"loss": value, "turn": turn}

    return step


def _partial_state(params: Any, tx: Tx) -> Any:
    last = params["layers"][2]
    return {"params": params, "opt_state": tx.init([last]), "slow": last, "turn": torch.zeros((), dtype=torch.int64)}


def _coded(tx: Tx) -> Callable[[Any, Any], Any]:
    """Local gradients, whose mean travels in signs both ways, with what the codes lost kept for the next step."""

    def step(state: Any, batch: Any) -> Any:
        value, grads = functional.value_and_grad(_mlp_loss, reduce=False)(state["params"], batch)
        mean, owed = coded_mean(grads, state["owed"], "sign", both_ways=True)
        updates, opt_state = tx.update(mean, state["opt_state"], state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "opt_state": opt_state, "owed": owed}, {
            "loss": value
        }

    return step


def _coded_state(params: Any, tx: Tx) -> Any:
    return {"params": params, "opt_state": tx.init(params), "owed": coded_error(params, both_ways=True)}


MODELS: dict[str, Model] = {
    "mlp": Model(_layers, _pairs, _mlp_loss),
    "gpt": Model(_gpt_params, _tokens, _gpt_loss, part="blocks/**"),
    "conv": Model(_conv_params, _images, _conv_loss, part="convs/**"),
    "bag": Model(_bag_params, _bags, _bag_loss, part="output"),
    "wide": Model(_wide, _pairs, _mlp_loss),
    "bf16": Model(_layers, _pairs, _low_loss),
    "averaged": Model(_layers, _pairs, step=_averaged, state=_averaged_state, part="ema/**"),
    "aux": Model(_layers, _pairs, step=_with_aux, part="**/w",
                 state=lambda p, tx: {"params": p, "opt_state": tx.init(p), "mean": torch.zeros(8)}),
    "coded": Model(_layers, _pairs, step=_coded, state=_coded_state, part="**/w"),
    "partial": Model(_layers, _pairs, step=_partial, state=_partial_state, part="**/b"),
}  # fmt: skip

OPTIMIZERS: dict[str, Callable[[], Tx]] = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optim.adam(optim.warmup_cosine(0.01, 4, 40)),
    "adamw": lambda: optim.adamw(0.01, mask=lambda path, leaf: leaf.ndim > 1),
    "adamw8bit": lambda: optim.adamw8bit(0.01, mask=lambda path, leaf: leaf.ndim > 1),
    "muon": lambda: optim.muon(0.02, others=optim.adamw(0.01)),
}
