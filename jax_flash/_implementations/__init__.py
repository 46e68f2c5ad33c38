"""Attention in plain JAX, and which implementation serves a call."""
