"""kinds: the table of mutations.

A mutation takes a random generator and `{rank: program}`. It returns the programs with one of them broken in one place,
on one rank or on all ranks that run it. It returns None where it finds no place. It decides nothing about meaning: some
mutants are only another good schedule, and the oracle finds out.
"""

from __future__ import annotations

from lab.mutate import (
    axes,
    coded,
    feedback,
    hierarchy,
    kept,
    moves,
    records,
    roles,
    room,
    timing,
    values,
    windows,
    within,
)
from lab.mutate.edits import Mutation, on

# of pipelines alone
ROLES: dict[str, Mutation] = {
    "tags swapped": roles.in_a_role(roles.swap_tags),
    "message left out": roles.in_a_role(roles.lose_message),
    "message left out at both ends": roles.without_a_message,
    "messages in another order": roles.in_a_role(roles.exchange_messages),
    "received in another form": roles.in_a_role(roles.other_form),
    "segment left out": roles.in_a_role(roles.leave_segment_out),
    "gradient left out": roles.in_a_role(roles.leave_gradient_out),
    "gradient added twice": roles.in_a_role(roles.add_gradient_twice),
    "gradient added elsewhere": roles.in_a_role(roles.add_gradient_elsewhere),
    "another microbatch's activation": roles.in_a_role(roles.another_microbatch),
    "action before its input": roles.in_a_role(roles.action_early),
    "wrong group": roles.in_a_role(roles.wrong_group),
    "wrong coordinate": roles.in_a_role(roles.wrong_coordinate),
    "lent leaf not refreshed": roles.stale_lent,
    "leaf owned twice": roles.owned_twice,
}

# of two data axes alone
HIERARCHY: dict[str, Mutation] = {
    "outer sum left out": hierarchy.on_two_axes(hierarchy.leave_outer_out),
    "outer sum twice": hierarchy.on_two_axes(hierarchy.double_outer),
    "sum over another axis": hierarchy.on_two_axes(hierarchy.sum_over_another),
    "sums exchange their axes": hierarchy.on_two_axes(hierarchy.exchange_sums),
    "divisor on the inner sum": hierarchy.on_two_axes(hierarchy.divide_inside),
    "gather over another axis": hierarchy.on_two_axes(hierarchy.gather_over_another),
    "wrong second copy": hierarchy.on_two_axes(hierarchy.wrong_copy),
    "slice along another axis": hierarchy.on_two_axes(hierarchy.cut_along_another),
    "a finer slice or a coarser": hierarchy.on_two_axes(hierarchy.another_slice),
    "bucket cut along another axis": hierarchy.on_two_axes(hierarchy.cut_a_bucket_along_another),
    "collectives in a circle": hierarchy.in_a_circle,
}

# of programs with moves alone
MOVES: dict[str, Mutation] = {
    "write-back left out": on(moves.drop_write_back),
    "another tile": on(moves.swap_tiles),
    "copy refilled early": on(moves.refill_early),
    "wait for another copy": on(moves.wait_for_another),
    "move behind its use": on(moves.move_late),
    "update before a use": on(moves.update_before_use),
    "ranges of the file overlap": on(moves.alias_disk),
}

# of programs with an axis tp alone
AXES: dict[str, Mutation] = {
    "a maximum for a sum": axes.with_tp(axes.max_for_sum),
    "a share of the norm dropped": axes.with_tp(axes.share_of_norm),
    "another axis of several": axes.with_tp(axes.another_axis),
    "another rank's constant": axes.with_tp(axes.another_ranks_constant),
    "divided by the ranks of tp": axes.with_tp(axes.divided_by_tp),
    "an earlier source": axes.with_tp(axes.earlier_source),
    "operands exchanged": axes.with_tp(within.inside(within.exchange_operands)),
    "a transfer dropped": axes.with_tp(axes.call_dropped),
    "a call dropped": axes.with_tp(within.inside(within.drop_node)),
    "an integer argument": axes.with_tp(within.inside(axes.integer_argument)),
    "epsilon": axes.with_tp(within.inside(axes.epsilon)),
    "another dtype": axes.with_tp(axes.another_dtype),
}

# of programs whose values travel as messages of blocks
WINDOWS: dict[str, Mutation] = {
    "another bound to the left": on(
        within.inside(windows.another_number("left", lambda rng, n: n + rng.choice((1, 2))))
    ),
    "another bound to the right": on(within.inside(windows.another_number("right", lambda rng, n: n + 1))),
    "no bound": on(within.inside(windows.another_number("left", lambda rng, n: -1))),
    "another block": on(within.inside(windows.another_number("block", lambda rng, n: rng.choice((1, 4, 3))))),
    "another scale": on(within.inside(windows.another_number("scale", lambda rng, n: n * rng.choice((0.5, -1, 2))))),
    "keys for values": on(within.inside(windows.exchanged("k", "v"))),
    "queries for keys": on(within.inside(windows.exchanged("q", "k"))),
    "no table": on(within.inside(windows.without("columns"))),
    "no documents": on(within.inside(windows.without("documents"))),
    "other tokens of a chunk": on(within.inside(windows.other_tokens)),
    "a token less of a chunk": on(within.inside(windows.fewer_tokens)),
    "a chunk left out": on(within.inside(windows.chunk_left_out)),
    "chunks exchanged": on(within.inside(windows.chunks_exchanged)),
    "a mean of a chunk": on(within.inside(windows.another_reduction)),
    "another divisor of a chunk": on(within.inside(windows.another_loss_scale)),
    "another bound on one rank": on(within.inside(windows.another_number("left", lambda rng, n: n + 1)), alone=True),
}
# of programs that keep copies of parameters
KEPT: dict[str, Mutation] = {
    "a copy never written": on(kept.never_written),
    "a copy of another value": on(kept.of_another_value),
    "a copy made before the step": on(kept.before_the_step),
    "copies exchanged": on(kept.exchanged),
    "another column's copy read": on(kept.of_another_column),
}

