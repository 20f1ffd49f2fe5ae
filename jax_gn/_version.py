"""The version of the package, and the oldest jax that it runs on (pyproject.toml says the same)."""

import jax

__version__ = "0.1.0"
OLDEST_JAX = (0, 8)


def why_not_jax() -> str | None:
    """Why the installed jax won't do; None: it does."""
    if jax.__version_info__ >= OLDEST_JAX:
        return None
    oldest = ".".join(map(str, OLDEST_JAX))
    return (
        f"jax_gn {__version__} needs jax {oldest} or newer, and jax {jax.__version__} is "
        "installed: write `pip install --upgrade jax jaxlib` (for a GPU `'jax[cuda13]'`)"
    )
