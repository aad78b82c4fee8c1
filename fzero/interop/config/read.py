"""read: the text of a configuration as a document, as people keep such files.

JSON may have comments (`//`, `#`, `/* */`), commas at the end of a block, and the odd spaces that web pages put into
text. YAML is read by PyYAML's safe loader, if it is installed. A key that comes twice is refused: one would be lost.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fzero.errors import ConfigError

_ODD = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000\ufeff"
_TEXT = r'(?P<text>"(?:[^"\\\n]|\\.)*"?)'  # what does not end is taken once, and not looked for again at every quote
_COMMENTS = re.compile(rf"{_TEXT}|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|[{_ODD}]", re.DOTALL)
_LAST_COMMAS = re.compile(rf"{_TEXT}|,(?=\s*[\]}}])")
MOST_BYTES = 16 << 20  # of a file
MOST_VALUES = 100_000  # in a file of YAML, whose aliases may repeat a few without end
_FIXES = {"True": "true", "False": "false", "None": "null", "'": '"', "\u201c": '"', "\u201d": '"'}


def read(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(a name for errors, the document) of a file or a mapping. A file is JSON, unless it is named .yaml or .yml.

    Raises ConfigError for what is no such document, with its line, its column and the character there.

    >>> read({"fp16": {"enabled": True}})
    ('config', {'fp16': {'enabled': True}})
    """
    if isinstance(source, Mapping):
        return "config", {str(name): value for name, value in source.items()}
    if not isinstance(source, str | PathLike):
        raise ConfigError(f"config: is {type(source).__name__}: needed a file's name or a block of keys")
    path = Path(source)
    if not path.is_file():  # a pipe or a device may never end
        raise ConfigError(f"{path}: {_no_file(path)}")
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path}: has {path.stat().st_size:,} bytes, which no configuration needs")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: byte {error.start} is {byte:#x}: it is not UTF-8 text") from None
    document = (from_yaml if path.suffix in (".yaml", ".yml") else from_json)(text, str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: holds {type(document).__name__}, but a configuration is a block of keys")
    return str(path), document


def _no_file(path: Path) -> str:
    """What a path is that is not a file, and for a folder which of its files may be meant."""
    if not path.is_dir():
        return "is not a file: a pipe or a device may never end" if path.exists() else "there is no such file"
    meant = sorted(file.name for file in path.iterdir() if file.suffix in (".json", ".yaml", ".yml"))
    shown = f"{', '.join(meant[:4])}{', ...' if len(meant) > 4 else ''}" or "no .json, .yaml or .yml"
    return f"is a folder: give one of its files. It has {shown}"


def from_json(text: str, where: str = "config") -> Any:
    """The value of JSON text with comments, commas at the end and odd spaces. Raises ConfigError.

    >>> from_json('{"a": 1, // one\\n "b": [2,],}')
    {'a': 1, 'b': [2]}
    >>> from_json('{"fp16": {"enabled": True}}')
    Traceback (most recent call last):
    fzero.errors.ConfigError: config: line 1, column 22: 'T' cannot stand here. Write true
    """
    plain = _LAST_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))

    def constant(word: str) -> Any:
        raise ConfigError(f"{where}: {word} is no number in JSON. Write a number")

    try:
        return json.loads(plain, object_pairs_hook=lambda pairs: _once(pairs, where), parse_constant=constant)
    except json.JSONDecodeError as error:
        rest = plain[error.pos :]
        fix = next((good for bad, good in _FIXES.items() if rest.startswith(bad)), None)
        shown = f"{rest[0]!r} cannot stand here" if rest.strip() else "the text ends too early"
        told = f". Write {fix}" if fix else f" ({error.msg})"
        raise ConfigError(f"{where}: line {error.lineno}, column {error.colno}: {shown}{told}") from None
    except RecursionError:
        raise ConfigError(f"{where}: its blocks lie too deep in one another") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error}") from None  # an integer of thousands of digits


def from_yaml(text: str, where: str = "config") -> Any:
    """The value of YAML text with odd spaces, as the safe loader reads it. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{where}: YAML needs PyYAML: pip install pyyaml. Or give the document as a dict") from None

    class Loader(yaml.SafeLoader):
        """The safe loader, which refuses a key that comes twice."""

    def block(loader: Any, node: Any) -> dict[str, Any]:
        loader.flatten_mapping(node)
        made = loader.construct_object
        if wrong := next((name for name, _ in node.value if not isinstance(name, yaml.ScalarNode)), None):
            problem = "a key is a block or a list. Write a name"
            raise yaml.constructor.ConstructorError(None, None, problem, wrong.start_mark)
        return _once([(made(name, deep=True), made(value, deep=True)) for name, value in node.value], where)

    Loader.add_constructor("tag:yaml.org,2002:map", block)
    try:
        loader = Loader(re.sub(f"[{_ODD}]", " ", text))
        document = loader.get_single_node()
        if _repeated(document, {}) > MOST_VALUES:
            raise ConfigError(f"{where}: its aliases stand for more than {MOST_VALUES:,} values, or for themselves")
        return None if document is None else loader.construct_document(document)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}: {at}{error.problem or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: is not YAML: {error}") from None


def _repeated(node: Any, known: dict[int, float]) -> float:
    """The values of a YAML document, those of an alias once for each time that it is used."""
    if node is None or isinstance(node.value, str):
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is counted: a node within itself
        inner = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_repeated(part, known) for part in inner)
    return known[id(node)]


def _blank(found: re.Match[str]) -> str:
    """Text as it stands; anything else as spaces, so that lines and columns stay true."""
    return found["text"] or re.sub(r"[^\n]", " ", found.group())


def _once(pairs: list[tuple[Any, Any]], where: str) -> dict[str, Any]:
    """The block of these pairs. Raises ConfigError for a key that comes twice."""
    counts = Counter(str(name) for name, _ in pairs)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{where}: {twice!r} comes twice in one block. Keep one of them")
    return {str(name): value for name, value in pairs}
