"""Kernels against their byte floor: bytes that must move / time, beside the bandwidth of a copy in the same run.

    python benchmarks/kernels.py [--size 134217728] [--rounds 15] [--out FILE]

Each round times a copy, then every kernel and what PyTorch has for the same work, with CUDA events around `REPEATS`
calls; medians over rounds. The floor of a case is what it reads plus what it writes, each byte once; the buffers are
much larger than any cache. `of copy` is the share of the copy's bandwidth, 1 at best. Launches of several kernels and
the scalars of a step are inside the time. Prints a table and one JSON document with the device described.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero import optim
from fzero.kernels import adam8_kernel, adamw, cast, codec_kernels, codecs, flat_norms
from fzero.kernels import round as rounding
from fzero.kernels.codecs import BLOCK, CODECS, BlockCodec, message_bytes

REPEATS = 5
RANKS = 4  # whose messages are added
BF16 = torch.bfloat16
STEP: tuple[Any, ...] = (0.9, 0.999, 1e-8, 0.1)  # betas, eps, weight decay


@dataclass(frozen=True)
class Case:
    """A kernel to time: `run` reads and writes the tensors named; `other` is the same work in PyTorch, if it has it."""

    name: str
    run: Callable[[], Any]
    reads: list[Tensor]
    writes: list[Tensor]
    other: Callable[[], Any] | None = None

    @property
    def floor_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self.reads, *self.writes])


def cases(size: int, device: str) -> Iterator[Case]:
    """One after the other, so that few buffers live at a time: run each before you ask for the next."""
    yield from updates(size, device)
    yield from eighth(size, device)
    yield from buffers(size, device)
    yield from messages(size, device)


def updates(size: int, device: str) -> Iterator[Case]:
    count = torch.tensor(10, device=device)
    lr = torch.tensor(1e-4, dtype=torch.float64, device=device)
    p, g, m = (torch.randn(size, device=device) for _ in range(3))
    v = torch.rand(size, device=device)
    copy = torch.empty(size, dtype=BF16, device=device)
    one = torch.tensor(1.0, device=device)

    def fused(*tensors: Tensor) -> None:
        beta1, beta2, eps, decay = STEP
        options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay, "lr": lr.float()}
        steps = [count.float()]
        torch._fused_adamw_(*([t] for t in tensors), [], steps, **options, amsgrad=False, maximize=False)  # type: ignore[call-overload]

    yield Case(
        "adamw fp32", lambda: adamw.adamw_(p, g, m, v, count, lr, *STEP), [p, g, m, v], [p, m, v],
        lambda: fused(p, g, m, v),
    )  # fmt: skip
    everything: dict[str, Any] = {"scale": one, "clip": one, "skip": one.bool() & False, "copy": copy}

    def separately() -> None:
        g.div_(one).mul_(one)
        fused(p, g, m, v)
        copy.copy_(p)

    yield Case(
        "adamw fp32, unscale, clip, skip, copy", lambda: adamw.adamw_(p, g, m, v, count, lr, *STEP, **everything),
        [p, g, m, v], [p, m, v, copy], separately,
    )  # fmt: skip
    m, v = m.to(BF16), v.to(BF16)
    seeds = adamw.Seeds(None, count + 1, count + 2)
    yield Case(
        "adamw fp32, bf16 moments at random", lambda: adamw.adamw_(p, g, m, v, count, lr, *STEP, seeds=seeds),
        [p, g, m, v], [p, m, v],
    )  # fmt: skip
    p, g = p.to(BF16), g.to(BF16)
    seeds = adamw.Seeds(count, count + 1, count + 2)
    yield Case(
        "adamw bf16 at random", lambda: adamw.adamw_(p, g, m, v, count, lr, *STEP, seeds=seeds),
        [p, g, m, v], [p, m, v],
    )  # fmt: skip


def eighth(size: int, device: str) -> Iterator[Case]:
    count = torch.tensor(10, device=device)
    lr = torch.tensor(1e-4, dtype=torch.float64, device=device)
    p, g = (torch.randn(size, device=device) for _ in range(2))
    m = torch.randint(-127, 128, (size,), dtype=torch.int8, device=device)
    v = torch.randint(1, 256, (size,), dtype=torch.uint8, device=device)
    ms, vs = (torch.rand(-(-size // 64), device=device) for _ in range(2))
    state = [p, m, ms, v, vs]
    yield Case(
        "adamw 8-bit", lambda: adam8_kernel.adamw8_(p, g, m, ms, v, vs, count, lr, *STEP), [*state, g], state,
        lambda: torch.ops.fzero.adamw8_(p, g, m, ms, v, vs, count, lr, *STEP),
    )  # fmt: skip


def buffers(size: int, device: str) -> Iterator[Case]:
    x = torch.randn(size, device=device)
    low = x.to(BF16)
    scale, seed = torch.tensor(0.5, device=device), torch.tensor(7, device=device)
    bad = torch.empty((), dtype=torch.bool, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    for name, each in (("fp32", x), ("bf16", low)):
        yield Case(
            f"norm and finite check {name}",
            lambda each=each: flat_norms.sum_squares(each, nonfinite=bad, out=total),  # type: ignore[misc]
            [each], [],
            lambda each=each: (torch.linalg.vector_norm(each, dtype=torch.float32), each.isfinite().all()),  # type: ignore[misc]
        )  # fmt: skip
    yield Case(
        "cast and scale fp32 to bf16", lambda: cast.cast(low, x, scale), [x], [low], lambda: low.copy_(x * scale)
    )
    yield Case("cast and scale bf16 to fp32", lambda: cast.cast(x, low, scale), [low], [x], lambda: low.float() * scale)
    yield Case(
        "stochastic rounding", lambda: rounding.stochastic_round(x, seed, out=low), [x], [low],
        lambda: optim.stochastic_round(x, seed),
    )  # fmt: skip


def messages(size: int, device: str) -> Iterator[Case]:
    x = torch.randn(size, device=device)
    blocks = torch.empty(-(-size // BLOCK) * BLOCK, device=device)
    for codec in CODECS.values():
        room = torch.empty(RANKS, message_bytes(size, codec), dtype=torch.uint8, device=device)
        for row in room:
            codec_kernels.encode(codec, x, out=row)
        yield from coded(codec, x, blocks, room)


def coded(codec: BlockCodec, x: Tensor, blocks: Tensor, room: Tensor) -> Iterator[Case]:
    """room: the messages of RANKS ranks, in rows."""
    message, low = room[0], x.to(BF16)
    for name, source in (("fp32", x), ("bf16", low)):
        yield Case(
            f"encode {codec.name} of {name}", lambda source=source: codec_kernels.encode(codec, source, out=message),  # type: ignore[misc]
            [source], [message], lambda source=source: codecs.encode(source, codec, out=message),  # type: ignore[misc]
        )  # fmt: skip
    yield Case(
        f"decode {codec.name}", lambda: codec_kernels.decode(codec, message, out=blocks),
        [message], [blocks], lambda: codecs.decode_blocks(message, codec, blocks),
    )  # fmt: skip
    yield Case(
        f"decode and add {RANKS} of {codec.name}", lambda: codec_kernels.decode_sum(codec, room, RANKS, out=blocks),
        [room], [blocks], lambda: codecs.decode_sum(room, RANKS, codec, blocks),
    )  # fmt: skip


# ---- timing ----------------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], Any]) -> float:
    """Of one call, on the device."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / REPEATS


