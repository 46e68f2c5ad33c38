"""The command line, ``python -m jax_flash``."""
