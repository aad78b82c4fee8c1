"""placement: which axes of a mesh lie inside a node and which cross nodes, from torchrun's environment.

torchrun numbers ranks by node: those of node 0 come first. The last axis of a mesh varies fastest, so its ranks are
neighbours. The link between nodes is the slow one, and the last axis should not cross it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fzero.errors import SpecError
from fzero.ir.mesh import DATA, PIPELINE, Mesh


@dataclass(frozen=True)
class AxisPlace:
    """Where one axis lies.

    lines: the groups of ranks that differ on this axis alone. crossing: how many of them have ranks on several nodes.
    example: the ranks of one line, a crossing one if there is one.
    """

    axis: str
    size: int
    lines: int
    crossing: int
    example: tuple[int, ...]


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of `--mesh`. Raises SpecError for other text.

    >>> parse_mesh("pp=2,dp=4")
    {'pp': 2, 'dp': 4}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        number = int(size) if size.lstrip("-").isdigit() else 0
        if not name.isidentifier() or name in axes or (number < 1 and number != -1):
            raise SpecError(f"--mesh {text}: needed axes as in pp=2,dp=4")
        axes[name] = number
    if list(axes.values()).count(-1) > 1:
        raise SpecError(f"--mesh {text}: one axis may be -1")
    return axes


def mesh_here(text: str, environ: Mapping[str, str]) -> Mesh:
    """The mesh of `--mesh` for torchrun's world, or for the world that it needs where there is no torchrun."""
    world = environ.get("WORLD_SIZE", "")
    return Mesh.of(parse_mesh(text), int(world) if world.isdigit() else None)


def nodes_of(world_size: int, environ: Mapping[str, str]) -> list[int]:
    """The node of every rank. Raises SpecError if the environment does not tell.

    Nodes have LOCAL_WORLD_SIZE ranks each; without the variable there is one node.

    >>> nodes_of(4, {"LOCAL_WORLD_SIZE": "2", "RANK": "3", "GROUP_RANK": "1"})
    [0, 0, 1, 1]
    """
    local = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if local < 1 or world_size % local:
        raise SpecError(
            f"LOCAL_WORLD_SIZE={local} does not divide {world_size} ranks: nodes with different numbers of ranks are "
            "not placed. Start as many on each node (torchrun --nproc-per-node)"
        )
    rank = environ.get("RANK", "")
    node = environ.get("GROUP_RANK", environ.get("NODE_RANK", ""))
    if rank.isdigit() and node.isdigit() and int(rank) // local != int(node):
        raise SpecError(
            f"rank {rank} is on node {node}, and by torchrun's order it is on node {int(rank) // local}: ranks are not "
            "numbered by node. Start them with torchrun, or number the ranks of each node in a row"
        )
    return [rank_ // local for rank_ in range(world_size)]


def places(mesh: Mesh, nodes: Sequence[int]) -> list[AxisPlace]:
    """Where each axis with several ranks lies, the slowest first.

    >>> [(p.axis, p.crossing) for p in places(Mesh((("pp", 2), ("dp", 2))), [0, 0, 1, 1])]
    [('pp', 2), ('dp', 0)]
    """
    found = []
    for axis, size in mesh:
        firsts = [rank for rank in range(mesh.world_size) if size > 1 and not mesh.coordinate(rank, axis)]
        lines = [tuple(mesh.peers(first, axis)) for first in firsts]
        crossing = [line for line in lines if len({nodes[rank] for rank in line}) > 1]
        if lines:
            found.append(AxisPlace(axis, size, len(lines), len(crossing), [*crossing, *lines][0]))
    return found


def fix(mesh: Mesh, nodes: Sequence[int]) -> str:
    """The smallest change that puts the last axis inside a node; "" if it lies there, or if there is `pp` alone:
    it sends least, and neighbours on a node stay neighbours.

    >>> fix(Mesh((("pp", 2), ("dp", 4))), [0, 0, 1, 1, 2, 2, 3, 3])
    'mesh={"pp": 2, "dp_out": 2, "dp": 2} with zero="hsdp", or torchrun --nproc-per-node 4'
    >>> fix(Mesh((("pp", 4),)), [0, 0, 1, 1])
    ''
    """
    found = places(mesh, nodes)
    if [place.axis for place in found] == [PIPELINE] or not found or not found[-1].crossing:
        return ""
    last, local = found[-1], nodes.count(nodes[0])
    wider = f"torchrun --nproc-per-node {_wider(mesh.world_size, last.size, local)}"
    inside = math.gcd(last.size, local)
    if last.axis not in DATA or "dp_out" in mesh or inside == 1:
        swapped = _swapped(mesh, last, local)
        return f"{swapped}, or {wider}" if swapped else wider
    axes = {name: size for name, size in mesh if name != last.axis}
    text = _text({**axes, "dp_out": last.size // inside, last.axis: inside})
    return f'{text} with zero="hsdp", or {wider}'


def _wider(world_size: int, size: int, local: int) -> int:
    """The fewest ranks on each node, not fewer than now, that hold whole lines of `size`.

    >>> _wider(12, 3, 4)
    6
    """
    return next(n for n in range(size, world_size + 1, size) if n >= local and world_size % n == 0)


def _swapped(mesh: Mesh, last: AxisPlace, local: int) -> str:
    """The mesh with `pp` before an axis that fits a node; "" where that does not help."""
    others = {name: size for name, size in mesh if name != last.axis and size > 1}
    fits = [name for name, size in others.items() if local % size == 0]
    if last.axis != PIPELINE or not fits:
        return ""
    return _text(
        {last.axis: last.size, **{n: s for n, s in others.items() if n != fits[-1]}, fits[-1]: others[fits[-1]]}
    )


def _text(axes: Mapping[str, int]) -> str:
    return "mesh={" + ", ".join(f'"{name}": {size}' for name, size in axes.items()) + "}"
