"""GroupNorm for JAX as fused kernels: `jax_gn.group_norm` and its derivatives."""

from typing import TYPE_CHECKING

from ._version import __version__, why_not_jax

if TYPE_CHECKING or why_not_jax() is None:
    from ._ffi import disabled_checks
    from ._group_norm import group_norm, instance_norm
    from ._plan import BackwardPlan, DeviceLimits, ForwardPlan, plan_backward, plan_forward
    from ._sharding import partitioning
else:

    def __getattr__(name: str):
        """Every use is refused, but `python -m jax_gn.check` can still be asked."""
        if name in __all__:
            raise ImportError(why_not_jax())
        raise AttributeError(f"module 'jax_gn' has no attribute {name!r}")


__all__ = [
    "BackwardPlan",
    "DeviceLimits",
    "ForwardPlan",
    "__version__",
    "disabled_checks",
    "group_norm",
    "instance_norm",
    "partitioning",
    "plan_backward",
    "plan_forward",
]
