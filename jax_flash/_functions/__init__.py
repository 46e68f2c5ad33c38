"""Functions of the user's, of scalars: traced (trace.py), evaluated in plain JAX (plain.py), made programs (program.py)
that CUDA kernels are compiled with (cuda.py) and CPU kernels interpret."""
