"""Flax nnx's GroupNorm and InstanceNorm on jax_gn's kernels: change the import, keep the model.

    from jax_gn.nnx import GroupNorm            # instead of: from flax.nnx import GroupNorm

Both are subclasses of Flax's own: arguments, defaults, parameters, metadata and errors of the
constructor are the installed Flax's, and checkpoints load both ways. `swap_norms` changes the norms
of a model that exists. What differs is the computation:

* The variance is always the exact one, with sums in float32 or wider: `use_fast_variance` is
  accepted and changes nothing.
* `activation` and `implementation`, of `jax_gn.group_norm`, are two arguments more.
* A call takes scale and bias, per channel or per sample, for AdaGN and FiLM.
* `nnx.vmap(layer)(x)` works: mask, scale and bias may be positional, too.
* mask may have size 1 in any axis, the channels too. A sample that is masked throughout gives
  `activation(bias)`, not NaN; with `axis_name`, devices count by their unmasked elements.
* Where Flax's nnx GroupNorm departs from its documentation (and from linen), this one keeps to it:
  `reduction_axes` that keep more axes than the first are right, those without the last axis are a
  ValueError, and x of rank 1 works.

The promotion of x before the computation is nnx's, by its documented argument `promote_dtype` (Flax
0.12.0 has none and promotes as linen does). Flax's default for it also rounds the parameters to
dtype=bfloat16; here they stay as they are, as in linen. A function of yours promotes all three.

What the kernels don't serve runs as `jax.numpy` code with the same numbers: a mask, complex input,
an `axis_name` of `vmap`, reduced axes that are not the last ones, and feature axes that are neither
the last nor the first ones. ``implementation="ffi"`` is then a NotImplementedError.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from ._flax_norm import apply, canonical_axes, group_axes, layer_of, raise_missing_flax
from ._problem import check_activation

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
except ModuleNotFoundError as error:
    raise_missing_flax(__name__, error)

__all__ = ["GroupNorm", "InstanceNorm", "swap_norms"]

_FLAX_NAMES = {"num_channels": "num_features", "eps": "epsilon", "affine": "use_scale, use_bias"}


class GroupNorm(nnx.GroupNorm):
    """Group normalization: `flax.nnx.GroupNorm`, computed by `jax_gn.group_norm`.

    Arguments are `flax.nnx.GroupNorm`'s (num_features, num_groups=32, group_size=None, *, epsilon,
    dtype, param_dtype, ..., rngs) and two more; `use_fast_variance` changes nothing, the variance
    is always the exact one.

    Args:
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form), "leaky_relu": applied to the
        result in the same kernel.
      implementation: "ffi", "xla", None or a sequence of them: see `jax_gn.group_norm`.
    """

    def __init__(
        self,
        *args,
        activation: str | None = None,
        implementation: str | Sequence[str] | None = None,
        **kwargs,
    ):
        _check_names(type(self).__name__, kwargs)
        super().__init__(*args, **kwargs)
        _set_ours(self, activation, implementation)

    def __call__(self, x, mask=None, scale=None, bias=None, addend=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """activation(layer(x + addend) * scale + bias), `layer` with its learned scale and bias.

        Args:
          x: `[N, *spatial, num_features]`; other leading axes need `reduction_axes`.
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
        channels = self.num_groups * self.group_size
        if x.shape[-1] != channels:
            raise TypeError(
                f"the layer was made for num_features={channels}, got x of shape {x.shape} with "
                f"{x.shape[-1]} channels in its last axis"
            )
        x, *learned = _promoted(self, x)
        layer = layer_of(self, reduced, (x.ndim - 1,), self.num_groups)
        return apply(layer, x, learned, (scale, bias), addend, mask)


class InstanceNorm(nnx.InstanceNorm):
    """Instance normalization: `flax.nnx.InstanceNorm`, computed by `jax_gn.group_norm`.

    Arguments are `flax.nnx.InstanceNorm`'s (num_features, *, epsilon, ..., rngs) and two more;
    `use_fast_variance` changes nothing, the variance is always the exact one.

    Args:
      activation: None, "silu" ("swish"), "relu", "gelu" (tanh form), "leaky_relu": applied to the
        result in the same kernel.
      implementation: "ffi", "xla", None or a sequence of them: see `jax_gn.group_norm`.
    """

    def __init__(
        self,
        *args,
        activation: str | None = None,
        implementation: str | Sequence[str] | None = None,
        **kwargs,
    ):
        _check_names(type(self).__name__, kwargs)
        super().__init__(*args, **kwargs)
        _set_ours(self, activation, implementation)

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
        x, *learned = _promoted(self, x)
        return apply(
            layer_of(self, reduced, features, None), x, learned, (scale, bias), addend, mask
        )