def measured(case: Case, copy: Case, rounds: int) -> dict[str, Any]:
    """Medians over rounds of the copy, the kernel and the other, one after the other in each round."""
    runs = {"copy": copy.run, "kernel": case.run} | ({"torch": case.other} if case.other else {})
    for run in runs.values():
        run()  # compiles
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
    median = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = {"copy": copy.floor_bytes / median["copy"] / 1e6, "kernel": case.floor_bytes / median["kernel"] / 1e6}
    return {
        "case": case.name,
        "floor_bytes": case.floor_bytes,
        "kernel_ms": median["kernel"],
        "spread_ms": [min(times["kernel"]), max(times["kernel"])],
        "torch_ms": median.get("torch"),
        "kernel_gb_s": bandwidth["kernel"],
        "copy_gb_s": bandwidth["copy"],
        "of_copy": bandwidth["kernel"] / bandwidth["copy"],
    }


def machine() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time fzero's Triton kernels against their byte floor.")
    parser.add_argument("--size", type=int, default=1 << 27, help="elements of a buffer (default 2**27)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py: no CUDA device here")
    source, target = torch.randn(args.size, device="cuda"), torch.empty(args.size, device="cuda")
    copy = Case("copy", lambda: target.copy_(source), [source], [target])
    rows = []
    print(f"{'case':40} {'ms':>8} {'GB/s':>7} {'of copy':>8} {'torch ms':>9}")
    for case in cases(args.size, "cuda"):
        row = measured(case, copy, args.rounds)
        rows.append(row)
        other = f"{row['torch_ms']:9.3f}" if row["torch_ms"] is not None else f"{'-':>9}"
        print(f"{case.name:40} {row['kernel_ms']:8.3f} {row['kernel_gb_s']:7.0f} {row['of_copy']:8.2f} {other}")
    document = json.dumps({"machine": machine(), "size": args.size, "rounds": args.rounds, "rows": rows}, indent=1)
    print(document)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(document + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