CODED: dict[str, Mutation] = {
    "another codec": on(coded.another_codec),
    "another divisor of messages": on(coded.another_divisor),
    "another message": on(coded.another_message),
    "a message of another leaf": on(coded.another_leaf),
    "messages exchanged": on(coded.messages_exchanged),
    "a message never sent": on(coded.never_sent),
    "messages over another axis": on(coded.sent_over_another_axis),
    "messages sent in another way": on(coded.sent_in_another_way),
    "a message read before it came": on(coded.read_before_it_came),
    "stale codes": on(coded.stale_codes),
    "another message sent": on(coded.sent_as_it_was),
    "messages of other ranks": on(coded.one_rank_more),
    "added up again": on(coded.coded_twice),
    "exact for a message": on(coded.exact_instead),
    "own message alone": on(coded.own_part_alone),
    "another codec on one rank": on(coded.another_codec, alone=True),
    "an error not added": on(feedback.not_added),
    "an error added twice": on(feedback.added_twice),
    "an error never written": on(feedback.never_written),
    "an error of another leaf": on(feedback.of_another_leaf),
    "an error of another code": on(feedback.of_another_code),
    "all kept as an error": on(feedback.kept_whole),
    "another divisor on one rank": on(coded.another_divisor, alone=True),
}

# of any program
ANY: dict[str, Mutation] = {
    "drop a wait": on(timing.drop_wait),
    "repeat a wait": on(timing.repeat_wait),
    "wait late": on(timing.wait_late),
    "settle late": on(timing.settle_late),
    "settles exchanged": on(timing.exchange_settles),
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
    # which segment, reference and range
    "wrong segment": on(records.wrong_segment),
    "exchange writes": on(records.exchange_writes),
    "exchange reads of two ops": on(records.exchange_reads_of_two),
    "drop or repeat a reference": on(records.drop_reference),
    "microbatch bounds": on(records.batch_bounds),
    "shift a range": on(records.shift_range),
    "cut a range at its padding": on(records.cut_padding),
    "cut a range in a leaf": on(records.cut_leaf),
    "own slice or whole": on(records.toggle_mine),
    "other shape": on(records.other_shape),
    "overwrite a part": on(records.overwrite_part),
    # transfers and order
    "gather another bucket": on(records.gather_another),
    "gather what varies": on(records.gather_varying),
    "wrong mode": on(records.wrong_mode),
    "reduce another buffer": on(records.reduce_another),
    "read after the update": on(records.norm_late),
    "exchange two ops": on(records.exchange_ops),
    "move an op": on(records.move_op),
    "free or wait for another": on(records.wrong_free),
    "drop a chain of ops": on(records.drop_chain),
    # names, attributes, forms, ranks
    "wrong metric": on(records.wrong_metric),
    "wrong attribute": on(records.wrong_attribute),
    "wrong dtype": on(records.wrong_dtype),
    "wrong kind": on(records.wrong_kind),
    "wrong geometry": on(records.toggle_shard),
    "drop a record": on(records.drop_buffer),
    "wrong world": on(records.wrong_world),
    "one rank's record": on(records.shift_range, alone=True),
    "another rank's program": records.another_ranks_program,
    # memory
    "overlap by one element": on(room.overlap_by_one),
    "batch over what is in use": on(room.batch_over),
    "metric over what is in use": on(room.metric_over),
    "exchange places": on(room.exchange_places),
    "grow a workspace": on(room.grow_workspace),
    "small workspace": on(room.small_workspace),
    "lost workspace": on(room.lost_workspace),
    "lost place": on(room.lost_place),
    # inside a segment
    "exchange operands": on(within.inside(within.exchange_operands)),
    "wrong operand": on(within.inside(within.wrong_operand)),
    "exchange branches": on(within.inside(within.exchange_branches)),
    "wrong literal": on(within.inside(within.wrong_literal)),
    "exchange literals": on(within.inside(within.exchange_literals)),
    "wrong view": on(within.inside(within.wrong_view)),
    "drop a cast": on(within.inside(within.drop_cast)),
    "wrong cast": on(within.inside(within.wrong_cast)),
    "reorder a cast": on(within.inside(within.reorder_cast)),
    "drop a node": on(within.inside(within.drop_node)),
    "repeat a node": on(within.inside(within.repeat_node)),
    "constant for a value": on(within.inside(within.constant_value)),
    "drop a write": on(within.inside(within.drop_write)),
    "exchange destinations": on(within.inside(within.exchange_destinations)),
    "write into a view": on(within.inside(within.write_into_view)),
    "write again": on(within.inside(within.write_again)),
    "exchange results": on(within.inside(within.exchange_results)),
    "wrong result": on(within.inside(within.wrong_result)),
    "one rank's segment": on(within.inside(within.wrong_literal), alone=True),
}

KINDS: dict[str, Mutation] = {**ANY, **ROLES, **HIERARCHY, **MOVES, **AXES, **CODED, **WINDOWS, **KEPT}
