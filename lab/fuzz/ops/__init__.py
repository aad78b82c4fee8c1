"""ops: the table of expressions, by group. A row is a name and a function of a `Draw` that gives lines of a loss.

Lines after "!" work in place. A line of a row need not be valid: it is run in eager PyTorch when it is drawn, and drawn
again where that raises.
"""
