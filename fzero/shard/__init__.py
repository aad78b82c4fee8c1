"""shard: how values lie on the ranks of a mesh axis, and which placements each op allows."""

from fzero.shard.rules.given import rule

__all__ = ["rule"]
