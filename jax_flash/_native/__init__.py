"""The compiled library: where it is, whether this jaxlib can take it, and what it finds on this machine."""
