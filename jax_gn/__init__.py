"""GroupNorm for JAX as fused kernels: `jax_gn.group_norm` and its derivatives."""

from ._ffi import disabled_checks
from ._group_norm import group_norm, instance_norm
from ._plan import BackwardPlan, DeviceLimits, ForwardPlan, plan_backward, plan_forward
from ._sharding import partitioning

__version__ = "0.1.0"

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
