"""Configuration files as people keep them: comments, commas, spaces of web pages, keys twice, Python's words."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fzero.errors import ConfigError
from fzero.interop import accelerate_config, ds_config
from fzero.interop.config.read import from_json, from_yaml, read

FILES = Path(__file__).parent / "files"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1, // one\n "b": 2}', {"a": 1, "b": 2}),
        ('{"a": 1, # one\n "b": 2, /* two\n lines */ "c": [3, 4,],}', {"a": 1, "b": 2, "c": [3, 4]}),
        ('{"a": "http://x, y # z /* no */ ,]"}', {"a": "http://x, y # z /* no */ ,]"}),
        ('{"a": "a \\" quote, // and a slash"}', {"a": 'a " quote, // and a slash'}),
        ('\ufeff{\u00a0"a":\u00a01\u3000}', {"a": 1}),
        ('{"a": "b\u00a0c"}', {"a": "b\u00a0c"}),
        ('{"a": 2e8, "b": [], "c": {}, "d": null}', {"a": 2e8, "b": [], "c": {}, "d": None}),
    ],
)
def test_json_as_people_write_it(text: str, value: object) -> None:
    assert from_json(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": True}', "x: line 2, column 7: 'T' cannot stand here. Write true"),
        ("{'a': 1}", 'x: line 1, column 2: "\'" cannot stand here. Write "'),
        ('{"a": None}', "x: line 1, column 7: 'N' cannot stand here. Write null"),
        ("{\u201ca\u201d: 1}", "x: line 1, column 2: '\u201c' cannot stand here. Write \""),
        ('{"a": 1, // one\n "b" 2}', "x: line 2, column 6: '2' cannot stand here (Expecting ':' delimiter)"),
        ('{"a": 1', "x: line 1, column 8: the text ends too early (Expecting ',' delimiter)"),
        ('{"a": {"b": 1, "b": 2}}', "x: 'b' comes twice in one block. Keep one of them"),
        ('{"a": NaN}', "x: NaN is no number in JSON. Write a number"),
        ("[" * 100_000, "x: its blocks lie too deep in one another"),
        ('{"a": /* 1}', "x: line 1, column 12: the text ends too early (Expecting value)"),
    ],
)
def test_what_is_no_json_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_json(text, "x")
    assert str(error.value) == message


def test_yaml_is_read_by_its_safe_loader() -> None:
    pytest.importorskip("yaml")
    assert from_yaml("a:\u00a01\nb:\n\u00a0 c: 'no'\n\u00a0 d: null") == {"a": 1, "b": {"c": "no", "d": None}}
    for text, message in (
        ("a: 1\na: 2", "'a' comes twice in one block"),
        ("a: !!python/object/apply:os.getcwd []", "line 1, column 4: could not determine a constructor"),
        ("a: [1", "expected ',' or ']'"),
    ):
        with pytest.raises(ConfigError, match=message.replace("[", "\\[").replace("]", "\\]")):
            from_yaml(text)


PASTED = [
    ("adam_zero1_pasted.json", "adam_zero1.json"),
    ("fsdp_pasted.yaml", "fsdp.yaml"),
    ("zero2_auto_comments.json", "zero2_auto.json"),
]


@pytest.mark.parametrize(("pasted", "plain"), PASTED)
def test_pasted_files_are_the_plain_ones(pasted: str, plain: str) -> None:
    if plain.endswith("yaml"):
        pytest.importorskip("yaml")
    assert read(FILES / pasted)[1] == read(FILES / plain)[1]


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    for name, text in (("a.yaml", "a: 1\nb: 2\n"), ("a.json", '{"a": 1, "b": 2}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert read(tmp_path / name)[1] == {"a": 1, "b": 2}


def test_what_is_no_configuration_file(tmp_path: Path) -> None:
    for name, content, message in (
        ("list.json", b"[1]", "holds list, but a configuration is a block of keys"),
        ("bytes.json", b'{"a": "\xff"}', "byte 7 is 0xff: it is not UTF-8 text"),
        ("empty.json", b"", "the text ends too early"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read(tmp_path / name)
    with pytest.raises(ConfigError, match=r"none\.json: there is no such file"):
        read(tmp_path / "none.json")


def test_a_folder_is_named_with_its_files(tmp_path: Path) -> None:
    """It was "there is no such file" of a folder that is there."""
    with pytest.raises(ConfigError, match=r"is a folder: give one of its files\. It has no \.json, \.yaml or \.yml"):
        read(tmp_path)
    for name in ("zero2.json", "a.yaml", "train.py"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"is a folder: give one of its files\. It has a\.yaml, zero2\.json$"):
        read(tmp_path)


@pytest.mark.parametrize("translate", [ds_config, accelerate_config])
def test_a_file_that_is_no_json_is_named(translate: Callable[[Path], object], tmp_path: Path) -> None:
    """The name of the file, the line and the column: not a JSONDecodeError of a text that nobody sees."""
    (tmp_path / "zero2.json").write_text('{"train_batch_size": 8,\n "fp16": {"enabled": True}}')
    with pytest.raises(ConfigError) as error:
        translate(tmp_path / "zero2.json")
    assert str(error.value) == f"{tmp_path}/zero2.json: line 2, column 22: 'T' cannot stand here. Write true"


def test_no_text_takes_longer_than_its_length() -> None:
    """Quotes that do not end, comments that do not end, digits without end."""
    began = time.perf_counter()
    for text in ('"a\\' * 100_000, "/*" * 150_000, '{"a": ' + "9" * 5000 + "}", '"' * 300_001, ",\n" * 150_000):
        with pytest.raises(ConfigError):
            from_json(text, "x")
    assert time.perf_counter() - began < 5


def test_aliases_that_stand_for_too_much() -> None:
    pytest.importorskip("yaml")
    levels = "\n".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(40))
    for text, message in (
        (f"a0: &a0 x\n{levels}", "its aliases stand for more than 100,000 values"),
        (f"a0: &a0 x\n{levels}\n? *a40\n: 1", "its aliases stand for more than 100,000 values"),
        ("a: &a [*a]", "or for themselves"),
        ("a: &a [x]\n? *a\n: 1", "line 1, column 4: a key is a block or a list. Write a name"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_yaml(text)
    assert from_yaml("a: &a {b: 1}\nc: {<<: *a, d: 2}") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


def test_a_file_that_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for endless in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a file: a pipe or a device may never end"):
            read(endless)
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match="has 1,073,741,824 bytes, which no configuration needs"):
        read(tmp_path / "large.json")


@pytest.mark.parametrize("source", [[], 3, None])
def test_what_is_neither_a_file_nor_a_block_is_named(source: Any) -> None:
    with pytest.raises(ConfigError, match=f"is {type(source).__name__}: needed a file's name or a block of keys"):
        read(source)
