"""BF16 matrix products in FP32: the numbers of torch's own kernels, forward and backward, and other types untouched."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import torch
from superpod.rehearsal import cpu_gemm

def products(dtype):
    torch.manual_seed(1)
    make = lambda *shape: torch.randn(*shape).to(dtype).requires_grad_()
    a, b, c, w = make(5, 64), make(64, 7), make(7), make(9, 64)
    x, y, z = make(3, 4, 32), make(3, 32, 6), make(3, 4, 6)
    results = [a @ b, torch.addmm(c, a, b, beta=0.5, alpha=2), torch.nn.functional.linear(a, w)]
    results += [torch.bmm(x, y), torch.baddbmm(z, x, y, beta=0.0, alpha=0.3)]
    torch.cat([result.flatten() for result in results]).float().square().sum().backward()
    return [*results, *(each.grad for each in (a, b, c, x, y, w))]

before = {dtype: products(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)}
cpu_gemm.use_float32()
cpu_gemm.use_float32()
for dtype, expected in before.items():
    for own, other in zip(products(dtype), expected, strict=True):
        assert own.dtype == other.dtype == dtype and own.shape == other.shape
        tolerance = {torch.bfloat16: 2**-6, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
assert torch.equal(torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 2, dtype=torch.long), torch.full((2, 2), 3))
"""


def test_products_are_those_of_torch_forward_and_backward():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
