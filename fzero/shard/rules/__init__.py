"""rules: which placements of an op's operands and results its local calls allow; one table for each class of ops."""

from fzero.shard.rules.rule import Rule, Strategy
from fzero.shard.rules.strategies import Unknown, localised, rule_of, strategies

__all__ = ["Rule", "Strategy", "Unknown", "localised", "rule_of", "strategies"]
