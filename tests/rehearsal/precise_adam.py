"""Adam with the interface of Transformer Engine 2.9's FusedAdam, as Megatron's precision-aware optimizer uses it:
moments of any type, master weights of its own, gradients in `decoupled_grad`.
"""

from __future__ import annotations

from typing import Any

import torch

from superpod.rehearsal.patches import optimizer


def adam_class() -> type:
    """The class."""
    base: Any = optimizer.fused_adam_class()

    class PreciseAdam(base):  # type: ignore[misc, valid-type]
        def __init__(
            self,
            params: Any,
            exp_avg_dtype: torch.dtype = torch.float32,
            exp_avg_sq_dtype: torch.dtype = torch.float32,
            use_decoupled_grad: bool = False,
            master_weights: bool = False,
            **more: Any,
        ) -> None:
            super().__init__(params, **more)
            self.moments = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
            self.use_decoupled_grad, self.master_weights = use_decoupled_grad, master_weights

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    gradient = parameter.decoupled_grad if self.use_decoupled_grad else parameter.grad
                    if gradient is not None:
                        self._one(parameter, gradient, group)

        def _one(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
            state = self.state[parameter]
            master = state.setdefault("master_param", parameter.detach().float().clone())
            if not self.master_weights:
                master = parameter
            exact = {n: state.get(n, torch.zeros_like(master)).float() for n in self.moments}
            optimizer._update(master, gradient.float(), exact, group, decoupled=self.adam_w_mode)
            state |= {name: exact[name].to(kind) for name, kind in self.moments.items()}
            if self.master_weights:
                parameter.copy_(master)

    return PreciseAdam
