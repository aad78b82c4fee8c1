"""fzero.random: the numbers are right, depend on nothing but the key, and survive every way of tracing."""

import doctest
import math
import os
import subprocess
import sys
import tracemalloc
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import random
from fzero._torch_compat import FakeTensorMode
from fzero.kernels import _triton, philox
from fzero.random import _draw_ops, draws, keys

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
int64s = st.integers(-(2**63), 2**63 - 1)
seeds = st.integers(0, 2**128 - 1)

# One call of every op, by name.
CALLS = {
    "uniform": lambda key: random.uniform(key, (3, 2), torch.bfloat16, low=-1.0, high=3.0),
    "normal": lambda key: random.normal(key, (4,)),
    "random_bits": lambda key: _draw_ops.bits(key, (3, 5)),
    "random_split": lambda key: random.split(key, 3),
    "random_fold_in": lambda key: random.fold_in(key, -5),
    "random_fold_in_tensor": lambda key: random.fold_in(key, torch.tensor(9, dtype=torch.int32)),
}
each_call = pytest.mark.parametrize("name", CALLS)


def _words(key: torch.Tensor) -> tuple[int, int]:
    first, second = key.tolist()
    return first % 2**64, second % 2**64


def _numpy_words(key: torch.Tensor, counter: list[int], count: int) -> np.ndarray:
    bits = np.random.Philox(key=np.array(_words(key), np.uint64), counter=np.array(counter, np.uint64))
    return bits.random_raw(count)


def _bits_set(key: torch.Tensor) -> int:
    return sum(word.bit_count() for word in _words(key))


