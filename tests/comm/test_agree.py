"""Notes between ranks have one size, whatever the names in them."""

from __future__ import annotations

from typing import Any

import pytest

from fzero.comm import agree as notes
from fzero.comm.agree import NOTE_BYTES, Same, agree
from fzero.errors import DisagreementError

LONG = {"long": "w" * 700, "wide": "\u4e00" * 300, "of two lines": "a\nb\tc", "no text": "\udcff\x1b[2J"}


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The notes of rank 1, in the order in which they are asked for; none: it sends what rank 0 sends."""
    queue: list[bytes] = []

    def tell(note: bytes, world_size: int, group: Any) -> list[bytes]:
        return [note[:NOTE_BYTES], (queue.pop(0) if queue else note)[:NOTE_BYTES]]

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
        agree(0, 2, "step 1", "digest 1", None, inputs=lambda: {name: "f32[1]"})


def test_a_failure_of_any_text_is_told(other: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no text"):
        agree(0, 2, "step 1", "", None, ValueError("no text \udcff"))
