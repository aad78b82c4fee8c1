"""runtime: what runs a program. `handlers` is the one table of op kinds; `interpret` drives all ranks in one process,
`execute` one rank over torch.distributed; `collectives` are the two ways bytes move; `reference` is the semantics."""
