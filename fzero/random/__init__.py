"""Randomness as a function of a key: the same key gives the same numbers, and nothing else is remembered.

A **key** is an int64 tensor of shape (2,): 128 bits, the key of a Philox4x64-10 generator. Its block turns a counter of
four 64-bit words into four random words (see kernels/philox.py). `key(seed)` is the seed itself, low word first. The
counter separates the uses of a key, so no two of these ever read the same block:

    split(key)[i]       words 0 and 1 of block (i + 1, 0,    0, SPLIT)     so split(key, 4)[:2] equals split(key, 2)
    fold_in(key, data)  words 0 and 1 of block (1,     data, 0, FOLD)
    uniform(key, ...)   blocks                 (1...,  0,    0, UNIFORM)   bernoulli, dropout and categorical read these
    normal(key, ...)    blocks                 (1...,  0,    0, NORMAL)
    bits                words 0 and 1 of each  (1...,  0,    0, BITS)      randint and permutation read these

Two draws from one key in one way give the same numbers. Split the key, or fold in a number that differs between the
uses (the step, the layer, the rank).

Every function of a key is made of ops of torch (`fzero::uniform` and kin) with a shape rule and a vmap rule. They are
pure, and not tagged as random. Each traces to one node, which a compiler may recompute, share or drop. vmap over keys
gives each key the numbers it would have alone. None has a derivative in the key; `dropout` has one in its input.

Which numbers are equal where:

- Keys (`key`, `split`, `fold_in`) and integers (`randint`, `permutation`): the same bits on every backend and version.
  They are defined above.
- Numbers on CPU: `numpy.random.Generator` over `numpy.random.Philox`, written straight into the result. The same bits
  on every run; on every platform and numpy version as far as numpy promises it, which for the distributions is weaker
  than for the words (its ziggurat calls the platform's `exp` and `log`, and a release may change an algorithm).
- Numbers on CUDA: Philox4x32-10 in one Triton kernel, normals by Box-Muller. A **different** stream from the CPU's: the
  same key gives other numbers there, and other masks and classes. The same bits on every run on one kind of device.
- bfloat16 and float16 are the float32 numbers of the same key, rounded: normals to nearest; uniforms down, so that they
  stay below `high`, and a mask `uniform(key, shape, dtype) < p` keeps the share it keeps in float32.

Memory: the result and, for 16-bit types on CPU, under 2 MiB of scratch; a mask has the float32 numbers beside it while
it is made. Time on one core: 7 ns for a uniform float32.
"""

from fzero.random.draws import bernoulli, categorical, dropout, normal, permutation, randint, uniform
from fzero.random.keys import fold_in, key, split

__all__ = [
    "bernoulli",
    "categorical",
    "dropout",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "uniform",
]
