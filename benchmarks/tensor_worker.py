"""One rank of `benchmarks.tensor`: contenders in rounds, the memory of one, or its first steps; a JSON record."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.contenders import adamw
from benchmarks.model import SEED, WEIGHT_DECAY, Batch, Size, batches
from benchmarks.pipelining_worker import Running, in_memory, in_rounds

MESH = {"dp": 2, "tp": 2}
SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, vocabulary=256, sequence=32, batch=2, inner=128),  # for the tests
    "llama": Size(layers=10, width=768, heads=12, vocabulary=16384, sequence=128, batch=2, inner=2048),  # 90M: 1.1 GB
    "tokens": Size(layers=10, width=768, heads=12, vocabulary=16384, sequence=256, batch=4, inner=2048),
}
CLIP = 1.0

Sent = dict[str, int]  # bytes by axis


@dataclass(frozen=True)
class Made:
    """`step` is one optimizer step and its loss. `sent` is another, and the bytes that this rank sends in it."""

    step: Callable[[Batch], float]
    sent: Callable[[Batch], Sent]


@dataclass(frozen=True)
class Contender:
    """`imports` are loaded before the memory that counts as the import's is read."""

    title: str
    make: Callable[[Size], Made]
    imports: tuple[str, ...]


def llama(size: Size, device: str = "cpu") -> Any:
    """The model as transformers has it, with the same parameters in every process. Two heads share a key."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def num_parameters(size: Size) -> int:
    return sum(parameter.numel() for parameter in llama(size, "meta").parameters())


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


# --- torch: DTensor and FSDP2, as torchtitan uses them ----------------------------------------------------------------


def torch_plan(sequence: bool) -> dict[str, Any]:
    """torchtitan's plan of its Llama, with the names of transformers' modules.

    Without `sequence`, what it lays in parts along the tokens is whole on every rank.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    norm = SequenceParallel() if sequence else whole()
    layer = {
        "input_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **{f"model.layers.*.{name}": style for name, style in layer.items()},
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }


