"""Model shapes: exact parameter counts per rank, FLOPs per token. Pure arithmetic, fast to import.

>>> from superpod.planner import models
>>> model = models.find("llama3_8b")
>>> model.total_parameters()
8030261248
>>> model.parameters(models.Split(tp=8, pp=4), stage=0).embedding
65667072
"""

from __future__ import annotations

from superpod.planner.models.counts import Parameters
from superpod.planner.models.shape import ModelShape
from superpod.planner.models.stages import Split
from superpod.planner.models.table import aliases, find, load, names, unsupported_models

__all__ = ["ModelShape", "Parameters", "Split", "aliases", "find", "load", "names", "unsupported_models"]
