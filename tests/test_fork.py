"""os.fork, as data loaders do it: before and after JAX has threads."""

import os

import pytest

import interpreter

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def test_fork_after_import():
    """`import jax_gn` starts no thread and loads nothing: a child may be the first to call."""
    out = interpreter.output(
        """
        import os
        import jax, jax_gn
        jax.config.update("jax_platforms", "cpu")
        import jax.numpy as jnp
        child = os.fork()
        y = jax_gn.group_norm(jnp.arange(64.0).reshape(2, 4, 8), num_groups=2)
        total = float(abs(y).sum())
        if child == 0:
            print("child", total, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0  # both write into one pipe, one after the other
        print("parent", total)
        """
    )
    out = out.split()
    assert out[::2] == ["child", "parent"] and out[1] == out[3] and float(out[1]) > 1


def test_fork_of_a_working_process():
    """A child that doesn't use JAX neither hangs nor disturbs: it plans, its parent goes on."""
    out = interpreter.output(
        """
        import os, warnings
        import jax, jax_gn
        jax.config.update("jax_platforms", "cpu")
        import jax.numpy as jnp
        # Large enough for the pool's threads.
        x = jnp.arange(2.0 * 64 * 64 * 64).reshape(2, 64, 64, 64)
        norm = lambda: float(abs(jax_gn.group_norm(x, num_groups=8)).sum())
        first = norm()
        warnings.simplefilter("ignore")  # JAX's own: a child must not use it
        child = os.fork()
        if child == 0:
            plan = jax_gn.plan_forward((2, 8, 8, 32), "float32", num_groups=8, platform="cuda")
            os._exit(0 if plan.family else 1)
        assert norm() == first
        assert os.waitpid(child, 0)[1] == 0
        print("done")
        """
    )
    assert out.split() == ["done"]
