"""What compiled kernels demand, as tables: attention backends, FP8 shapes, userbuffers. Imports neither torch nor TE.

Transformer Engine decides these in C++ or at the first step on a GPU; the tables let a plan be refused before it.
Lines of fused_attn.cpp are those of NVIDIA/TransformerEngine at commit 015d346d, the stored version that differs least
from 2.9.0; the answers are those of 2.9.0, compared with its compiled library and its Python (near_cases.py and
compiled_te.py in tests/planner/kernels).
"""
