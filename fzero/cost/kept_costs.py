"""kept_costs: figures measured on this machine, kept between runs and agreed on between ranks.

A choice by measurement must not depend on who measures when. Ranks that chose differently would run different programs;
runs that chose differently would have different bits. So

1. a figure is measured once per machine and kept in a file: `$FZERO_CACHE`, else `$XDG_CACHE_HOME/fzero`, else
   `~/.cache/fzero`, one file per kind of figure and machine (CPU, threads, torch). It is written whole, under a lock,
   and its figures stay: of two processes that measure at once, both use the figures that were written first. A file
   that cannot be read counts as empty. One that cannot be written, or lies in a folder that is not this user's alone
   (`fzero.private_folder`), costs a measurement per run.
2. in a world of several ranks, rank 0 puts the figures into the store that the process group was made with. The others
   take them from there, and not from their own files. The first to write wins, with one atomic operation. A rank that
   finds nothing from rank 0 for `PATIENCE` (rank 0 has failed, or traces nothing) proposes its own. So no rank waits
   for ever, and two ranks never hold different figures for one question.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fzero import private_folder
from fzero._torch_compat import product_precision
from fzero.errors import DisagreementError, printable

log = logging.getLogger("fzero")
PATIENCE = timedelta(seconds=15)
MAX_BYTES = 16 << 20  # of a file
MAX_FIGURE = 1e15
NEAR = 4.0  # the factor within which a figure is what it was: others work beside, but the network is the same

Figures = dict[str, float]  # by candidate


@dataclass(frozen=True)
class Costs:
    """The figures of one `kind` for one process.

    measures: False lets nothing run; only the file's figures are known then.
    rank, store: of a world of several ranks; the store is that of its process group.
    known: the figures so far, by question. Only `find` writes it.
    """

    kind: str
    measures: bool = True
    rank: int = 0
    store: Any = None
    known: dict[str, Figures] = field(default_factory=dict)

    def find(self, questions: Sequence[str], measure: Callable[[str], Figures]) -> dict[str, Figures]:
        """The figures for each question that has any, the same on every rank that asks the same questions.

        `measure` gives the figures of one question; it is called for those that the file does not have.
        """
        question = f"fzero/{self.kind}/{_digest(repr(sorted(questions)))}"
        agreed = self._from_store(question) if self.rank > 0 else None
        if agreed is None:
            self.known.update(read(self.kind))
            new = {q: measure(q) for q in questions if q not in self.known} if self.measures else {}
            if new:
                self.known.update(remember(self.kind, new))
            agreed = {q: self.known[q] for q in questions if q in self.known}
            if self.store is not None:
                agreed = _agreed(question, self.store.compare_set(question, "", json.dumps(agreed)))
        return {q: agreed[q] for q in questions if q in agreed}

    def _from_store(self, question: str) -> dict[str, Figures] | None:
        """The figures that another rank has put into the store, or None after `PATIENCE`."""
        if self.store is None:
            return None
        try:
            self.store.wait([question], PATIENCE)
        except RuntimeError:  # DistStoreError: the time is up
            return None
        return _agreed(question, self.store.get(question))


def _agreed(question: str, text: bytes) -> dict[str, Figures]:
    """The figures that a rank put into the store. Raises DisagreementError for what no rank wrote."""
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DisagreementError(
            f"the process group's store has under {question} what fzero did not write ({printable(str(error))[:200]}): "
            "another program writes into it. Start all ranks again, with a MASTER_PORT that others do not use"
        ) from None


def folder() -> Path:
    """The folder of the files."""
    if os.environ.get("FZERO_CACHE"):
        return Path(os.environ["FZERO_CACHE"])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fzero"
    except RuntimeError:  # a user without a home, as in many containers
        return Path(tempfile.gettempdir()) / f"fzero-{os.getuid()}"


def subfolder(path: Path, *, make: bool = False) -> AbstractContextManager[int]:
    """`private_folder.folder` of a folder in that of the files. With `make` both are made, for this user alone."""
    if make:
        with contextlib.suppress(OSError), private_folder.folder(path.parent, make=True):
            pass  # one that is there may be others': what lies in it is not
    return private_folder.folder(path, make=make)


def machine() -> str:
    """The machine that figures hold for: processor, this process's threads, torch and its precision of fp32 matmuls."""
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {product_precision()}"


def path_of(kind: str) -> Path:
    """The file of this machine for a kind of figures."""
    return folder() / f"{kind}-{_digest(machine())}.json"


def read(kind: str) -> dict[str, Figures]:
    """The figures in the file of this machine; none where the file is missing, broken or not this user's alone."""
    path = path_of(kind)
    try:
        with private_folder.folder(path.parent) as place:
            return _read(place, path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        _unused(path.parent, error)
        return {}


def steady(kind: str, question: str, names: Collection[str], judged: Figures) -> Figures:
    """The figures that an earlier run kept for a question, if they have these names, and as long as each of `judged` is
    within a factor NEAR of what was measured now; else none. So runs on one machine choose alike, and measure no more
    than these."""
    before = read(kind).get(question, {})
    near = before.keys() == {*names} and all(
        before[name] <= NEAR * now and now <= NEAR * before[name] for name, now in judged.items()
    )
    return before if near else {}


def remember(kind: str, new: Mapping[str, Figures], anew: bool = False) -> dict[str, Figures]:
    """Adds figures to the file; returns all that it then holds. Figures that it had before stay, but with `anew`."""
    path = path_of(kind)
    try:
        with private_folder.folder(path.parent, make=True) as place, private_folder.locked(place, f"{path.stem}.lock"):
            before = _read(place, path)
            merged = {**before, **new} if anew else {**new, **before}
            text = json.dumps({"machine": machine(), "figures": merged}, indent=1, sort_keys=True)
            private_folder.replace(place, path.name, text.encode())
    except OSError as error:
        _unused(path.parent, error)
        return dict(new)
    return merged


def _read(place: int, path: Path) -> dict[str, Figures]:
    """The figures of a file in an opened folder (`place`, its descriptor)."""
    try:
        content = json.loads(private_folder.read(place, path.name, MAX_BYTES))
        if content["machine"] != machine():
            raise ValueError("another machine's")
        return _checked(content["figures"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("fzero: %s is not what fzero wrote (%s): it is measured again", path, error)
        return {}


@functools.cache  # a process says it once
def _said(text: str) -> None:
    log.warning("%s", text)


def _unused(path: Path, error: OSError) -> None:
    _said(
        f"fzero: figures are measured in every run, for {path} cannot be written, or read ({error.strerror or error})"
    )


def _checked(content: Any) -> dict[str, Figures]:
    """Figures from JSON, checked. Raises ValueError unless each is a number from 0 to `MAX_FIGURE`."""
    if not isinstance(content, dict) or not all(isinstance(figures, dict) for figures in content.values()):
        raise ValueError("no figures by question")
    for question, figures in content.items():
        for name, value in figures.items():
            if type(value) not in (int, float) or not 0 <= value < MAX_FIGURE:
                raise ValueError(f"the figure {value!r:.40} of {name!r:.40} for {question!r:.80}")
    return {question: {name: float(value) for name, value in figures.items()} for question, figures in content.items()}


def _processor() -> str:
    """The processor's name and a digest of its model and flags: virtual machines often hide the model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    fields = dict(line.replace("\t", "").split(":", 1) for line in text.splitlines() if ":" in line)
    identity = [
        fields.get(name, "").strip() for name in ("vendor_id", "cpu family", "model", "stepping", "flags", "Features")
    ]
    return f"{fields.get('model name', platform.machine()).strip()} ({_digest(' '.join(identity))})"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
