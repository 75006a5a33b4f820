"""Transformer Engine's compiled library asked on a CPU: `nvte_get_fused_attn_backend` of 2.9.0 over stand-in libraries.

The answers in compiled_answers.csv were made so. To make them again, or to compare as many more as wanted:

    pip download --no-deps transformer_engine_cu12==2.9.0 && unzip -q transformer_engine_cu12-2.9.0-*.whl -d /tmp/te
    LIBRARY=/tmp/te/transformer_engine/wheel_lib/libtransformer_engine.so STUBS=/tmp/te/stubs
    python -m tests.planner.kernels.compiled_te stubs $LIBRARY $STUBS
    LD_LIBRARY_PATH=$STUBS python -m tests.planner.kernels.compiled_te compare $LIBRARY $STUBS 600000
    LD_LIBRARY_PATH=$STUBS python -m tests.planner.kernels.compiled_te near $LIBRARY $STUBS

It needs gcc, nm and readelf. No GPU, no CUDA: the stand-ins say which GPU and which cuDNN there is, nothing else.
"""

from __future__ import annotations

import csv
import ctypes
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from superpod.planner.kernels.fused_attention import FusedAttention, fused_backend
from tests.planner.kernels import near_cases

ANSWERS = Path(__file__).with_name("compiled_answers.csv")
ARCHITECTURES = (80, 86, 89, 90, 100, 103, 110)
DTYPES = {"fp32": 4, "fp16": 5, "bf16": 6, "fp8": 7}
LAYOUTS = (
    *("sb3hd", "sbh3d", "sbhd_sb2hd", "sbhd_sbh2d", "sbhd_sbhd_sbhd", "bs3hd", "bsh3d", "bshd_bs2hd", "bshd_bsh2d"),
    *("bshd_bshd_bshd", "t3hd", "th3d", "thd_t2hd", "thd_th2d", "thd_thd_thd", "sbhd_bshd_bshd", "bshd_sbhd_sbhd"),
    *("thd_bshd_bshd", "thd_sbhd_sbhd", "paged_kv_bshd_bshd_bshd", "paged_kv_bshd_sbhd_sbhd"),
    *("paged_kv_sbhd_bshd_bshd", "paged_kv_sbhd_sbhd_sbhd", "paged_kv_thd_bshd_bshd", "paged_kv_thd_sbhd_sbhd"),
)
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
SOFTMAXES = ("vanilla", "off-by-one", "learnable")
CUDNNS = (
    *(8800, 8900, 8902, 8903, 8906, 8907, 90000, 90100, 90201, 90300, 90500, 90600, 90700, 90701, 90900),
    *(91000, 91001, 91002, 91100, 91300, 91301, 91400, 91500, 91800, 92000),
)
STAND_INS = {
    "cudaGetDevice": "int cudaGetDevice(int*d){*d=te_dev;return 0;}",
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int*n){*n=16;return 0;}",
    "cudaGetDeviceProperties_v2": (  # offsets of major and minor in cudaDeviceProp of CUDA 12
        "int cudaGetDeviceProperties_v2(char*p,int d)"
        "{memset(p,0,1032);*(int*)(p+360)=te_sm[d]/10;*(int*)(p+364)=te_sm[d]%10;return 0;}"
    ),
    "cudaGetDriverEntryPoint": (  # a context that exists
        "static int ctx(void**c){*c=buf;return 0;}"
        "int cudaGetDriverEntryPoint(const char*n,void**f,unsigned long long g,int*r)"
        "{*f=(void*)ctx;if(r)*r=0;return 0;}"
    ),
    "cudnnGetVersion": "unsigned long cudnnGetVersion(void){return te_cudnn;}",
    "__cudaRegisterFatBinary": "void*__cudaRegisterFatBinary(void*a){return buf;}",
}
OWN = {"libcudart.so.12": "int te_dev=0;int te_sm[16];", "libcudnn.so.9": "unsigned long te_cudnn=0;"}


