"""shard: how values lie on the ranks of a mesh axis, and which placements each op allows."""
