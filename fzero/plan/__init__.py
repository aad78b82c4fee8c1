"""plan: a placement for every leaf of the state, as data. See `layout` for where leaves lie, `memory` for the
account."""
