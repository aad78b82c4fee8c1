"""The Triton kernels without a GPU: numbers in Triton's interpreter, and cubins that keep everything in registers.

What is compiled is what the launchers launch: they run here with a recorder in place of the launch. Whether registers
are spilled, Triton's own run of ptxas says.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero.kernels
from fzero.ir.code_ops import OPS
from fzero.ir.op_info import kernel_for
from fzero.kernels import (
    WIDEST,
    _triton,
    adam8_kernel,
    adamw,
    block_sparse,
    cast,
    codec_kernels,
    flat_norms,
    philox,
    row_sums,
    softmax_loss,
)
from fzero.kernels import round as rounding
from fzero.kernels.codecs import CODECS, BlockCodec, message_bytes

WORKERS = Path(__file__).parents[1] / "support" / "workers"
ROOT = Path(__file__).parents[2]
BF16, F16, F32, F64, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
STEP: Any = (0.9, 0.999, 1e-8, 0.1)
TYPES = {
    F32: "fp32", BF16: "bf16", F16: "fp16", F64: "fp64", torch.bool: "i1",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", INT64: "i64",
}  # fmt: skip
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (pip install triton)")
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 compiles nothing")


# ---- numbers ---------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(
    "file",
    [
        "interpreted_kernels.py",
        "interpreted_adam8.py",
        "interpreted_sparse.py",
        "interpreted_row_sums.py",
        "interpreted_softmax_loss.py",
    ],
)
@pytest.mark.acceptance
def test_numbers_in_the_interpreter(file: str) -> None:
    """In a process of its own, for Triton reads TRITON_INTERPRET when it is imported. `make test` has the numbers of
    on_standin.py."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore::RuntimeWarning",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    done = subprocess.run([*command, str(WORKERS / file)], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.acceptance
def test_the_cases_of_the_benchmark_run() -> None:
    """The kernel and its counterpart in PyTorch, small and in the interpreter: what is timed on a GPU is no typing
    error."""
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import kernels\n"
        "for case in kernels.cases(1500, 'cpu'):\n"
        "    case.run(); case.other and case.other(); print(case.name, case.floor_bytes / 1500)\n"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "adamw fp32 28.0" in done.stdout.splitlines()
    assert "adamw bf16 at random 14.0" in done.stdout.splitlines()
    assert "decode and add 4 of sign 4.864" in done.stdout.splitlines(), "24 blocks hold 1500 elements and 36 more"


# ---- cubins ----------------------------------------------------------------------------------------------------------


def launches(first: int) -> Iterator[Any]:
    """Calls of every launcher, in the dtypes that programs use, on buffers that start `first` elements late."""
    size = 4096 + first

    def buffer(dtype: torch.dtype = F32, num: int = size) -> Tensor:
        return torch.zeros(num + first, dtype=dtype)[first:]

    def message(codec: BlockCodec, ranks: int = 1) -> Tensor:
        num = message_bytes(size, codec) * ranks
        return buffer(torch.uint8, num + 3 * first)[3 * first :]  # a message starts at a multiple of four bytes

    def scalar(dtype: torch.dtype = F64) -> Tensor:
        return torch.zeros((), dtype=dtype)

    step: tuple[Any, ...] = (scalar(INT64), scalar(), *STEP)
    seed, flag = scalar(INT64), scalar(torch.bool)
    for p, g, m in [(F32, F32, F32), (F32, BF16, F32), (F32, F32, BF16), (BF16, BF16, BF16), (F16, F16, F16)]:
        run = partial(adamw.adamw_, buffer(p), buffer(g), buffer(m), buffer(m), *step)
        yield run
        yield partial(run, False, scalar(), scalar())
        options: dict[str, Any] = {"scale": scalar(F32), "clip": scalar(), "skip": flag, "copy": buffer(BF16)}
        yield partial(run, **options, seeds=adamw.Seeds(*(seed if t == BF16 else None for t in (p, m, m))))
    for p in (F32, BF16, F16):
        blocks = -(-size // 64)
        moments = buffer(torch.int8), buffer(F32, blocks), buffer(torch.uint8), buffer(F32, blocks)
        yield partial(adam8_kernel.adamw8_, buffer(p), buffer(p), *moments, *step)
        yield partial(adam8_kernel.adamw8_, buffer(p), buffer(p), *moments, *step, scalar(), scalar())
    yield partial(rounding.stochastic_round, buffer(), seed, out=buffer(BF16))
    for source, target in [(F32, BF16), (BF16, F32), (F32, F16), (F16, F32), (BF16, BF16)]:
        yield partial(cast.cast, buffer(target), buffer(source), scalar(F32))
        yield partial(cast.cast, buffer(target), buffer(source))
    for dtype in (F32, BF16, F16):
        yield partial(flat_norms.sum_squares, buffer(dtype), nonfinite=flag)
        for codec in CODECS.values():
            yield partial(codec_kernels.encode, codec, buffer(dtype), out=message(codec))
    for codec in CODECS.values():
        yield partial(codec_kernels.decode, codec, message(codec))
        yield partial(codec_kernels.decode_sum, codec, message(codec, 3).view(3, -1), 3)
    yield from sparse_launches(first)
    yield from row_sum_launches(first)
    yield from loss_launches(first)
    keys = torch.zeros(3, 2, dtype=INT64)
    for dtype, normal in ((F32, True), (F32, False), (F64, True), (BF16, False), (F16, True)):
        yield partial(philox.fill, torch.empty(3, size, dtype=dtype), keys, normal=normal)
    yield partial(philox.derive, torch.empty(3, 5, 2, dtype=INT64), keys, None, domain=1)


def sparse_launches(first: int) -> Iterator[Any]:
    """Of block-sparse attention: windows and tables, with documents and without, and the head dims of models."""
    columns = torch.zeros(1, 1, 4, 3, dtype=torch.int32)
    for dtype, dim, block in [
        (F32, 64, 64),
        (F32, 64, 32),
        (BF16, 32, 64),
        (BF16, 128, 64),
        (BF16, 256, 32),
        (F16, 64, 64),
    ]:
        tokens = 4 * block
        q, k, v, grad = (torch.zeros(1, h, tokens, dim + first, dtype=dtype)[..., first:] for h in (4, 2, 2, 4))
        ids = torch.zeros(1, tokens, dtype=torch.int32)
        for table, documents in ((None, None), (columns, None), (columns, ids)):
            args = (q, k, v, table, documents, block, 100, 0, 0.125)
            yield partial(block_sparse.attention_out, *args, out=torch.zeros(1, 4, tokens, dim, dtype=dtype))
            into = {f"d{name}": torch.zeros(x.shape, dtype=dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
            yield partial(block_sparse.backward_out, grad, *args, **into)


def row_sum_launches(first: int) -> Iterator[Any]:
    """Of sums over rows: with and without what is added, and rows of models. The widest begin where memory does."""
    for dtype, width in ((F32, 768), (BF16, 1280), (BF16, 4096), *([] if first else [(BF16, WIDEST)]), (F16, 1280)):
        one, two, three, out = (torch.zeros(32 * width + first, dtype=dtype)[first:].view(32, width) for _ in range(4))
        mean, rstd = torch.zeros(32), torch.ones(32)
        sums = [torch.zeros(width, dtype=dtype) for _ in range(4)]
        for approximate in ("tanh", "none"):
            yield partial(row_sums.gelu_backward_sum, one, two, out, sums[0], approximate=approximate)
        yield partial(row_sums.layer_norm_backward_sums, one, two, mean, rstd, sums[0], None, out, *sums[1:3])
        yield partial(row_sums.layer_norm_backward_sums, one, two, mean, rstd, sums[0], three, out, *sums[1:4])
        heads = (x.view(1, 32, -1, 64).transpose(1, 2) for x in (one, two, three))
        yield partial(row_sums.pack_sum, *heads, torch.zeros(3 * 32 * width, dtype=dtype), torch.zeros(3 * width))


def loss_launches(first: int) -> Iterator[Any]:
    """Of the loss over a vocabulary: as it is, and in wider rows."""
    for dtype, columns, width in ((F32, 1000, 1000), (BF16, 50257, 50304), (F16, 257, 257)):
        x = torch.zeros(4 * width + first, dtype=dtype)[first:].view(4, width)
        target, one = torch.zeros(4, dtype=INT64), torch.ones(())
        for mean, grad in ((True, None), (False, one)):
            yield partial(softmax_loss.softmax_loss, x, target, grad, one, x, columns=columns, mean=mean, ignored=-100)


def recorded(monkeypatch: pytest.MonkeyPatch, first: int) -> dict[str, tuple[Any, ...]]:
    """The different kernels launched: name and types to (kernel, signature, constants, attributes, options)."""
    found: dict[str, tuple[Any, ...]] = {}

    def record(kernel: Any, programs: int, device: torch.device, *args: Any, **constants: Any) -> None:
        defaults = {"enable_fp_fusion": True, "num_warps": 4, "num_stages": 3, "maxnreg": None}
        options = {name: constants.pop(name, default) for name, default in defaults.items()}
        one = _source(kernel, args, constants)
        found[f"{kernel.__name__} {one} {options}"] = (kernel, *one, options)

    monkeypatch.setattr(_triton, "launch", record)
    monkeypatch.setattr(row_sums, "launch", record)
    monkeypatch.setattr(softmax_loss, "launch", record)
    monkeypatch.setattr(philox, "launch", record)
    for call in launches(first):
        call()
    return found


def _source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(signature, constants, attributes): what Triton specialises a launch on."""
    signature, constants, attributes = {}, dict(constants), {}
    for place, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if arg is None or (type(arg) is int and arg == 1):
            constants[name] = arg
        elif isinstance(arg, Tensor):
            signature[name] = "*" + TYPES[arg.dtype]
        else:
            signature[name] = "fp32" if isinstance(arg, float) else "i32" if abs(arg) < 2**31 else "i64"
        number = arg.data_ptr() if isinstance(arg, Tensor) else arg
        if isinstance(number, int) and number % 16 == 0:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return {n: signature.get(n, "constexpr") for n in kernel.arg_names}, constants, attributes


class Said(NamedTuple):
    """What Triton's own ptxas said of a kernel: bytes of registers that it spilled, registers, bytes of stack."""

    spilled: int
    registers: int
    stack: int


def assembled(one: tuple[Any, ...], capability: int, **more: Any) -> tuple[Any, Said]:
    """The compiled kernel, and what its assembler said."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants, attributes, options = one
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**options, **more})
    spilled, registers, stack = (
        [int(number) for number in re.findall(said, log.getvalue())]
        for said in (r"(\d+) bytes spill", r"Used (\d+) registers", r"(\d+) bytes stack frame")
    )
    assert min(map(len, (spilled, registers, stack))) > 0, log.getvalue()
    return result, Said(sum(spilled), max(registers), max(stack))


@pytest.fixture
def _told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton assembles anew, and prints what ptxas says."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")


# what streams whole rows that begin at sixteen bytes; a loss's rows of an odd width do not
STREAMING = {f"_{name}_kernel" for name in ("adamw", "adam8", "cast", "encode", "fold", "pack", "partial", "round")}


@needs_triton
@compiles
@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.acceptance)], ids=["aligned", "unaligned"])
@pytest.mark.sampled(1)
def test_every_kernel_becomes_a_cubin_without_spills(
    capability: int, first: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All launches; in `make test` one of each kernel. What streams rows loads vectors. Attention holds tiles of
    products, and a normal number's cosine has a stack for large angles; the others take 128 registers at most, and no
    stack."""
    found = recorded(monkeypatch, first)
    assert {one[0].__name__ for one in found.values()} == set(_kernels()), "every kernel is launched above"
    if not whole:
        found = dict({one[0].__name__: (name, one) for name, one in found.items()}.values())
    for name, one in found.items():
        result, said = assembled(one, capability)
        assert result.asm["cubin"]
        assert said.spilled <= _spills(one[0].__name__), f"{name} spills {said.spilled} bytes on sm_{capability}"
        tiles = one[0].__module__ == "fzero.kernels.block_sparse" or first  # nor does a program begin in between
        assert tiles or said.registers <= 128, f"{name} takes {said.registers} registers on sm_{capability}"
        stack = one[0] is philox._fill_kernel or said.spilled
        assert tiles or stack or not said.stack, f"{name} has a stack on sm_{capability}"
        if not one[-1]["enable_fp_fusion"]:
            assert "fma.rn" not in result.asm["ptx"], f"{name} fuses products into sums"
        if first == 0 and one[0].__name__ in STREAMING:
            assert re.search(r"ld\.global\S*\.v\d", result.asm["ptx"]), f"{name} loads one element at a time"


def _spills(name: str) -> int:
    """The bytes of registers that a kernel may spill. Triton 3.8's assembler keeps two of them to 64 and 80 registers.
    A `maxnreg` that leaves them more leaves fewer threads at a time; no device has said which is faster."""
    import triton

    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    return 32 if newer and name in ("_adam8_kernel", "_norm_kernel") else 0


def _kernels() -> Iterator[str]:
    for module in pkgutil.iter_modules(fzero.kernels.__path__):
        names = vars(importlib.import_module(f"fzero.kernels.{module.name}"))
        yield from (name for name in names if name.endswith("_kernel"))


@needs_triton
@compiles
@pytest.mark.usefixtures("_told")
@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.acceptance)])
def test_codes_move_four_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message starts at a multiple of four bytes, not of the sixteen that Triton asks a pointer for."""
    codes = {"BITS": CODECS[name].bits, "MANTISSA": 0}
    found = [one for one in recorded(monkeypatch, 1).values() if codes.items() <= one[2].items()]
    assert len(found) == 5, "encode of three dtypes, decode, decode_sum"
    for one in found:
        ptx = assembled(one, 90)[0].asm["ptx"]
        if one[1].get("x", "*fp32") == "*fp32":
            assert ".global" in ptx
            assert not re.search(r"(ld|st)\.global\.[^;]*b8", ptx), one[0].__name__


@needs_triton
@compiles
@pytest.mark.usefixtures("_told")
def test_a_spill_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel in 24 registers, which are too few."""
    one = next(one for one in recorded(monkeypatch, 0).values() if one[0] is adamw._adamw_kernel)
    assert assembled(one, 90)[1].spilled == 0
    assert assembled(one, 90, maxnreg=24)[1].spilled > 0


# ---- the table and the errors ----------------------------------------------------------------------------------------


@needs_triton
def test_the_table_takes_what_it_can() -> None:
    """Signatures are the operators'; operands that no kernel reads go to the operator."""
    for name, row in fzero.kernels.KERNELS.items():
        namespace, packet, overload = name.split(".")
        schema = getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema
        assert callable(row.launch), schema
    op = torch.ops.fzero.adamw_.default
    with FakeTensorMode():
        p, low, cpu = (torch.empty(64, 4, dtype=t, device=d) for t, d in ((F32, "cuda"), (F64, "cuda"), (F32, "cpu")))
        step = torch.empty((), dtype=INT64, device="cuda"), torch.empty((), dtype=F64, device="cuda"), *STEP
        assert kernel_for(op, p, p, p, p, *step, True) is adamw.adamw_
        assert kernel_for(op, low, low, low, low, *step, True) is None
        assert kernel_for(op, cpu, cpu, cpu, cpu, *step, True) is None
        assert kernel_for(op, p.t(), p.t(), p.t(), p.t(), *step, True) is None
        assert kernel_for(torch.ops.fzero.sum_squares.default, p) is flat_norms.sum_squares
        assert kernel_for(torch.ops.aten.add.Tensor, p, p) is None
        fused = torch.ops.aten._fused_adamw_.default
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False}
        lists = [[p]] * 4
        assert kernel_for(fused, *lists, [], [step[0]], **options, amsgrad=False) is adamw.fused_adamw_
        assert kernel_for(fused, *lists, [[p]], [step[0]], **options, amsgrad=True) is None


