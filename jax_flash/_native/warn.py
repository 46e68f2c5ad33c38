"""Warnings of what `import jax_flash` finds wrong and goes on without."""

import logging
import warnings


def warn(text: str) -> None:
    """A warning; where a filter makes errors of warnings, a line in the log: import never fails for them."""
    text = f"jax_flash: {text}"
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        logging.getLogger("jax_flash").warning(text)