def swap_norms(
    model: nnx.Module,
    *,
    fold_silu: Iterable[str] = (),
    implementation: str | Sequence[str] | None = None,
) -> list[str]:
    """Turns Flax's GroupNorms and InstanceNorms in `model` into this module's, in place.

    The layers stay the same objects with the same parameters (nothing is copied, shared layers stay
    shared, checkpoints load as before); only their class changes. Subclasses of Flax's norms are
    left alone, for their `__call__` may do more.

    Args:
      model: any nnx module, a norm itself too.
      fold_silu: paths, as returned, of norms in an `nnx.Sequential` whose next element is
        `nnx.silu` (`jax.nn.silu`): the norm's kernel then applies it, and an identity takes its
        place, so that paths stay. A silu that a model calls in its own `__call__` can't be seen
        from here: delete it there and write ``model.norm.activation = "silu"``.
      implementation: of the layers that are changed.

    Returns:
      The paths of the changed layers, such as "down.0.norm1".

    Raises:
      ValueError: a path in `fold_silu` that names no norm followed by silu, or one that stands in
        several places. Nothing is changed then.
    """
    modules = {
        ".".join(map(str, path)): (path, node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
    }
    swapped = {name: m for name, (_, m) in modules.items() if type(m) in _SWAPS}
    folds = [_silu_after(name, modules) for name in _unique(fold_silu)]
    _check_used_once(model, [norm for norm, _, _ in folds])
    for layer in swapped.values():
        # object's: nnx's own would list the class among the layer's attributes.
        object.__setattr__(layer, "__class__", _SWAPS[type(layer)])
        _set_ours(layer, None, implementation)
    for layer, sequence, position in folds:
        layer.activation = "silu"
        sequence.layers[position] = _identity
    return list(swapped)


_SWAPS = {nnx.GroupNorm: GroupNorm, nnx.InstanceNorm: InstanceNorm}


def _unique(names: Iterable[str]) -> list[str]:
    if isinstance(names, str):
        raise TypeError(f"fold_silu must be a collection of paths: write fold_silu=[{names!r}]")
    if not isinstance(names, Iterable):
        raise TypeError(
            "fold_silu must be a collection of paths, of which swap_norms(model) returns all, "
            f"got {names!r}"
        )
    return list(dict.fromkeys(names))


def _silu_after(name: str, modules: dict):
    """(norm, the Sequential it is in, position of the silu after it)."""
    if name not in modules:
        raise ValueError(f"fold_silu: the model has no module {name!r}; it has {list(modules)}")
    path, norm = modules[name]
    plain = type(norm) in _SWAPS or (
        type(norm) in _SWAPS.values() and getattr(norm, "activation", None) is None
    )
    if not plain:
        raise ValueError(
            f"fold_silu: {name!r} is a {type(norm).__name__}, not a norm without an activation"
        )
    _, parent = modules.get(".".join(map(str, path[:-2])), (None, None))
    if isinstance(parent, nnx.Sequential) and path[-2] == "layers":
        following = path[-1] + 1
        if following < len(parent.layers) and parent.layers[following] in (nnx.silu, jax.nn.silu):
            return norm, parent, following
    raise ValueError(
        f"fold_silu: {name!r} is not followed by nnx.silu in an nnx.Sequential: where the model "
        f'calls silu itself, delete that call and write model.{name}.activation = "silu"'
    )


def _check_used_once(model: nnx.Module, norms: list) -> None:
    """A norm that stands elsewhere too would get the silu there as well."""
    places = dict.fromkeys(map(id, norms), 0)
    for _, node in nnx.iter_graph(model):
        values = node.values() if isinstance(node, dict) else ()
        if isinstance(node, list | tuple | nnx.List):
            values = list(node)
        elif isinstance(node, nnx.Module):
            values = vars(node).values()
        for value in values:
            if id(value) in places:
                places[id(value)] += 1
    if many := [n for n in places.values() if n > 1]:
        raise ValueError(
            f"fold_silu: a norm that is named stands in {many[0]} places, and silu may "
            "follow it in one of them only: give each place its own"
        )


def _identity(x):
    return x


def _check_names(layer: str, kwargs: dict) -> None:
    """Other libraries' argument names: an error that says Flax's."""
    for name in kwargs.keys() & _FLAX_NAMES.keys():
        raise TypeError(f"{layer} has no argument {name!r}: write {_FLAX_NAMES[name]}")


def _set_ours(layer, activation, implementation) -> None:
    check_activation(activation)
    layer.activation = activation
    # A tuple: nnx takes lists for containers of arrays.
    layer.implementation = (
        implementation
        if implementation is None or isinstance(implementation, str)
        else tuple(implementation)
    )


def _promoted(layer, x):
    """(x, scale, bias) by the layer's promote_dtype.

    Flax's own also rounds the parameters to `dtype`. The kernels take them as they are, which is
    more exact and spares a small kernel for each of them in every step.
    """
    parameters = [None if p is None else p[...] for p in (layer.scale, layer.bias)]
    promote = getattr(layer, "promote_dtype", None)  # Flax 0.12.0 has none
    if promote is None:
        return x, *parameters
    promoted = promote((x, *parameters), dtype=layer.dtype)
    return (promoted[0], *parameters) if promote is dtypes.promote_dtype else promoted


def _signature(ours: type, flax: type) -> inspect.Signature:
    """What help() shows of the constructor: Flax's arguments, then ours."""
    own = inspect.signature(ours.__init__).parameters
    theirs = inspect.signature(flax.__init__)
    added = [own[name] for name in ("activation", "implementation")]
    return theirs.replace(parameters=[*theirs.parameters.values(), *added])


GroupNorm.__init__.__signature__ = _signature(GroupNorm, nnx.GroupNorm)
InstanceNorm.__init__.__signature__ = _signature(InstanceNorm, nnx.InstanceNorm)
