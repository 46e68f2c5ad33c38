"""The compiled library: where it is, whether it fits this jaxlib, and what it finds on this machine."""
