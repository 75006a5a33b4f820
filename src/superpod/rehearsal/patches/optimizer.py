"""Adam in plain torch with the interface of Transformer Engine's and Apex's FusedAdam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT


def create_fused_adam_class() -> type:
    """Create an AdamW class that stores ``step`` in the parameter group, like TE's and Apex's FusedAdam."""
    import torch

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: ParamsT,
            lr: float = 1e-3,
            bias_correction: bool = True,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            adam_w_mode: bool = True,
            weight_decay: float = 0.0,
            **_: object,
        ) -> None:
            self.adam_w_mode = adam_w_mode
            super().__init__(
                params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
            )

        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for group in self.param_groups:
                if group["params"]:
                    group["step"] = group.get("step", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:  # also without a gradient: Megatron-FSDP saves the state of every rank
                        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    if parameter.grad is not None:
                        update(parameter, parameter.grad, state, group, decoupled=self.adam_w_mode)

    # A checkpoint of Megatron's CPU-offloaded optimizer contains the name of the class.
    FusedAdam.__qualname__ = "FusedAdam"
    globals()["FusedAdam"] = FusedAdam
    return FusedAdam


def update(
    parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], *, decoupled: bool
) -> None:
    """Apply one step of Adam to a parameter in place.

    Args:
        parameter: the parameter.
        gradient: its gradient.
        state: `exp_avg` and `exp_avg_sq`, which are updated in place.
        group: the parameter group with learning rate, betas, `step` and others.
        decoupled: apply weight decay to the parameter (AdamW) instead of the gradient.
    """
    beta1, beta2 = group["betas"]
    correct1 = correct2 = 1.0
    if group["bias_correction"]:
        correct1, correct2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    gradient = gradient.to(parameter.dtype)
    if decoupled:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    else:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    divisor = (state["exp_avg_sq"].sqrt() / correct2**0.5).add_(group["eps"])
    parameter.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / correct1)


@patch(
    "fused-adam",
    target="megatron.core.optimizer: Adam; distrib_optimizer: Adam, HAVE_APEX_OR_TE",
    reason="torch's Adam keeps a 0-dim `step` in the state of each parameter, which the distributed optimizer's "
    "checkpoint cannot shard; TE's keeps it in the group, so that the checkpoint has the keys of a GPU run",
)
def _patch_fused_adam() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    adam = create_fused_adam_class()
    replace(optimizer, Adam=adam, USING_PYTORCH_OPTIMIZER=False)
    replace(distrib_optimizer, Adam=adam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


@patch(
    "optimizer-no-grad",
    target="DistributedOptimizer._set_main_param_and_optimizer_states",
    reason="resuming in fp32 copies into leaf parameters that require gradients; the code path with TE does not",
)
def _patch_no_grad() -> None:
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    original = Optimizer._set_main_param_and_optimizer_states
    replace(Optimizer, _set_main_param_and_optimizer_states=torch.no_grad()(original))


@patch(
    "offloaded-parameters",
    target="HybridDeviceOptimizer._get_sub_optimizer_param_groups",
    reason="it copies only parameters whose is_cuda is true to the host, and fails for the others",
)
def _patch_offloaded_parameters() -> None:
    import torch
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from torch.overrides import TorchFunctionMode

    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    on_gpu = torch.Tensor.is_cuda.__get__  # type: ignore[reportAttributeAccessIssue]

    class OnGpu(TorchFunctionMode):
        def __init__(self, parameters: set[int]) -> None:
            super().__init__()
            self.parameters = parameters

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return id(args[0]) in self.parameters if func == on_gpu else func(*args, **(kwargs or {}))

    def groups(self: Any, offload_fraction: float) -> Any:
        with OnGpu({id(parameter) for group in self.param_groups for parameter in group["params"]}):
            return original(self, offload_fraction)

    replace(HybridDeviceOptimizer, _get_sub_optimizer_param_groups=groups)
