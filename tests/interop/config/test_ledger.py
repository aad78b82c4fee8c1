"""A document beside a table: each leaf once, every refusal in one error, and a suggestion for a slip."""

import pytest

from fzero.errors import ConfigError
from fzero.interop.config.config_keys import COUNT, Of, Verdict, is_off, keys, one_of, table
from fzero.interop.config.ledger import Ledger, nearest

HONOURED, ALWAYS, HINT, REFUSED, REMOVED = Verdict
TABLE = table(
    keys("", HONOURED, "the steps", auto=True, steps=Of(COUNT, 3)),
    keys("", HONOURED, "a word", word="a"),
    keys("fp16", HONOURED, "narrow", enabled=False),
    keys("", HINT, "no number", bucket=5),
    keys("zero", REFUSED, "not here", "take it out", enabled=False, depth=2, loud=True),
    keys("", REMOVED, "gone", amp={}),
)


def ledger(document: dict, auto: dict | None = None, aliases: dict | None = None) -> Ledger:
    return Ledger("x.json", document, TABLE, auto, aliases)


def refusals(
    document: dict, auto: dict | None = None, take: tuple[str, ...] = ("steps", "word", "fp16.enabled"), **more: dict
) -> list[str]:
    book = ledger(document, auto, **more)
    for path in take:
        book.take(path)
    try:
        book.close()
    except ConfigError as error:
        return [text for _, text in error.refusals]
    return []


def test_values_defaults_and_lines() -> None:
    book = ledger({"steps": 7.0, "fp16": {}, "bucket": 9})
    assert [book.take(path) for path in ("steps", "word", "fp16.enabled")] == [7, "a", False]
    assert type(ledger({"steps": 7.0}).take("steps")) is int
    assert book.close() == (("steps", "7.0", "the steps"), ("bucket", "9", "nothing: no number"))


def test_all_refusals_come_in_one_error() -> None:
    document = {"stepz": 1, "word": 3, "zero": {"depth": 4, "enabled": True}, "amp": {"enabled": True}, "fp16": True}
    assert refusals(document) == [
        "stepz = 1: there is no such key. Did you mean 'steps'?",
        'fp16 = true: needed a block of keys. Write {"enabled": ...}',
        "word = 3: needed text",
        "zero.enabled = true: not here. Take it out",
        "zero.depth = 4: not here. Take it out",
        'amp = {"enabled": true}: gone',
    ]
    with pytest.raises(ConfigError, match=r"x\.json: one key is in the way\n  other = 1: there is no such key"):
        ledger({"other": 1}).close()


def test_default_and_off_are_accepted() -> None:
    for document in (
        {"zero": {"depth": 2}}, {"zero": {"enabled": False, "depth": 9}}, {"amp": {"enabled": False}}, {"zero": {}},
        {"zero": {"loud": True}}, {"amp": False}, {"amp": None}, {"zero": {"depth": 9}},
    ):  # fmt: skip
        assert refusals(document) == [], document
    assert refusals({"zero": {"enabled": True, "loud": False}})[1].startswith("zero.loud = false: not here")
    assert is_off(1, 1)
    assert not is_off(True, 1)
    assert not is_off(1, True)
    assert not is_off(False, True)
    assert is_off([], None)


def test_auto_is_resolved_from_what_is_given_or_refused() -> None:
    assert ledger({"steps": "auto"}, {"steps": 9}).take("steps") == 9
    assert ledger({}, {"steps": 9}).take("steps") == 9
    assert ledger({"steps": "auto"}).take("steps", auto=None) == 3
    assert refusals({"steps": "auto"}) == [
        "steps = \"auto\": nothing says what auto is. Give auto={'steps': ...}, or write the value"
    ]
    assert refusals({"fp16": {"enabled": "auto"}})[0].endswith("Write true or false, or take it out")
    assert refusals({"bucket": "auto"}) == []
    assert refusals({"steps": 4}, {"steps": 5})[0].startswith("steps = 4: auto= gives 5, but the document says another")
    assert refusals({}, {"stepz": 5}) == ["stepz = 5: auto= gives it, but there is no such key. Did you mean 'steps'?"]
    assert refusals({}, {"bucket": 5}) == ["bucket = 5: auto= gives it, but nothing reads it. Take it out of auto="]
    assert refusals({}, {"steps": "nine"})[0] == 'steps = "nine": needed a whole number from 1 to 2**40'


def test_values_of_another_kind() -> None:
    assert refusals({"steps": "8"}) == ['steps = "8": needed a whole number from 1 to 2**40. Write 8 without quotes']
    assert refusals({"steps": True})[0] == "steps = true: needed a whole number from 1 to 2**40"
    assert refusals({"fp16": {"enabled": 1}})[0] == "fp16.enabled = 1: needed true or false. Write true"
    assert refusals({"steps": "1e3"})[0].endswith("Write 1.0e+3 without quotes"), "unquoted, YAML takes 1e3 for text"
    assert refusals({"fp16": {"enabled": "True"}})[0].endswith("Write true without quotes")
    assert refusals({"bucket": "many"})[0] == 'bucket = "many": needed a whole number >= 0'
    assert one_of(0, 1).fits(1.0)
    assert not one_of(0, 1).fits(True)
    assert not one_of("a").fits([])


def test_two_names_of_one_key() -> None:
    assert ledger({"half": {"enabled": True}}, aliases={"half": "fp16"}).take("fp16.enabled") is True
    assert refusals({"half": {}, "fp16": {}}, aliases={"half": "fp16"}) == [
        "half = {}: is another name of 'fp16', which is given too. Keep one of them"
    ]


def test_a_key_that_nobody_reads_or_two_read_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="nobody reads word"):
        ledger({"word": "b"}).close()
    book = ledger({})
    book.take("word")
    with pytest.raises(AssertionError):
        book.take("word")
    with pytest.raises(AssertionError):
        table(keys("", HINT, "x", a=1), keys("", HINT, "y", a=2))


def test_suggestions() -> None:
    known = ["zero.stage", "zero.sub.size", "fp16.enabled", "bf16.enabled", "lr"]
    assert nearest("zero.stge", known) == "Did you mean 'zero.stage'?"
    assert nearest("zero.sbu", known) == "Did you mean 'zero.sub'?"
    assert nearest("stage", known) == "Did you mean 'zero.stage'?"
    assert nearest("fp16.zero", ["fp16.enabled", "zero.stage"]) == "Did you mean 'zero'?", "a block elsewhere"
    assert nearest("ZERO", known) == "Did you mean 'zero'?"
    assert nearest("rl", known) == "Did you mean 'lr'?"
    assert nearest("nothing_like_it", known) == ""
