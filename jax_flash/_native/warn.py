"""Warnings for problems that `import jax_flash` continues despite."""

import logging
import warnings


def warn(text: str) -> None:
    """Warns; if a filter turns warnings into errors it logs instead, so that an import never fails for them."""
    text = f"jax_flash: {text}"
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        logging.getLogger("jax_flash").warning(text)