def whole() -> Any:
    """torchtitan's `NoParallel`: the weights are DTensors like all others, and every rank has all of them."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel import ParallelStyle

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def taken(_: nn.Module, inputs: Any, mesh: Any) -> Any:
                return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False), *inputs[1:])

            def given(_: nn.Module, output: Any, mesh: Any) -> Any:
                return output.to_local()

            return distribute_module(module, device_mesh, None, taken, given)

    return Whole()


def by_torch(size: Size, sequence: bool) -> Made:
    """`parallelize_module` over tp, then `fully_shard` over dp, in torchtitan's order and groups of modules.

    Positions are given: under sequence parallelism the model would count the tokens of its own part.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    model = llama(size)
    parallelize_module(model, mesh["tp"], torch_plan(sequence))
    fully_shard(model.model.embed_tokens, mesh=mesh["dp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard([model.model.norm, model.lm_head], mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    optimizer = adamw(size, parameters)
    positions = torch.arange(size.sequence)[None]

    def step(batch: Batch) -> float:
        with loss_parallel():
            loss: Any = cross_entropy(model(input_ids=batch["x"], position_ids=positions).logits, batch["y"])
            loss.backward()
        norm: Any = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        nn.utils.clip_grads_with_norm_(parameters, CLIP, norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach().full_tensor())

    def sent(batch: Batch) -> Sent:
        names = {str(mesh[axis].get_group().group_name): axis for axis in MESH}
        with Counted(names) as counted:
            step(batch)
        return counted.sent

    return Made(step, sent)


class Counted(TorchDispatchMode):
    """Counts what a rank sends in collectives, by axis, with the bytes of a ring: (n - 1) / n of a gather's result.

    names: the axis of each process group. `sent` is what was counted so far; only `__torch_dispatch__` writes it.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self.names = names
        self.sent: Sent = dict.fromkeys(MESH, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # then its collectives come here one by one
        found = func(*args, **kwargs or {})
        space, _, name = str(func).partition(".")
        name = name.replace("_", "")
        if space in ("c10d", "_c10d_functional") and name.startswith(("allreduce", "allgather", "reducescatter")):
            largest = max(x.nbytes for x in _tensors([args, found]))
            axis = self.names[self._group(args)]
            n = MESH[axis]
            self.sent[axis] += largest * (2 if name.startswith("allreduce") else 1) * (n - 1) // n
        return found

    def _group(self, args: Any) -> str:
        for one in args:
            if isinstance(one, str) and one in self.names:
                return one
            if isinstance(one, torch.ScriptObject):
                return dist.ProcessGroup.unbox(one).group_name
        raise ValueError(f"a collective over a group of no axis: {[x for x in args if not isinstance(x, Tensor)]}")


def _tensors(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    return [x for one in args for x in _tensors(one)] if isinstance(args, list | tuple) else []


# --- fzero ------------------------------------------------------------------------------------------------------------


def by_fzero(size: Size, transfers: str, sequence: bool) -> Made:
    import fzero
    from fzero import optim
    from fzero.interop import from_module, tp_plan

    model = llama(size)
    params, buffers, apply = from_module(model)
    spec = fzero.Spec(
        loss=lambda p, batch: cross_entropy(apply(p, buffers, input_ids=batch["x"]).logits, batch["y"]),
        optimizer=optim.adamw(size.rate, weight_decay=WEIGHT_DECAY),
        mesh=MESH,
        shard=tp_plan(model),
        sequence="tp" if sequence else None,
        zero=3,
        clip_norm=CLIP,
        transfers=transfers,
    )
    state = fzero.init(params, spec)
    del params, model

    def step(batch: Batch) -> float:
        nonlocal state
        state = fzero.step(state, batch)
        return float(state.metrics["loss"])

    def sent(batch: Batch) -> Sent:
        before = dict(state.sent_bytes)
        step(batch)
        return {axis: nbytes - before[axis] for axis, nbytes in state.sent_bytes.items()}

    return Made(step, sent)


_TORCH = ("transformers.models.llama.modeling_llama", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
          "torch.optim", "torch._dynamo")  # fmt: skip
_FZERO = ("transformers.models.llama.modeling_llama", "fzero.interop", "torch._dynamo")
CONTENDERS = {
    "torch": Contender("torch: DTensor, FSDP2", lambda size: by_torch(size, False), _TORCH),
    "fzero_p2p": Contender("fzero, over gloo", lambda size: by_fzero(size, "p2p", False), _FZERO),
    "fzero_auto": Contender("fzero, shared memory", lambda size: by_fzero(size, "auto", False), _FZERO),
    "torch_sp": Contender("torch: DTensor, FSDP2; sequence", lambda size: by_torch(size, True), _TORCH),
    "fzero_sp_p2p": Contender("fzero, over gloo; sequence", lambda size: by_fzero(size, "p2p", True), _FZERO),
    "fzero_sp_auto": Contender("fzero, shared memory; sequence", lambda size: by_fzero(size, "auto", True), _FZERO),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def data(size: Size) -> Iterator[Batch]:
    """The batches of this rank: those that differ in tp alone have the same."""
    return batches(size, dist.get_rank() // MESH["tp"])


def running(name: str, size: Size) -> Running:
    return Running(CONTENDERS[name].make(size).step, data(size))


def from_start(name: str, size: Size, steps: int) -> dict[str, Any]:
    """The record of one contender from its beginning: seconds of a first step and `steps` more, and bytes sent."""
    for module in CONTENDERS[name].imports:
        importlib.import_module(module)
    dist.barrier()
    began = time.perf_counter()
    made = CONTENDERS[name].make(size)
    one = Running(made.step, data(size))
    made_s = time.perf_counter() - began
    one.run(1)
    before = wire_bytes()
    one.run(steps)
    dist.barrier()
    wire = (wire_bytes() - before) / steps
    (first,), seconds = one.seconds
    return {
        "made_s": made_s,
        "first_step_s": first,
        "step_s": seconds,
        "losses": one.losses,
        "sent_bytes": made.sent(next(one.data)),
        "wire_bytes": wire,
    }


def wire_bytes() -> int:
    """Bytes that this machine has sent to itself so far, all processes together."""
    found = re.search(r"^\s*lo:(.*)$", Path("/proc/net/dev").read_text(), re.MULTILINE)
    return int(found.group(1).split()[8]) if found else 0


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", required=True, type=lambda text: text.split(","), help="commas between")
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--what", required=True, choices=("rounds", "memory", "start"))
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a folder: the record is rankN.json in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size, name = SIZES[args.size], args.contenders[0]
    with process_group():
        if args.what == "rounds":
            made = {one: running(one, size) for one in args.contenders}
            record = in_rounds(made, args.warmup, args.steps, args.rounds)
        elif args.what == "memory":
            imports = CONTENDERS[name].imports
            record = {name: in_memory(imports, lambda: running(name, size), args.warmup, args.steps)}
        else:
            record = {name: from_start(name, size, args.steps)}
        (args.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
