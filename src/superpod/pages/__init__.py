"""Pictures of plans: self-contained pages and traces, made from what the planner computes."""

GENERATOR = "superpod-recipes"
"""What a file of ours names as its maker, near its start."""