@needs_triton
@pytest.mark.parametrize("name", CODECS)
def test_the_table_takes_codecs_in_both_forms(name: str) -> None:
    ops = OPS[name]
    with FakeTensorMode():
        x = torch.empty(130, 5, device="cuda", dtype=BF16)
        room = {"device": "cuda", "dtype": torch.uint8}
        rows = torch.empty_strided((4, 9 * ops.codec.block_bytes), (1024, 1), **room)
        apart = torch.empty_strided((9 * ops.codec.block_bytes,), (2,), **room)
        for op, args, function in (
            (ops.encode, (x,), codec_kernels.encode),
            (ops.decode, (rows.select(0, 1),), codec_kernels.decode),
            (ops.decode_sum, (rows, 4), codec_kernels.decode_sum),
        ):
            for form in (op, op.overloadpacket.out):
                kernel: Any = kernel_for(form, *args)
                assert (kernel.func, kernel.args) == (function, (ops.codec,))
                assert kernel_for(form, args[0].cpu(), *args[1:]) is None
        assert kernel_for(ops.encode, x.t()) is None
        assert kernel_for(ops.encode, x.double()) is None
        assert kernel_for(ops.decode, apart) is None


F, U8, I8 = torch.zeros(128), torch.zeros(128, dtype=torch.uint8), torch.zeros(128, dtype=torch.int8)
ONE = torch.tensor(1)
INT8, SIGN = CODECS["int8"], CODECS["sign"]
ERRORS = [
    (lambda: cast.cast(F, F.double()), TypeError, "cast: x is torch.float64, needed torch.float32 or"),
    (lambda: cast.cast(F, torch.ones(3)), ValueError, "cast: out has 128 elements, needed 3"),
    (lambda: cast.cast(F, torch.ones(64, 2).t()), ValueError, r"cast: x has strides \(1, 2\), but it must be contig"),
    (lambda: codec_kernels.encode(INT8, F.double()), TypeError, "encode: x is torch.float64, needed torch.float32 or"),
    (lambda: codec_kernels.encode(INT8, F, out=U8), ValueError, "encode: out has 128 elements, needed 136"),
    (lambda: codec_kernels.encode(SIGN, F[:64], out=U8[1:13]), ValueError, "out starts at byte .* be multiples of 4"),
    (
        lambda: codec_kernels.decode(INT8, U8),
        ValueError,
        "1 of 128 bytes, .* whole blocks: of int8 a block is 68 bytes",
    ),
    (lambda: codec_kernels.decode(SIGN, I8[:120]), TypeError, "decode: messages is torch.int8, needed torch.uint8"),
    (lambda: codec_kernels.decode_sum(SIGN, U8[:0].view(0, 12), 1), ValueError, "are 0 of 12 bytes, .* at least one"),
    (
        lambda: codec_kernels.decode_sum(SIGN, U8[:26].view(2, 13)[:, :12], 1),
        ValueError,
        "its rows are 13 bytes apart, but both must be multiples of 4, for the scales are float32",
    ),
    (lambda: adamw.adamw_(F, F, F, F[:5], ONE, ONE, *STEP), ValueError, "adamw: nu has 5 elements, needed 128"),
    (lambda: adamw.adamw_(F, F, F, F, F, ONE, *STEP), ValueError, r"count has shape \(128,\), but it must be 0-d"),
    (
        lambda: adamw.adamw_(F, F, F, F, ONE, ONE, *STEP, seeds=adamw.Seeds(mu=ONE)),
        TypeError,
        "mu is torch.float32 and has a seed: only bfloat16",
    ),
    (
        lambda: adam8_kernel.adamw8_(F, F, I8, F, U8, F, ONE, ONE, *STEP),
        ValueError,
        "mu_scales has 128 elements, needed 2",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors_teach(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
