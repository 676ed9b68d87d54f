"""The operations on a CPU: numba compiles them, LLVM's vector instructions carry them, OpenMP shares them out.

`features` says what the processor can do, `jit` compiles and caches, `vectors` and `tiles` are the instructions;
every other file is one operation.
"""
