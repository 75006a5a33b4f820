"""Requirements of compiled kernels: attention backends, FP8 shapes, userbuffers. Imports neither torch nor TE.

Transformer Engine checks them in C++, or at the first step on a GPU; with these tables, the planner checks them before.
Line numbers of fused_attn.cpp refer to NVIDIA/TransformerEngine at commit 015d346d, which differs little from 2.9.0.
The results are those of 2.9.0; tests/planner/kernels (near_cases.py, compiled_te.py) compares them with its compiled
library and its Python code.
"""
