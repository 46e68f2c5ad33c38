"""How fast a CUDA kernel can be, from its machine code: no user of the package imports this, and no wheel has it."""
