"""text: damage to a program's text. What parses must be accepted by verify or refused by one of its rules."""

from __future__ import annotations

import random
import re

ODD = ("-1", "0", "1", "7", "64", "999999999999999999999", "x", "run", "wait", "shard", "per=0", "per=64", "dp=0", "->")


def damaged(rng: random.Random, text: str) -> str:
    """The text with one to three lines changed: dropped, said twice, swapped, or a word or number of them another."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(lines))
        lines[at : at + 1] = rng.choice((_dropped, _twice, _swapped, _word, _number, _letter))(rng, lines, at)
    return "\n".join(lines) + "\n"


def _dropped(rng: random.Random, lines: list[str], at: int) -> list[str]:
    return []


def _twice(rng: random.Random, lines: list[str], at: int) -> list[str]:
    return [lines[at], lines[at]]


def _swapped(rng: random.Random, lines: list[str], at: int) -> list[str]:
    other = rng.randrange(1, len(lines))
    mine, lines[other] = lines[at], lines[at]
    return [mine if other == at else lines[other]]


def _word(rng: random.Random, lines: list[str], at: int) -> list[str]:
    """A word becomes one of another line, or an odd one; or is dropped."""
    words = lines[at].partition("  # ")[0].split(" ")
    index = rng.randrange(len(words))
    others = rng.choice(lines).partition("  # ")[0].split() or ["0"]
    words[index] = rng.choice((rng.choice(others), rng.choice(ODD), ""))
    return [" ".join(words)]


def _number(rng: random.Random, lines: list[str], at: int) -> list[str]:
    places = list(re.finditer(r"\d+", lines[at].partition("  # ")[0]))
    if not places:
        return [lines[at]]
    place = rng.choice(places)
    number = rng.choice((str(int(place[0]) + rng.choice((-64, -1, 1, 64))), rng.choice(ODD)))
    return [lines[at][: place.start()] + number + lines[at][place.end() :]]


def _letter(rng: random.Random, lines: list[str], at: int) -> list[str]:
    line = lines[at]
    if not line:
        return [line]
    place = rng.randrange(len(line))
    return [line[:place] + rng.choice(("", rng.choice("abx0:=[] "))) + line[place + 1 :]]
