"""jax_gn's CUDA module; `import jax_gn` finds it by itself."""

import importlib.metadata

__version__ = importlib.metadata.version(__name__.replace("_", "-"))
