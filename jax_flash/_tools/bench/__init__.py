"""``python -m jax_flash bench``."""
