"""Triton kernels, one file per operation; each has the implementation of its operation for CUDA, and `variants`.

With TRITON_INTERPRET=1 in the environment, read when a kernel's module is imported, kernels run on tensors of the CPU,
in Triton's interpreter: slowly, and with wrong arithmetic in bfloat16 and float8.
"""

import os

# Fusing is what Triton did before it asked; said here, it does not warn.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
