"""text: damage to a program's text. If the text still parses, verify must accept the program or refuse it by one of its
rules."""

from __future__ import annotations

import random
import re

ODD = (
    "-1",
    "0",
    "1",
    "7",
    "64",
    "999999999999999999999",
    "x",
    "run",
    "wait",
    "per_rank",
    "per=0",
    "per=64",
    "dp=0",
    "->",
)


def damaged(rng: random.Random, text: str) -> str:
    """The text with one to three lines changed: dropped, said twice, swapped, or a word or number of them another."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        line_index = rng.randrange(1, len(lines))
        lines[line_index : line_index + 1] = rng.choice((_dropped, _twice, _swapped, _word, _number, _letter))(
            rng, lines, line_index
        )
    return "\n".join(lines) + "\n"


def _dropped(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    return []


def _twice(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    return [lines[line_index], lines[line_index]]


def _swapped(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    other = rng.randrange(1, len(lines))
    own, lines[other] = lines[line_index], lines[line_index]
    return [own if other == line_index else lines[other]]


def _word(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    """A word becomes one of another line, or an odd one; or is dropped."""
    words = lines[line_index].partition("  # ")[0].split(" ")
    index = rng.randrange(len(words))
    others = rng.choice(lines).partition("  # ")[0].split() or ["0"]
    words[index] = rng.choice((rng.choice(others), rng.choice(ODD), ""))
    return [" ".join(words)]


def _number(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    places = list(re.finditer(r"\d+", lines[line_index].partition("  # ")[0]))
    if not places:
        return [lines[line_index]]
    place = rng.choice(places)
    number = rng.choice((str(int(place[0]) + rng.choice((-64, -1, 1, 64))), rng.choice(ODD)))
    return [lines[line_index][: place.start()] + number + lines[line_index][place.end() :]]


def _letter(rng: random.Random, lines: list[str], line_index: int) -> list[str]:
    line = lines[line_index]
    if not line:
        return [line]
    place = rng.randrange(len(line))
    return [line[:place] + rng.choice(("", rng.choice("abx0:=[] "))) + line[place + 1 :]]
