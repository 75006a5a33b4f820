"""A callback that writes down the flags that Megatron trains with, and the weights that each forward pass reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_flags
import lightning.pytorch as pl
import torch


class Watch(pl.Callback):
    """Writes `{folder}/watch-RANK.json`: flags, and bad weights of each forward pass; `weights-RANK.pt`: the last ones.

    Args:
        folder: where.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.passes: list[list[str]] = []

    def on_train_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Look at the weights in the middle of each layer: they have been gathered by then."""
        for name, layer in layers(trainer):
            layer.mlp.register_forward_pre_hook(self._look(name, layer))

    def _look(self, name: str, layer: torch.nn.Module) -> Any:
        def look(*_: object) -> None:
            weights = {n: p.detach().float() for n, p in layer.named_parameters() if p.dim() > 1}
            self.passes.append(
                [f"{name}.{n}" for n, p in weights.items() if not torch.isfinite(p).all() or not p.any()]
            )

        return look

    def on_train_end(self, trainer: Any, *_: object) -> None:
        """Write it down. The recorder has gathered the newest parameters before."""
        strategy, rank = trainer.strategy, torch.distributed.get_rank()
        ddp = strategy.megatron_parallel[0].module.ddp_config
        optimizer = strategy.optimizers[0].mcore_optimizer
        first = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        flags = {"ddp": gpu_flags.changed(ddp), "optimizer": gpu_flags.of_optimizer(first.config, ddp)}
        (self.folder / f"watch-{rank}.json").write_text(json.dumps({"flags": flags, "passes": self.passes}))
        weights = {
            f"{name}.{n}": p.detach().float() for name, layer in layers(trainer) for n, p in layer.named_parameters()
        }
        torch.save(weights, self.folder / f"weights-{rank}.pt")


def layers(trainer: Any) -> Iterator[tuple[str, Any]]:
    """The decoder's layers of this rank with their numbers, the same in every layout."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in trainer.strategy.megatron_parallel.modules():
        if isinstance(module, TransformerLayer):
            yield f"layer {module.layer_number}", module