def write_stubs(library: Path, folder: Path) -> None:
    """Compile a stand-in for every NVIDIA library that the library needs, with the functions that it takes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = re.findall(r"U (\w+)@+(lib\S+)", subprocess.check_output(["nm", "-D", library], text=True))
    needed = re.findall(r"\[(libcu\S+)\]", subprocess.check_output(["readelf", "-d", library], text=True))
    for name in needed:
        functions = [function for function, source in taken if source == name]
        code = [STAND_INS.get(f, f"long {f}(){{return 0;}}") for f in functions]
        source = folder / f"{name}.c"
        source.write_text("\n".join(["#include <string.h>", "static char buf[4096];", OWN.get(name, ""), *code]))
        source.with_suffix(".map").write_text(f"{name} {{ global: *; }};\n")
        flags = [f"-Wl,-soname,{name}", f"-Wl,--version-script={source.with_suffix('.map')}"]
        subprocess.check_call(["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", folder / name, source, *flags])


def asker(library: Path, folder: Path) -> Callable[[FusedAttention], int]:
    """A function that asks the compiled library. The process needs LD_LIBRARY_PATH=`folder` from its start."""
    runtime, cudnn = (ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in OWN)
    function = ctypes.CDLL(str(library), mode=os.RTLD_LAZY).nvte_get_fused_attn_backend
    sizes, windows = [ctypes.c_size_t] * 6, [ctypes.c_int64] * 2
    function.argtypes = [ctypes.c_bool, *[ctypes.c_int] * 6, ctypes.c_float, *sizes, *windows, ctypes.c_bool]
    function.restype = ctypes.c_int
    names = (ctypes.c_int * 16).in_dll(runtime, "te_sm")
    for number, sm in enumerate(ARCHITECTURES):
        names[number] = sm

    def ask(a: FusedAttention) -> int:
        ctypes.c_int.in_dll(runtime, "te_dev").value = ARCHITECTURES.index(a.sm)
        ctypes.c_ulong.in_dll(cudnn, "te_cudnn").value = a.cudnn
        os.environ.pop("NVTE_FUSED_ATTN_BACKEND", None)
        if a.wanted is not None:
            os.environ["NVTE_FUSED_ATTN_BACKEND"] = str(a.wanted)
        dtype, layout = DTYPES[a.dtype], LAYOUTS.index(a.qkv_layout)
        kinds = (BIASES.index(a.bias), MASKS.index(a.mask), SOFTMAXES.index(a.softmax))
        shape = (a.heads, a.groups, a.seq_q, a.seq_kv, a.head_qk, a.head_v, a.window_left, a.window_right)
        return function(a.is_training, dtype, dtype, layout, *kinds, a.dropout, *shape, a.max_logit)

    return ask


def draws(seed: int) -> Iterator[FusedAttention]:
    """Layers at random, so that about a third has a kernel."""
    rng = random.Random(seed)

    def mostly(usual: tuple[Any, ...], all_: tuple[Any, ...], share: float) -> Any:
        return rng.choice(usual if rng.random() < share else all_)

    while True:
        seq, head = rng.choice((64, 100, 128, 512, 2048, 4096, 2**20)), rng.choice((36, 64, 72, 128, 192, 256, 512))
        mla = rng.random() < 0.15
        heads = rng.choice((8, 16, 64))
        yield FusedAttention(
            sm=mostly((80, 90, 100, 103), ARCHITECTURES, 0.8),
            cudnn=mostly(CUDNNS[-8:], CUDNNS, 0.7),
            is_training=rng.random() < 0.8,
            dtype=mostly(("bf16",), tuple(DTYPES), 0.7),
            qkv_layout=mostly(("sbhd_sbhd_sbhd", "thd_thd_thd", "bshd_bshd_bshd"), LAYOUTS, 0.7),
            bias=mostly(("no_bias",), BIASES, 0.8),
            mask=mostly(("causal", "padding_causal"), MASKS, 0.5),
            softmax=mostly(("vanilla",), SOFTMAXES, 0.8),
            dropout=mostly((0.0,), (0.1,), 0.9),
            heads=heads,
            groups=heads if rng.random() < 0.5 else rng.choice((1, 2, 8)),
            seq_q=seq,
            seq_kv=mostly((seq,), (128, 4096), 0.85),
            head_qk=192 if mla else head,
            head_v=128 if mla else mostly((head,), (64, 128, 512), 0.85),
            window_left=mostly((-1,), (0, 128), 0.75),
            window_right=mostly((0,), (-1, 64), 0.8),
            max_logit=rng.random() < 0.05,
        )


def main(verb: str, library: Path, folder: Path, count: int = 0) -> None:
    """`stubs` writes the stand-ins, `compare` asks `count` times, `answers` writes `count` rows of the CSV, `near`
    near_kernels.csv."""
    if verb == "stubs":
        write_stubs(library, folder)
        return
    if verb == "near":
        near = itertools.islice(near_cases.kernel_layers(1), 60_000)
        kept = near_cases.choose_near(near, near_cases.KERNEL_TABLES, near_cases.kernel_answer)
        ask_it = asker(library, folder)
        near_cases.write(near_cases.KERNEL_ANSWERS, [(layer, str(ask_it(layer))) for layer in kept])
        return
    ask, drawn = asker(library, folder), draws(1)
    layers = [(layer, ask(layer)) for layer, _ in zip(drawn, range(count), strict=False)]
    if verb == "answers":
        names = [f.name for f in fields(FusedAttention) if f.name != "wanted"]
        with ANSWERS.open("w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow([*names, "backend"])
            writer.writerows([*(getattr(layer, name) for name in names), answer] for layer, answer in layers)
    wrong = [(layer, answer) for layer, answer in layers if fused_backend(layer) != answer]
    kernels = sum(answer >= 0 for _, answer in layers)
    print(f"{len(layers)} layers, {kernels} with a kernel, {len(wrong)} answered otherwise")
    for layer, answer in wrong[:5]:
        print(answer, layer)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
