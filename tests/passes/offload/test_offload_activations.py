"""offload_activations: which values go down, when, and when they come up again."""

from __future__ import annotations

import pytest
from short_programs import lines, shown, written

from fzero.ir.program import Program
from fzero.passes.offload.offload_activations import offload_activations

FORWARD, BACKWARD = "region=r0  phase=forward", "region=r0  phase=backward"
TEXT = f"""
    bucket b0 length=64 layers/0/w[0:64:64]
    bucket b1 length=64 layers/1/w[0:64:64]
    buffer w0 f32[64] param bucket=b0
    buffer w1 f32[64] param bucket=b1
    buffer x f32[64] batch
    buffer a f32[64] activation
    buffer h0 f32[64] activation
    buffer h1 f32[64] activation
    buffer h2 f32[64] activation
    buffer h3 f32[64] activation
    buffer g f32[64] activation
    run x w0[0:64:64] -> h0 a  {FORWARD}  # layer 0
    run h0 w1[0:64:64] -> h1  {FORWARD}
    run h1 -> h2  {FORWARD}
    run h2 -> h3  {FORWARD}
    run h3 -> g  {BACKWARD}
    run g h1 h0 -> g  {BACKWARD}
    run g a h0 -> g  {BACKWARD}
    run g a -> g  {BACKWARD}
"""
RULES = {"layers/0/**": "offload"}


def moved(text: str = TEXT, rules: dict[str, str] | None = None, ahead: int = 1) -> list[str]:
    return shown(offload_activations(written(text), rules or RULES, ahead).ops)


def test_a_layers_values_wait_on_the_host_from_their_last_use_in_the_forward_to_their_first_in_the_backward() -> None:
    """Each is waited for behind the next run; it starts up one run before its use, and all uses read what came up."""
    done = offload_activations(written(TEXT), RULES)
    assert shown(done.ops) == lines(
        """
        run x w0[0:64:64] -> h0 a
        move a -> a.host
        run h0 w1[0:64:64] -> h1
        move h0 -> h0.host
        wait a.host
        run h1 -> h2
        wait h0.host
        run h2 -> h3
        move h0.host -> h0.back
        run h3 -> g
        wait h0.back
        move a.host -> a.back
        run g h1 h0.back -> g
        wait a.back
        run g a.back h0.back -> g
        run g a.back -> g
        """
    )
    assert [(done.buffers[name].space, done.buffers[name].kind) for name in ("a.host", "a.back")] == [
        ("host", "staging"),
        ("device", "staging"),
    ]
    assert {op.why for op in done.ops if op.moves} == {"activations of layer 0"}


def test_ahead_is_how_many_runs_before_its_use_a_value_starts_up() -> None:
    """But not before it is down, however many runs that asks for."""
    later = moved(ahead=2)
    assert later[later.index("move a.host -> a.back") + 1] == "run h3 -> g"
    assert later[later.index("move h0.host -> h0.back") + 1] == "run h2 -> h3"
    for ahead in (4, 6, 7, 9):
        sooner = moved(ahead=ahead)
        assert sooner[sooner.index("wait a.host") + 1] == "move a.host -> a.back"


@pytest.mark.parametrize(
    ("rules", "down"),
    [
        ({"layers/1/**": "offload"}, ["h1"]),
        ({"**": "offload"}, ["a", "h0", "h1"]),
        ({"layers/0/**": "full", "**": "offload"}, ["h1"]),
        ({"layers/0/**": "none", "layers/1/**": "full"}, []),
    ],
)
def test_the_rules_pick_the_layers(rules: dict[str, str], down: list[str]) -> None:
    assert sorted(line.split()[1] for line in moved(rules=rules) if line.endswith(".host") and "move" in line) == down


def test_without_a_rule_that_says_so_the_program_is_itself() -> None:
    before = written(TEXT)
    assert offload_activations(before, {"**": "full"}) is before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("buffer a f32[64] activation", "buffer a f32[64] metric"),
        ("run h1 -> h2", "run h1 a -> h2 a"),  # written twice
        ("run x w0[0:64:64] -> h0 a  region=r0  phase=forward", "run x w0[0:64:64] -> h0 a  region=r0  phase=region"),
        ("run h0 w1[0:64:64] -> h1", "run h0 w1[0:64:64] a[0:8:8] -> h1 a[0:8:8]"),
        ("run h2 -> h3", "run h2 a -> h3"),  # one run before its use in the backward but one
    ],
)
def test_what_stays(old: str, new: str) -> None:
    assert old in TEXT
    assert "move a -> a.host" in moved()
    assert "move a -> a.host" not in moved(TEXT.replace(old, new).replace("run g h1 h0", "run g h1 h0 a"))


def test_three_runs_apart_are_enough_and_two_are_not() -> None:
    used = TEXT.replace("run g h1 h0 -> g", "run g h1 h0 a -> g")
    assert "move a -> a.host" in moved(used.replace("run h1 -> h2", "run h1 a -> h2"))
    assert "move a -> a.host" not in moved(used.replace("run h2 -> h3", "run h2 a -> h3"))


def test_a_use_behind_the_backward_reads_the_value_that_stayed() -> None:
    """An update reads it on the device: it is its last use, and nothing of the backward comes after."""
    program: Program = written(TEXT + "run a -> g  phase=outer")
    assert not [op for op in offload_activations(program, RULES).ops if op.moves and op.reads[0].name == "a"]
