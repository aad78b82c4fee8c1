"""planner: one choice over everything that a Spec leaves open: mesh, stage, microbatches, remat and offload.

planned = fzero.plan(spec, params_like, batch_like, world_size=8, hardware="h100")
print(planned)                       # the table of candidates, and each choice with its runner-up
state = fzero.init(params, planned.spec)
"""

from fzero.planner.choose import plan
from fzero.planner.longest import Longest, longest
from fzero.planner.nothing_fits import Alternative, NothingFitsError
from fzero.planner.planned import Planned, Row

__all__ = ["Alternative", "Longest", "NothingFitsError", "Planned", "Row", "longest", "plan"]
