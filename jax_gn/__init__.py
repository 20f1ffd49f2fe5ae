"""GroupNorm for JAX as fused kernels: `jax_gn.group_norm` and its derivatives."""

from ._group_norm import group_norm, instance_norm
from ._plan import BackwardPlan, DeviceLimits, ForwardPlan, plan_backward, plan_forward

__version__ = "0.1.0"

__all__ = [
    "BackwardPlan",
    "DeviceLimits",
    "ForwardPlan",
    "__version__",
    "group_norm",
    "instance_norm",
    "plan_backward",
    "plan_forward",
]
