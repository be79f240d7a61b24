"""FlatCake: a flat KV-cache store for LLM serving, DRAM and SSD as peers in one 64-bit address space.

Importing it needs no GPU and no CUDA package, and touches no device, file or environment.
"""

__version__ = "0.1.0.dev0"
