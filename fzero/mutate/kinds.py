"""kinds: the table of mutations.

A mutation takes a source of chance and `{rank: program}` and returns the same broken in one place, on one rank or on
all that run this program, or None where it finds no place. It decides nothing about meaning: some of what it makes is
only another good schedule, and the oracle tells.
"""

from __future__ import annotations

from fzero.mutate import timing, values
from fzero.mutate.edits import Mutation, on

KINDS: dict[str, Mutation] = {
    "drop a wait": on(timing.drop_wait),
    "repeat a wait": on(timing.repeat_wait),
    "wait late": on(timing.wait_late),
    "free early": on(timing.free_early),
    "free never": on(timing.free_never),
    "free twice": on(timing.free_twice),
    "wrong place": on(timing.wrong_place),
    "swap collectives on one rank": on(timing.swap_collectives, alone=True),
    "wrong axis": on(timing.wrong_axis),
    "gather twice": on(timing.gather_twice),
    "exceed the cap": on(timing.exceed_cap),
    "busy scratch": on(timing.busy_scratch),
    "unmatched message": on(timing.unmatched_message),
    "reduce early": on(timing.reduce_early),
    "reduce twice": on(timing.reduce_twice),
    "wrong divisor": on(values.wrong_divisor),
    "wrong operation": on(values.wrong_operation),
    "skip a microbatch": on(values.skip_microbatch),
    "wrong microbatch": on(values.wrong_microbatch),
    "update twice": on(values.update_twice),
    "update before the reduction": on(values.update_early),
    "use a donated buffer": on(values.use_donated),
    "shrink a shard": on(values.shrink),
    "wrong slot": on(values.wrong_slot),
    "wrong write": on(values.wrong_write),
    "swap two reads": on(values.swap_reads),
    "drop an op": on(values.drop_op),
    "wrong arithmetic": on(values.wrong_arithmetic),
}
