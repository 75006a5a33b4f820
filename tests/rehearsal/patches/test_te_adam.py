"""The kernels of Transformer Engine's Adam in torch: FP32 parameters as BF16 ones and 16 bits, and what a step does."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from superpod.rehearsal.patches import te_adam  # noqa: E402
from superpod.rehearsal.patches.optimizer import update  # noqa: E402
from superpod.rehearsal.training import cpu_recipe  # noqa: E402

SETTINGS = (1e-2, 0.9, 0.95, 1e-8, 3, 1, 1, 0.1)  # lr, two betas, eps, step, decoupled, corrects, decay
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "bias_correction": True}


def halves(master):
    parameter, remainder = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    te_adam.split_into(parameter, remainder, master)
    return parameter, remainder


def masters():
    torch.manual_seed(7)
    draws = torch.randn(4096) * 10.0 ** torch.randint(-6, 4, (4096,))
    tie = torch.tensor([0x3F808000, 0x3F807FFF, 0x3F808001], dtype=torch.int32).view(torch.float32)
    return torch.cat([draws, tie, -tie, torch.tensor([0.0, 1.0, -1.0])])


def test_two_halves_hold_the_parameter_to_the_last_bit_and_the_first_is_it_rounded():
    master = masters()
    parameter, remainder = halves(master)
    assert torch.equal(te_adam.join(parameter, remainder), master)
    away = parameter != master.bfloat16()  # a tie goes away from zero, where torch takes the even one
    assert set(master[away].view(torch.int32).bitwise_and(0xFFFF).tolist()) <= {0x8000}
    assert away.sum() < 10


def test_a_step_on_two_halves_is_that_on_the_parameter():
    master = masters()
    parameter, remainder = halves(master)
    gradient = torch.randn_like(master).bfloat16()
    first, second = torch.randn_like(master), torch.rand_like(master)
    state = {"exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    te_adam._adam_with_remainders(0, None, [[gradient], [parameter], [first], [second], [remainder]], *SETTINGS)
    update(master, gradient, state, GROUP, decoupled=True)
    assert torch.equal(te_adam.join(parameter, remainder), master)
    assert torch.equal(first, state["exp_avg"])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_a_step_with_whole_masters_rounds_them_into_the_parameter(kind):
    master = masters()
    parameter, gradient = master.to(kind), torch.randn_like(master)
    state = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
    moments = [[tensor.clone()] for tensor in state.values()]
    expected = master.clone()
    update(expected, gradient, state, GROUP, decoupled=True)
    whole = [[master]] if kind is torch.bfloat16 else []
    te_adam._adam(0, None, [[gradient], [parameter], *moments, *whole], *SETTINGS)
    assert torch.equal(parameter, expected.to(kind))


@pytest.mark.parametrize(
    ("available", "offloads", "changed"),
    [
        (True, False, []),
        (False, False, ["use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"]),
        (False, True, []),
    ],
)
def test_without_transformer_engines_python_its_adam_is_switched_off(available, offloads, changed, monkeypatch):
    monkeypatch.setattr(te_adam.source, "is_installed", lambda: available)
    recipe: Any = SimpleNamespace(optim=SimpleNamespace(config=SimpleNamespace(optimizer_cpu_offload=offloads)))
    assert [path.rpartition(".")[2] for path, _, _ in cpu_recipe._optimizer_settings(recipe)] == changed
