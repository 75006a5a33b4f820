"""Measured kernels: the tables that the time model looks up, between and beyond their points."""

import numpy as np
import pytest

from superpod.planner import hardware
from superpod.planner.timing import kernel_times
from superpod.planner.timing.kernel_times import CHANNELS, FOLDER, HEADS, SEQUENCES, SIDES

TABLES = sorted(path.stem for path in FOLDER.glob("*.csv"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_whole_and_no_kernel_beats_its_peak(name):
    gpu = hardware.gpu(name)
    table = kernel_times.load_table(gpu)
    assert set(table.attention) == set(CHANNELS)
    for precision, grid in table.products.items():
        assert grid.shape == (len(SIDES),) * 3
        large = np.exp(grid[4:, 4:, 4:])
        assert 0.8 < large.min() < large.max() < 9, precision
    for grid in table.attention.values():
        assert grid.shape == (len(SEQUENCES), len(HEADS))
        assert np.exp(grid).min() > 1


@pytest.mark.parametrize("name", hardware.builtin().gpus)
def test_every_gpu_has_times_in_every_precision(name):
    gpu = hardware.gpu(name)
    for precision in gpu.precisions:
        flops = 2 * 8192.0**3
        seconds = float(kernel_times.gemm(gpu, precision, 8192, 8192, 8192))
        assert 0.95 < seconds * gpu.tflops(precision) * 1e12 / flops < 4, precision
    assert kernel_times.chunked_scan(gpu, 1e12) > 1e12 / (gpu.bf16_tflops * 1e12)


def test_between_points_it_is_between_their_values_and_beyond_them_the_edge_holds():
    gpu = hardware.gpu("h100")
    low, middle, high = (float(kernel_times.attention(gpu, s, 32, 128)) for s in (4096, 6000, 8192))
    assert min(low, high) <= middle <= max(low, high)
    assert kernel_times.attention(gpu, 1e6, 32, 128) == kernel_times.attention(gpu, SEQUENCES[-1], 32, 128)
    assert kernel_times.attention(gpu, 4096, 32, 96) == kernel_times.attention(gpu, 4096, 32, 128)


def test_many_shapes_at_once_are_as_one_by_one():
    gpu = hardware.gpu("b200")
    m = np.array([100.0, 1000.0, 8192.0, 300_000.0])
    every = kernel_times.gemm(gpu, "mxfp8", m, 4096, 1024)
    assert np.allclose(every, [kernel_times.gemm(gpu, "mxfp8", one, 4096, 1024) for one in m])
    assert (np.diff(every) > 0).all()


def test_a_gpu_like_another_takes_its_table_over_its_own_peak():
    h100 = hardware.gpu("h100")
    slow = h100.replace(name="mine", calibrated_as="h100", bf16_tflops=h100.bf16_tflops / 2)
    assert kernel_times.load_table(slow) is kernel_times.load_table(h100)
    assert kernel_times.gemm(slow, "bf16", 8192, 8192, 8192) > 1.9 * kernel_times.gemm(h100, "bf16", 8192, 8192, 8192)
