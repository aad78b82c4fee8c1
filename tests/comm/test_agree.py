"""agree: notes between ranks have one size, whatever the names in them; what differs is named."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fzero.comm import agree as notes
from fzero.comm.agree import NOTE_BYTES, Same, agree
from fzero.comm.heartbeat import Presence
from fzero.errors import DisagreementError, HangError

LONG = {"long": "w" * 700, "wide": "\u4e00" * 300, "of two lines": "a\nb\tc", "no text": "\udcff\x1b[2J"}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The notes of rank 1, in the order in which they are asked for; none: it sends what rank 0 sends."""
    queue: list[bytes] = []

    def tell(note: bytes, world_size: int, group: Any, num_bytes: int = NOTE_BYTES) -> list[bytes]:
        return [note[:num_bytes], (queue.pop(0) if queue else note)[:num_bytes]]

    monkeypatch.setattr(notes, "tell", tell)
    return queue


def sent(monkeypatch: pytest.MonkeyPatch, *given: Any, **named: Any) -> list[bytes]:
    """The notes that a rank sends for a call of `agree`."""
    kept: list[bytes] = []
    with monkeypatch.context() as patch:
        patch.setattr(notes, "tell", lambda note, *_: [kept.append(note) or note] * 2)
        agree(1, 2, *given, **named)
    return kept


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_a_name_of_any_length_and_kind_is_agreed_on(name: str, other: list[bytes]) -> None:
    same = [Same("what", 0, name), Same("more", 0, name)]
    assert agree(0, 2, f"the whole of {name}", "digest", None, flags=2, same=same) == 2


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_names_that_differ_at_their_end_differ(name: str, other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    other += sent(monkeypatch, f"the whole of {name}2", "digest", None)
    with pytest.raises(DisagreementError, match="do not run the same program") as error:
        agree(0, 2, f"the whole of {name}1", "digest", None)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", LONG.values(), ids=LONG)
def test_inputs_of_any_name_are_compared(name: str, other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    other += sent(monkeypatch, "step 1", "digest 2", None)
    other += [notes._text({name: "f32[2]"})]
    with pytest.raises(DisagreementError, match=r"is f32\[1\] on rank 0, f32\[2\] on rank 1"):
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: [{name: "f32[1]"}])


def test_a_failure_of_any_text_is_told(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no text"):
        agree(0, 2, "step 1", "", None, ValueError("no text \udcff"))


def test_ranks_that_make_different_calls_are_told_so_and_nothing_of_specs(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complaint: "save of ", and advice about specs, params and threads, for a save inside `if rank == 0`."""
    other += sent(monkeypatch, "step 3", "digest", None)
    with pytest.raises(
        DisagreementError, match=r"rank 0: save; rank 1: step 3 of digest\): they make different"
    ) as error:
        agree(0, 2, "save", "", None)
    assert "spec" not in str(error.value)


# --- what differs is named --------------------------------------------------------------------------------------------


def test_the_flags_of_all_ranks_are_united(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence(0, 2)
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: presence)
    other += sent(monkeypatch, "step 1", "digest", None, flags=5)
    assert agree(0, 2, "step 1", "digest", None, flags=2) == 7
    assert presence.where.agreed == presence.call_name == "step 1"
    assert presence.where.inside, "the caller ends the call"
    assert agree(0, 1, "step 2", "digest", None, flags=2) == 2
    assert presence.call_name == "step 1", "alone, none begins"


def test_a_call_that_differs_ends_it(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence(0, 2)
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: presence)
    other += sent(monkeypatch, "step 2", "digest", None, same=[Same("seed", 0, "x")])
    with pytest.raises(DisagreementError, match=r"\(rank 0: step 1 of digest; rank 1: step 2 of digest\)"):
        agree(0, 2, "step 1", "digest", None)
    assert not presence.where.inside


def test_a_rank_that_failed_before_the_call_is_named_to_the_others(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kept: list[bytes] = []
        patch.setattr(notes, "tell", lambda note, *_: [kept.append(note) or note] * 2)
        with pytest.raises(ValueError, match="bad\nbatch"):
            agree(1, 2, "step 1", "digest", None, ValueError("bad\nbatch"))
    other += kept
    with pytest.raises(DisagreementError, match=r"^rank 1 failed before step 1: ValueError: bad\nbatch$"):
        agree(0, 2, "step 1", "digest", None)


@pytest.mark.parametrize(
    ("here", "there", "said", "not_said"),
    [
        ("f32[2, 3]", "f32[2, 4]", "Pad to a multiple", "torch.tensor"),
        ("int 3", "int 4", "Give a number that differs between ranks as a tensor", "Pad"),
        ("f32[2]", "i64[2]", "static values on all ranks, and functions", "Pad"),
        ("static('a[0]')", "static('a[1]')", "static values on all ranks", "Pad"),
        ("float 1.0", "f32[]", "Give a number", "Pad"),
    ],
)
def test_an_input_that_differs_comes_with_its_remedy(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch, here: str, there: str, said: str, not_said: str
) -> None:
    other += sent(monkeypatch, "step 1", "digest 2", None)
    other += [notes._text({"same": "f32[1]", "batch/x": there})]
    with pytest.raises(DisagreementError) as error:
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: [{"same": "f32[1]", "only": "f32[]", "batch/x": here}])
    text = str(error.value)
    assert text.startswith(f"batch/x is {here} on rank 0, {there} on rank 1: ")
    assert said in text
    assert not_said not in text


def test_an_input_behind_many_others_is_named(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"batch['feature {i}']": "f32[128, 128]" for i in range(300)}
    other += [*sent(monkeypatch, "step 1", "digest 2", None), notes._text({**many, "last": "f32[2]"})]
    with pytest.raises(DisagreementError, match=r"^last is f32\[1\] on rank 0, f32\[2\] on rank 1: "):
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: [{**many, "last": "f32[1]"}])


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({"a": "1"}, {"a": "1", "b": "2"}, "b is 2 on rank 1, and rank 0 has none: the same of both"),
        ({"a": "1", "b": "2"}, {"a": "1"}, "b is 2 on rank 0, and rank 1 has none: the same of both"),
        ({"b": "2", "c": "3"}, {"c": "4"}, "c is 3 on rank 0, 4 on rank 1: the same of both"),
    ],
)
def test_an_input_that_a_rank_lacks_is_named(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch, here: dict[str, str], there: dict[str, str], said: str
) -> None:
    other += [*sent(monkeypatch, "init", "digest 2", None), notes._text(there)]
    with pytest.raises(DisagreementError) as error:
        agree(0, 2, "init", "digest 1", None, inputs=lambda: [here], needs="the same of both")
    assert str(error.value) == said


def test_of_a_table_that_is_cut_no_input_is_said_to_be_lacking(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = {f"{i:0150}": "1" for i in range(1000)}
    other += [*sent(monkeypatch, "init", "digest 2", None), notes._text({"first": "1", **many})]
    with pytest.raises(DisagreementError, match=r"^the ranks do not run the same program"):
        agree(0, 2, "init", "digest 1", None, inputs=lambda: [many])


def test_inputs_are_compared_only_if_the_digests_differ(other: list[bytes]) -> None:
    def never() -> dict[str, str]:
        raise AssertionError("it costs time")

    assert agree(0, 2, "step 1", "digest", None, inputs=never) == 0


def test_a_value_is_shared_by_those_that_give_the_same_group(
    other: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [Same("the seed", 3, "1", "Give one."), Same("the role's params", 0, "x", "Copy them.", shown=True)]
    other += 2 * sent(monkeypatch, "step 1", "digest", None, same=[given[0], replace(given[1], among=1, value="y")])
    assert agree(0, 2, "step 1", "digest", None, same=given) == 0, "of two roles"
    with pytest.raises(
        DisagreementError, match=r"^the role's params differs between rank 0 and rank 1: z and y. Copy them.$"
    ):
        agree(0, 2, "step 1", "digest", None, same=[given[0], replace(given[1], among=1, value="z")])
    other += sent(monkeypatch, "step 1", "digest", None, same=[replace(given[0], value="2"), given[1]])
    with pytest.raises(DisagreementError, match=r"^the seed differs between rank 0 and rank 1. Give one.$"):
        agree(0, 2, "step 1", "digest", None, same=given)


def test_a_long_text_keeps_its_beginning_and_its_size() -> None:
    assert notes._within("a\nb", 4) == "a\\nb"
    assert notes._within("x" * 80, 80) == "x" * 80
    short = notes._within("x" * 81, 80)
    assert len(short) == 80
    assert short.startswith("x" * 60 + "... ")


def test_of_inputs_that_a_note_does_not_hold_the_last_is_dropped() -> None:
    text = notes._text({"a": "f32[1]", "b": "f32[2]"})
    assert notes._table(text) == {"a": "f32[1]", "b": "f32[2]"}
    assert notes._table(text[:-1]) == {"a": "f32[1]"}


# --- the gathers ------------------------------------------------------------------------------------------------------


def test_notes_and_tensors_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    presence, waited = Presence(0, 2), list[bool]()
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: presence)

    def all_gather(tensors: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
        waited.append(presence.waits)
        for rank, tensor in enumerate(tensors):
            tensor.copy_(local).add_(rank * (local != 0))

    monkeypatch.setattr(notes, "dist", SimpleNamespace(all_gather=all_gather))
    assert notes.tell(b"ab\0c\0", 3, None) == [b"ab\0c", b"bc\0d", b"cd\0e"]
    assert notes.tell(b"y" * 999, 2, None) == [b"y" * NOTE_BYTES, b"z" * NOTE_BYTES]
    assert [t.tolist() for t in notes.gathered(torch.tensor([4]), 2, None)] == [[4], [5]]
    assert waited == [True] * 3
    assert not presence.waits
    assert notes._rows(2, None) is notes._rows(2, None), "gloo may still hold them"


def test_a_rank_that_does_not_come_to_a_gather_is_an_error_of_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    presence = Presence(0, 2)
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: presence)

    def all_gather(*given: Any, **named: Any) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(notes, "dist", SimpleNamespace(all_gather=all_gather))
    with pytest.raises(HangError, match="The transport said: closed"):
        notes.tell(b"x", 2, None)
    assert not presence.waits


def test_a_process_group_that_was_destroyed_is_named() -> None:
    """It was torch's own error, with the advice to call init_process_group."""
    with pytest.raises(HangError, match=r"^the process group of this state was destroyed.*fzero.load a checkpoint"):
        agree(0, 2, "step 3", "digest", None)


class Store(dist.HashStore):
    """One in which nobody waits without end."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        assert self.asked < 20, "it is asked again and again"
        return bool(super().check(keys))

    def get(self, key: str) -> bytes:
        assert super().check([key]), "it is not there yet"
        return bytes(super().get(key))


def test_the_text_of_rank_0_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length; rank 1 asks before rank 0 has it."""
    store, slept = Store(), list[float]()
    ranks = [Presence(0, 2), Presence(1, 2)]
    current = [1]
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: ranks[current[0]])
    monkeypatch.setattr(notes, "default_store", lambda: store)

    def first(text: str) -> None:
        current[0] = 0
        assert notes.from_first(text, "a plan", 0, 2, None) == text
        current[0] = 1

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 9, "it waits for what is there"
        if len(slept) == 3:
            first("w" * 5000)

    monkeypatch.setattr(notes.time, "sleep", sleep)
    assert notes.from_first("its own", "a plan", 1, 2, None) == "w" * 5000
    assert slept == [notes.POLL_SECONDS] * 3 + [0]
    first("another")
    assert notes.from_first("", "a plan", 1, 2, None) == "another", "of this call"
    assert [presence.where.inside for presence in ranks] == [False, False]
    assert notes.from_first("alone", "a plan", 0, 1, None) == "alone"
    assert ranks[1].call == 2


def test_while_a_heartbeat_runs_a_text_is_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`wait_for` looks in between whether rank 0 is silent."""
    store, slept, presence = Store(), list[float](), Presence(1, 2)
    found: list[bool] = []

    def wait_for(done: Any, what: str) -> None:
        found.append(done(0.1))
        store.set("fzero/first/1", "text")
        found.append(done(0.1))
        assert (what, presence.where.inside) == ("a plan", True)

    monkeypatch.setattr(presence, "wait_for", wait_for)
    monkeypatch.setattr(notes.heartbeat, "of", lambda group: presence)
    monkeypatch.setattr(notes, "default_store", lambda: store)
    monkeypatch.setattr(notes.time, "sleep", slept.append)
    assert notes.from_first("", "a plan", 1, 2, None) == "text"
    assert (found, slept) == ([False, True], [notes.POLL_SECONDS, 0])


def test_the_first_group_of_inputs_that_differs_is_told(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that one of them lacks is told before the numbers of ops, which differ because of it."""
    there = [notes._text({"a": "1", "b": "2"}), notes._text({"op 1": "0.5"})]
    other += [*sent(monkeypatch, "step 1", "digest 2", None), b"\0".join(there)]
    with pytest.raises(DisagreementError, match=r"^b is 2 on rank 1, and rank 0 has none"):
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: [{"a": "1"}, {"op 1": "0.1"}])
    other += [*sent(monkeypatch, "step 1", "digest 2", None), b"\0".join(there)]
    with pytest.raises(DisagreementError, match=r"^op 1 is 0\.1 on rank 0, 0\.5 on rank 1: "):
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: [{"a": "1", "b": "2"}, {"op 1": "0.1"}])
