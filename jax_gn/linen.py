"""Flax linen's GroupNorm and InstanceNorm on jax_gn's kernels: change the import, keep the model.

    from jax_gn.linen import GroupNorm          # instead of: from flax.linen import GroupNorm

Both are subclasses of Flax's own: fields, defaults, parameters, names and initialization are the
installed Flax's, and checkpoints load both ways. What differs is the computation:

* The variance is always the exact one, with sums in float32 or wider: `use_fast_variance` and
  `force_float32_reductions` are accepted and change no sum. (With force_float32_reductions=False
  parameters are cast to `param_dtype`, as Flax does.)
* `activation` and `implementation`, of `jax_gn.group_norm`, are two fields more.
* A call takes scale and bias, per channel or per sample, for AdaGN and FiLM.
* mask may have size 1 in any axis, the channels too. A sample that is masked throughout gives
  `activation(bias)`, not NaN; with `axis_name`, devices count by their unmasked elements.

What the kernels don't serve runs as `jax.numpy` code with the same numbers: a mask, complex input,
an `axis_name` of `vmap`, reduced axes that are not the last ones, and feature axes that are neither
the last nor the first ones. ``implementation="ffi"`` is then a NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from ._flax_norm import apply, canonical_axes, group_axes, layer_of, raise_missing_flax

try:
    from flax import linen
except ModuleNotFoundError as error:
    raise_missing_flax(__name__, error)

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(linen.GroupNorm):
    """Group normalization: `flax.linen.GroupNorm`, computed by `jax_gn.group_norm`.

    Fields are `flax.linen.GroupNorm`'s (num_groups=32, group_size, epsilon, ...) and two more;
    `use_fast_variance` changes nothing, the variance is always the exact one.

    Attributes:
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form), "leaky_relu": applied to the
        result in the same kernel.
      implementation: "ffi", "xla", None or a sequence of them: see `jax_gn.group_norm`.
    """

    activation: str | None = None
    implementation: str | Sequence[str] | None = None

    @linen.compact
    def __call__(self, x, mask=None, scale=None, bias=None, addend=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """activation(layer(x + addend) * scale + bias), `layer` with its learned scale and bias.

        Args:
          x: `[N, *spatial, C]`; other leading axes need `reduction_axes`.
          mask: True where mean and variance are taken from; broadcast to x.
          scale, bias: `(C,)`, or `(N, C)` for one a sample; they follow the learned ones (make the
            layer with use_scale=False, use_bias=False to have them alone) and don't change the
            result's dtype.
          addend: likewise; added to x before all else, in the kernel: a convolution's bias, a time
            embedding.

        Returns:
          y of x's shape; of type `dtype`, or of x and the learned parameters promoted.

        Raises:
          ValueError, TypeError: at trace time, for arguments that no GroupNorm has.
          NotImplementedError: what the named implementation doesn't serve.
        """
        x = jnp.asarray(x)
        reduced = group_axes(self.reduction_axes, x.ndim)
        groups = self._groups(x.shape[-1])
        layer = layer_of(self, reduced, (x.ndim - 1,), groups)
        return apply(layer, x, _parameters(self, x, layer.features), (scale, bias), addend, mask)

    def _groups(self, channels: int) -> int:
        """The number of groups of x with that many channels."""
        if (self.num_groups is None) == (self.group_size is None):
            raise ValueError(
                f"either num_groups or group_size must be given, got num_groups={self.num_groups}, "
                f"group_size={self.group_size}: write num_groups=None beside a group_size"
            )
        size = self.group_size
        if size is not None:
            if size < 1 or channels % size:
                raise ValueError(
                    f"group_size must be >= 1 and divide the number of channels, got "
                    f"group_size={size} for C={channels}"
                )
            return channels // size
        groups = self.num_groups
        if not isinstance(groups, int) or groups < 1 or channels % groups:
            raise ValueError(
                "num_groups must be an integer >= 1 that divides the number of channels, got "
                f"num_groups={groups!r} for C={channels}"
            )
        return groups


class InstanceNorm(linen.InstanceNorm):
    """Instance normalization: `flax.linen.InstanceNorm`, computed by `jax_gn.group_norm`.

    Fields are `flax.linen.InstanceNorm`'s and two more; `use_fast_variance` changes nothing, the
    variance is always the exact one.

    Attributes:
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form), "leaky_relu": applied to the
        result in the same kernel.
      implementation: "ffi", "xla", None or a sequence of them: see `jax_gn.group_norm`.
    """

    activation: str | None = None
    implementation: str | Sequence[str] | None = None

    @linen.compact
    def __call__(self, x, mask=None, scale=None, bias=None, addend=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """activation(layer(x + addend) * scale + bias): see `GroupNorm`.

        Args:
          x: `[N, ...]` with its channels in `feature_axes`.
          mask: True where mean and variance are taken from; broadcast to x.
          scale, bias, addend: of the feature axes' shape, or with N before it for one a sample.

        Returns:
          y of x's shape; of type `dtype`, or of x and the learned parameters promoted.

        Raises:
          ValueError, TypeError: at trace time, for arguments that no InstanceNorm has.
          NotImplementedError: what the named implementation doesn't serve.
        """
        x = jnp.asarray(x)
        features = canonical_axes("feature_axes", self.feature_axes, x.ndim)
        if 0 in features:
            return super().__call__(x)  # Flax's own error
        reduced = tuple(axis for axis in range(1, x.ndim) if axis not in features)
        layer = layer_of(self, reduced, features, None)
        return apply(layer, x, _parameters(self, x, features), (scale, bias), addend, mask)


def _parameters(module, x, features: tuple[int, ...]):
    """The learned (scale, bias), made in Flax's order; None for one that is not used."""
    shape = [x.shape[axis] for axis in features]  # a list, as Flax gives it to the initializers
    scale = bias = None
    if module.use_scale:
        scale = module.param("scale", module.scale_init, shape, module.param_dtype)
    if module.use_bias:
        bias = module.param("bias", module.bias_init, shape, module.param_dtype)
    if not module.force_float32_reductions:
        scale, bias = (None if v is None else v.astype(module.param_dtype) for v in (scale, bias))
    return scale, bias