@pytest.mark.parametrize("module", [keys, draws, philox])
def test_doctests(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    """The vectors published with Random123 (kat_vectors): counter and key all ones, and the digits of pi."""
    narrow = philox.philox_reference(np.full((4, 1), 2**32 - 1, np.uint32), np.full((2, 1), 2**32 - 1, np.uint32))
    assert narrow[:, 0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = np.array([[0x243F6A88], [0x85A308D3], [0x13198A2E], [0x03707344]], np.uint32)
    narrow = philox.philox_reference(counter, np.array([[0xA4093822], [0x299F31D0]], np.uint32))
    assert narrow[:, 0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    wide = philox.philox_reference(np.zeros((4, 1), np.uint64), np.zeros((2, 1), np.uint64))
    assert wide[:, 0].tolist() == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]


@settings(deadline=None, max_examples=40)
@given(seed=seeds, data=int64s, num=st.integers(1, 9))
def test_derived_keys_are_numpys_philox_words(seed, data, num):
    """Keys are a promise across versions and backends: numpy's own generator is the oracle."""
    key = random.key(seed)
    assert _words(key) == (seed % 2**64, seed >> 64)
    children = _numpy_words(key, [0, 0, 0, 1], 4 * num).reshape(num, 4)[:, :2]
    assert (random.split(key, num).numpy().view(np.uint64) == children).all()
    folded = _numpy_words(key, [0, data % 2**64, 0, 2], 2)
    assert (random.fold_in(key, data).numpy().view(np.uint64) == folded).all()
    assert torch.equal(random.fold_in(key, data), random.fold_in(key, torch.tensor(data)))


def test_children_of_many_keys_at_once_are_those_of_each_alone():
    """Few keys take numpy's generator, many the arrays: one promise."""
    roots = random.split(random.key(5), _draw_ops.FEW + 1)
    data = torch.arange(len(roots)) - 8
    for op, *rest in ((_draw_ops.split, 3), (_draw_ops.fold_in, -4)):
        assert torch.equal(op(roots, *rest), torch.stack([op(root, *rest) for root in roots]))
    alone = torch.stack([_draw_ops.fold_in_tensor(root, one) for root, one in zip(roots, data, strict=True)])
    assert torch.equal(_draw_ops.fold_in_tensor(roots, data), alone)


def test_children_of_one_key_are_not_made_by_arrays(monkeypatch):
    """A step derives a key for each mask: ten rounds on arrays of one number took 150 microseconds each."""
    monkeypatch.setattr(_draw_ops, "philox_reference", None)
    assert random.split(random.fold_in(random.key(0), 3), 2).shape == (2, 2)


def test_a_child_does_not_depend_on_how_many_are_asked_for():
    assert torch.equal(random.split(random.key(4), 100)[:7], random.split(random.key(4), 7))


def test_all_keys_of_a_tree_differ():
    root = random.key(0)
    keys = [root, *random.split(root, 500), *(random.fold_in(root, i) for i in range(-250, 250))]
    keys += [random.fold_in(child, i) for child in random.split(root, 20) for i in range(20)]
    assert len({_words(key) for key in keys}) == len(keys)


def test_derived_keys_show_no_linear_structure():
    """Flipping one bit of the key or of the data flips half of the child's 128 bits; xor does not carry through."""
    root, flips, parity = random.key(12345), [], []
    base = random.fold_in(root, 0)
    for bit in range(63):
        flips.append(_bits_set(random.fold_in(root, 1 << bit) ^ base))
        flips.append(_bits_set(random.fold_in(root ^ torch.tensor([1 << bit, 0]), 0) ^ base))
        flips.append(_bits_set(random.split(root ^ torch.tensor([0, 1 << bit]))[1] ^ random.split(root)[1]))
        both = random.fold_in(root, (1 << bit) ^ 1000) ^ random.fold_in(root, 1 << bit) ^ random.fold_in(root, 1000)
        parity.append(_bits_set(both ^ base))
    # A count of 128 fair bits has a standard deviation of 5.7; six of them, and the mean to six of its own.
    for counts in (flips, parity):
        assert all(64 - 34 < count < 64 + 34 for count in counts)
        assert abs(np.mean(counts) - 64) < 6 * 5.66 / math.sqrt(len(counts))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


def _ks(sample: np.ndarray, cdf: np.ndarray) -> float:
    """The Kolmogorov-Smirnov statistic times sqrt(n), below 1.95 in 999 samples of 1000."""
    n = len(sample)
    return math.sqrt(n) * max(np.abs(cdf - np.arange(n) / n).max(), np.abs(cdf - np.arange(1, n + 1) / n).max())


@pytest.mark.parametrize("seed", [0, 1, 2**64, 2**127 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype, seed):
    n = 150_000
    x = random.uniform(random.key(seed), n, dtype).double().sort().values.numpy()
    assert _ks(x, x) < 1.95
    z = random.normal(random.key(seed), n, dtype).double().sort().values.numpy()
    assert _ks(z, _normal_cdf(z)) < 1.95
    moments = [np.mean(z), np.mean(z**2) - 1, np.mean(z**3), np.mean(z**4) - 3]
    variances = [1, 2, 15, 96]
    assert all(abs(moment) < 4.5 * math.sqrt(v / n) for moment, v in zip(moments, variances, strict=True))


@settings(deadline=None, max_examples=40)
@given(seed=seeds, shape=st.lists(st.integers(0, 5), max_size=4), dtype=st.sampled_from(DTYPES))
def test_shape_dtype_and_determinism(seed, shape, dtype):
    key = random.key(seed)
    for draw in (random.uniform, random.normal):
        x = draw(key, shape, dtype)
        assert (tuple(x.shape), x.dtype, x.device) == (tuple(shape), dtype, key.device)
        assert torch.equal(x, draw(key, tuple(shape), dtype))
        flat = draw(key, math.prod(shape), dtype)  # an int for a shape; the layout does not change the numbers
        assert torch.equal(x.flatten(), flat)
        assert torch.equal(draw(key, math.prod(shape) + 3, dtype)[: len(flat)], flat)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_numbers_are_the_float32_ones_rounded(dtype):
    n = 200_000  # several chunks, the last one partial
    key = random.key(8)
    assert torch.equal(random.normal(key, n, dtype), random.normal(key, n).to(dtype))
    narrow, exact = random.uniform(key, n, dtype, -3.0, 5.0), random.uniform(key, n, low=-3.0, high=5.0)
    above = torch.nextafter(narrow, torch.tensor(9.0, dtype=dtype)) if dtype == torch.bfloat16 else None
    assert (narrow.float() <= exact).all()
    assert above is None or (above.float() > exact).all()
    keep = random.uniform(key, n, dtype) < 0.125
    assert torch.equal(keep, random.uniform(key, n) < 0.125)


BOUNDS = [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.03125), (-2.0, -1.96875), (-1.0, 0.0), (0.3, 0.7), (-7e-6, 3e-7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_uniform_is_half_open(dtype, low, high):
    """Rounding to nearest would give `high` itself about once in 500 numbers in bfloat16."""
    x = random.uniform(random.key(2), 100_000, dtype, low, high)
    low_value, high_value = torch.tensor([low, high], dtype=dtype)
    assert (x >= low_value).all()
    assert (x < high_value).all()
    middle, width = (low + high) / 2, high - low
    step = torch.finfo(dtype).eps * max(abs(low), abs(high))
    assert abs(x.double().mean() - middle) < 0.01 * width + step


def test_uniform_of_few_values_stays_below_high():
    high = 1 + 2.0**-20  # eight float32 values: rounding to nearest would make a ninth, `high`
    x = random.uniform(random.key(0), 10_000, low=1.0, high=high)
    assert x.unique().tolist() == [1 + i * 2.0**-23 for i in range(8)]


def test_streams_do_not_meet():
    """Children, parent and every use of one key share no 53-bit number, and neighbours do not correlate."""
    root, n = random.key(99), 4000
    keys = [root, *random.split(root, 6), *(random.fold_in(root, i) for i in range(6))]
    rows = torch.stack([random.uniform(key, n, torch.float64) for key in keys])
    words = torch.stack(keys[1:]).numpy().view(np.uint64) >> np.uint64(11)
    words = torch.from_numpy(words.astype(np.float64) * 2.0**-53)  # as `uniform` would show these words
    everything = torch.cat([rows.flatten(), words.flatten()])
    assert len(everything.unique()) == len(everything)
    correlation = torch.corrcoef(rows) - torch.eye(len(keys))
    assert correlation.abs().max() < 5 / math.sqrt(n)
    normal, uniform = random.normal(root, n, torch.float64), rows[0]
    assert abs(torch.corrcoef(torch.stack([normal.abs(), uniform]))[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_the_result(dtype):
    """numpy writes into the result: no array of its own beyond the scratch of one chunk."""
    tracemalloc.start()
    random.uniform(random.key(0), 2_000_000, dtype, 1.0, 2.0)
    random.normal(random.key(0), 2_000_000, dtype)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


# ---- transforms and tracing ------------------------------------------------------------------------------------------


@each_call
@pytest.mark.parametrize("in_dim", [0, 1])
def test_vmap_gives_what_a_loop_gives(name, in_dim):
    call, keys = CALLS[name], random.split(random.key(1), 5)
    expected = torch.stack([call(key) for key in keys])
    batched = torch.vmap(call, in_dims=in_dim)(keys if in_dim == 0 else keys.T.contiguous())
    assert torch.equal(batched, expected)


@each_call
def test_nested_vmap(name):
    call, keys = CALLS[name], random.split(random.key(1), 6)
    nested = torch.vmap(torch.vmap(call))(keys.view(2, 3, 2))
    assert torch.equal(nested.flatten(0, 1), torch.stack([call(key) for key in keys]))


def test_vmap_of_fold_in_over_either_or_both():
    keys, data = random.split(random.key(0), 3), torch.tensor([5, -1, 2**40])
    loop = torch.stack([torch.stack([random.fold_in(key, d) for d in data]) for key in keys])
    over_data = torch.vmap(random.fold_in, in_dims=(None, 0))
    assert torch.equal(over_data(keys[0], data), loop[0])
    assert torch.equal(torch.vmap(random.fold_in)(keys, data), loop.diagonal().T)
    assert torch.equal(torch.vmap(over_data, in_dims=(0, None))(keys, data), loop)
    over_keys = torch.vmap(random.fold_in, in_dims=(0, None))
    assert torch.equal(torch.vmap(over_keys, in_dims=(None, 0))(keys, data), loop.transpose(0, 1))
    assert torch.equal(
        torch.vmap(random.fold_in)(keys, data.to(torch.int16)), torch.vmap(random.fold_in)(keys, data.short().long())
    )


@each_call
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_traces_to_one_node(name, mode):
    data = torch.tensor(9, dtype=torch.int32)
    call = (lambda key, data: random.fold_in(key, data)) if name.endswith("tensor") else lambda key, _: CALLS[name](key)
    graph = make_fx(call, tracing_mode=mode)(random.key(0), data)
    calls = [node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    assert calls == [getattr(torch.ops.fzero, name).default]
    assert torch.equal(graph(random.key(3), data), call(random.key(3), data))


@each_call
def test_fake_tensors_have_the_real_shape(name):
    real = CALLS[name](random.key(0))
    with FakeTensorMode():
        fake = CALLS[name](random.key(0))
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


@each_call
def test_op_is_pure_and_passes_torchs_own_checks(name):
    op = getattr(torch.ops.fzero, name).default
    assert torch.Tag.nondeterministic_seeded not in op.tags
    arguments = {
        "uniform": ((3,), torch.float32, 0.0, 1.0),
        "normal": ((3,), torch.float32),
        "random_bits": ((3, 5),),
        "random_split": (3,),
        "random_fold_in": (7,),
        "random_fold_in_tensor": (torch.tensor(7),),
    }[name]
    torch.library.opcheck(op, (random.key(5), *arguments))


def _loss(weight: torch.Tensor, key: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
    mask_key, noise_key = random.split(random.fold_in(key, step))
    mask = random.uniform(mask_key, weight.shape) < 0.5
    return (weight * mask * random.normal(noise_key, weight.shape)).sum()


def test_in_a_loss_that_is_differentiated():
    key, step, weight = random.key(2), torch.tensor(3), torch.ones(16, requires_grad=True)
    mask_key, noise_key = random.split(random.fold_in(key, 3))
    expected = (random.uniform(mask_key, 16) < 0.5) * random.normal(noise_key, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        (grad,) = torch.autograd.grad(_loss(weight, key, step), weight)
        assert torch.equal(grad, expected)
        assert torch.equal(torch.func.grad(_loss)(weight.detach(), key, step), expected)
        keys = random.split(key, 3)
        per_key = torch.vmap(torch.func.grad(_loss), in_dims=(None, 0, None))(weight.detach(), keys, step)
        assert torch.equal(per_key, torch.stack([torch.func.grad(_loss)(weight.detach(), k, step) for k in keys]))
        _, tangent = torch.func.jvp(lambda w: _loss(w, key, step), (weight.detach(),), (torch.ones(16),))
        torch.testing.assert_close(tangent, expected.sum())
    assert not random.normal(key, 3).requires_grad


def test_compiles_whole():
    compiled = torch.compile(_loss, fullgraph=True, backend="aot_eager")
    weight = torch.ones(8)
    for step in (1, 2, torch.tensor(3)):  # the second int makes it dynamic
        assert torch.equal(compiled(weight, random.key(7), step), _loss(weight, random.key(7), step))


# ---- errors ----------------------------------------------------------------------------------------------------------

KEY = random.key(0)
ERRORS = [
    (lambda: random.key(-1), ValueError, r"\[0, 2\*\*128\), given -1"),
    (lambda: random.key(2**128), ValueError, "given 3402"),
    (lambda: random.key(1.5), TypeError, r"float 1\.5.*fzero\.random\.key\(int\(seed\)\)"),
    (lambda: random.key(True), TypeError, "bool True"),
    (lambda: random.uniform(0, 3), TypeError, r"given int 0\. Write fzero\.random\.key\(0\)"),
    (lambda: random.split(KEY.float()), TypeError, r"float32 tensor of shape \(2,\)\. Write fzero\.random\.key\(0\)"),
    (lambda: random.normal(torch.zeros(3, dtype=torch.int64)), ValueError, r"int64 tensor of shape \(3,\)"),
    (
        lambda: random.normal(random.split(KEY), 3),
        ValueError,
        r"torch\.vmap\(lambda key: fzero\.random\.normal\(key\)\)",
    ),
    (lambda: random.split(KEY, 0), ValueError, r"at least 1, given 0"),
    (lambda: random.split(KEY, 2.0), TypeError, r"given float 2\.0"),
    (lambda: random.fold_in(KEY, 1.0), TypeError, r"given float 1\.0\. Write fold_in\(key, int\(data\)\)"),
    (lambda: random.fold_in(KEY, True), TypeError, "given bool True"),
    (lambda: random.fold_in(KEY, torch.tensor(1.0)), TypeError, r"float32 tensor of shape \(\)\. Write data\.long\(\)"),
    (lambda: random.fold_in(KEY, torch.tensor([1])), ValueError, r"must be 0-d.*torch\.vmap"),
    (lambda: random.fold_in(KEY, torch.tensor(1, device="meta")), ValueError, r"on meta, the key on cpu"),
    (lambda: random.fold_in(KEY, 2**63), ValueError, "given 9223372036854775808"),
    (lambda: random.normal(KEY, 3, torch.int32), TypeError, r"given torch\.int32.*\.to\(dtype\)"),
    (lambda: random.uniform(KEY, 3, torch.float8_e5m2), TypeError, "must be one of torch.float32"),
    (lambda: random.uniform(KEY, 2.5), TypeError, r"shape must be an int or a sequence of ints, given float 2\.5"),
    (lambda: random.normal(KEY, (2, -1)), ValueError, r"must not be negative, given \(2, -1\)"),
    (lambda: random.uniform(KEY, 3, low=1, high=1), ValueError, r"needs low < high within torch\.float32"),
    (lambda: random.uniform(KEY, 3, torch.bfloat16, 1.0, 1.001), ValueError, "which round to 1.0 and 1.0"),
    (lambda: random.uniform(KEY, 3, low=float("nan")), ValueError, "low=nan"),
    (lambda: random.uniform(KEY, 3, low=-3e38, high=3e38), ValueError, "must be finite"),
    (lambda: random.uniform(KEY, 3, low=torch.zeros(3)), TypeError, r"low \+ \(high - low\) \*"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS)
def test_errors_teach(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_bounds_are_checked_while_tracing():
    with FakeTensorMode(), pytest.raises(ValueError, match="needs low < high"):
        random.uniform(random.key(0), 3, low=2.0, high=1.0)


# ---- the Triton kernels ----------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (pip install triton)")


def _run(script: str, cache: Path, **environment: str) -> None:
    """In a process of its own, for Triton reads TRITON_INTERPRET when it is imported."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(philox.__file__).parents[2])
    environment = {**inherited, "PYTHONPATH": root, "TRITON_CACHE_DIR": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


INTERPRET = """
import torch
from fzero import random
from fzero.kernels import philox

keys = torch.tensor([[0, 0], [-3, 2**62 + 5], [2**63 - 1, -(2**63)]])
children = torch.empty(3, 50, 2, dtype=torch.int64)
philox.derive(children, keys, None, domain=1)
assert torch.equal(children, torch.stack([random.split(key, 50) for key in keys]))
data, folded = torch.tensor([0, -1, 77]), torch.empty(3, 1, 2, dtype=torch.int64)
philox.derive(folded, keys, data, domain=2)
assert torch.equal(folded[:, 0], torch.vmap(random.fold_in)(keys, data))

for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    size = max(LEAST, {torch.float32: 1100, torch.float64: 600}.get(dtype, 300))  # the first two: several blocks
    double = dtype == torch.float64
    relative, absolute = torch.finfo(dtype).eps, 64 * torch.finfo(torch.float64 if double else torch.float32).eps
    for normal in (False, True):
        for offset in (0, 2**35 + 7):
            out = torch.full((3, size), torch.nan, dtype=dtype)
            philox.fill(out, keys, normal=normal, offset=offset)
            exact = torch.tensor(philox.fill_reference(keys.numpy(), size, normal=normal, double=double, offset=offset))
            error = out.double() - exact
            assert (error.abs() <= relative * exact.abs() + absolute).all(), (dtype, normal, offset, error.abs().max())
            assert normal or (error <= 0).all()
            if dtype == torch.float32 and not normal:
                assert (error == 0).all()
    out = torch.empty(3, size, dtype=dtype)
    philox.fill(out, keys, normal=False, low=-1.0, high=-0.9375)
    assert (out >= -1).all() and (out < -0.9375).all() and abs(out.double().mean() + 0.96875) < 0.005
wide = torch.empty(3, size, dtype=torch.float64)
philox.fill(wide, keys, normal=False, low=-1e300, high=1e300)
assert (wide.abs() < 1e300).all() and wide.abs().max() > 9e299
few = torch.empty(3, size)
philox.fill(few, keys, normal=False, low=1.0, high=1 + 2.0**-20)
assert few.unique().tolist() == [1 + i * 2.0**-23 for i in range(8)]
"""

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fzero.kernels import philox

def cubin(kernel, signature, constants):
    signature = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

sizes = {"size": "i32", "offset": "i64", "blocks_per_key": "i32", "low": "fp32", "scale": "fp32", "top": "fp32"}
for dtype, normal in (("fp32", True), ("fp64", True), ("bf16", False), ("fp16", False)):
    signature = {"out_ptr": "*" + dtype, "keys_ptr": "*i64", **sizes}
    assert cubin(philox._fill_kernel, signature, {"NORMAL": normal, "BLOCK": 256})
signature = {"out_ptr": "*i64", "keys_ptr": "*i64", "data_ptr": "*i64", "total": "i32", "num": "i32", "domain": "i32"}
assert cubin(philox._derive_kernel, signature, {"HAS_DATA": True, "BLOCK": 128})
"""


@needs_triton
@pytest.mark.acceptance  # `random_numbers` of on_standin.py compares some
@pytest.mark.parametrize("least", [0, 1500])
def test_kernels_match_their_reference(least, tmp_path):
    _run(INTERPRET.replace("LEAST", str(least)), tmp_path, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.acceptance
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    _run(COMPILE, tmp_path)


def test_teaches_without_triton(monkeypatch):
    monkeypatch.setattr(_triton, "triton", None)
    assert random.normal(random.key(0), 3).shape == (3,)
    with pytest.raises(ImportError, match="pip install triton"):
        philox.fill(torch.empty(1, 3), random.key(0)[None], normal=True)


@pytest.mark.gpu
def test_on_cuda():
    """Keys have the CPU's bits; numbers match the kernels' reference; nothing waits for the device."""
    root = random.key(2**100 + 7)
    there = random.key(2**100 + 7, device="cuda")
    assert torch.equal(random.split(there, 1000).cpu(), random.split(root, 1000))
    step = torch.tensor(-4)
    assert torch.equal(random.fold_in(there, step.cuda()).cpu(), random.fold_in(root, step))
    for dtype in DTYPES:
        double = dtype == torch.float64
        exact = torch.tensor(philox.fill_reference(root[None].numpy(), 4096, normal=True, double=double)[0])
        error = random.normal(there, 4096, dtype).cpu().double() - exact
        absolute = 64 * torch.finfo(torch.float64 if double else torch.float32).eps
        assert (error.abs() <= torch.finfo(dtype).eps * exact.abs() + absolute).all()
        for low, high in BOUNDS:
            x = random.uniform(there, 100_000, dtype, low, high)
            low_value, high_value = torch.tensor([low, high], dtype=dtype, device="cuda")
            assert ((x >= low_value) & (x < high_value)).all()
    keys = random.split(there, 5)
    batched = torch.vmap(lambda key: random.normal(key, (3, 7)))(keys)
    assert torch.equal(batched, torch.stack([random.normal(key, (3, 7)) for key in keys]))
