"""Plans: DESIGN.md section 3, row by row. CUDA plans need no GPU."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import jax_gn
from jax_gn import _ffi, _plan, _reference
from jax_gn._problem import make_problem, problem_of

import calls
import numerics
import problems

HERE = "cuda" if jax.default_backend() == "gpu" else "cpu"
MAKERS = {"forward": jax_gn.plan_forward, "backward": jax_gn.plan_backward}
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
ACCUMULATORS = {"float32": 4, "float16": 4, "bfloat16": 4, "float64": 8}
# What a small, an A10-, an A100- and an H200-like GPU have (cases.md 46: a grid must fit them all).
DEVICES = (
    jax_gn.DeviceLimits(80, 16, 101376, 4 * 2**20),
    jax_gn.DeviceLimits(86, 60, 101376, 6 * 2**20),
    jax_gn.DeviceLimits(80, 108, 166912, 40 * 2**20),
    jax_gn.DeviceLimits(),
)
# Problems that an H200 holds on the chip in both passes, [N, *spatial, C] and groups.
RESIDENT = {
    "sd15_unet_64": ((16, 64, 64, 320), 32),
    "sd15_unet_16": ((16, 16, 16, 1280), 32),
    "bit_r50_28": ((128, 28, 28, 512), 32),
    "mask_head_14": ((1024, 14, 14, 256), 32),
    "edm_in64_64": ((32, 64, 64, 192), 32),
}


@pytest.fixture(params=["cpu", "cuda"])
def platform(request):
    return request.param


@pytest.fixture(params=["forward", "backward"])
def op(request):
    return request.param


def test_fields(platform, op):
    plan = MAKERS[op](
        (2, 8, 8, 64),
        "bfloat16",
        num_groups=8,
        scale_shape=(64,),
        platform=platform,
        activation="silu",
    )
    assert (plan.op, plan.dtype, plan.layout) == (op, "bfloat16", "channels_last")
    assert (plan.accumulator, plan.math_dtype) == ("float32", "float32")
    assert plan.platform == platform and plan.family in calls.families()
    assert plan.bit_stable and plan.deterministic
    assert plan.bytes_compulsory == {"forward": 2, "backward": 3}[op] * 2 * 8 * 8 * 64 * 2
    assert plan.bytes_moved >= plan.bytes_compulsory
    assert len(plan.kernels) == len(plan.grid) >= 1 and min(plan.grid) >= 1
    assert (
        plan.arch == "sm_90"
        if platform == "cuda"
        else plan.arch.endswith(("/baseline", "/avx2", "/avx512"))
    )
    assert (
        MAKERS[op]((2, 64, 8), "float64", num_groups=8, channel_axis=1).layout == "channels_first"
    )


@pytest.mark.parametrize("dtype", problems.DTYPES)
def test_accumulator(platform, op, dtype):
    plan = MAKERS[op]((2, 9, 8), dtype, num_groups=2, platform=platform)
    assert plan.accumulator == {8: "float64", 4: "float32"}[ACCUMULATORS[dtype]]


def test_frozen_equal_and_hashable(op):
    plan, same = (MAKERS[op]((2, 9, 8), "float32", num_groups=2) for _ in range(2))
    assert plan == same and hash(plan) == hash(same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.family = "other"
    assert plan != MAKERS[op]((2, 9, 8), "float32", num_groups=4)


def test_printed_in_words(platform, op):
    plan = MAKERS[op](
        (2, 9, 8), "float16", num_groups=2, scale_shape=(2, 8), platform=platform, activation="gelu"
    )
    text = str(plan)
    for part in (
        f"GroupNorm {op} on {platform} ({plan.arch})",
        "float16[2, 9, 8]",
        "2 groups of 4 channels",
        "scale per sample float16",
        "bias absent",
        "gelu",
        plan.family,
        f"{plan.workspace_bytes:,} bytes",
        f"{plan.bytes_moved:,} moved",
        f"{plan.bytes_compulsory:,} compulsory",
        "float32",
        "bit-stable",
        *plan.kernels,
    ):
        assert part in text, part


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", problems.DTYPES)
def test_three_stage_workspace(platform, dtype, layout):
    """Exactly 2 * N * G * sizeof(accumulator) backward and nothing forward."""
    for n, groups in ((1, 1), (2, 8), (67, 32), (0, 4)):
        shape = (n, 5, 7, 32) if layout == "channels_last" else (n, 32, 5, 7)
        options = {"num_groups": groups, "channel_axis": -1 if layout == "channels_last" else 1}
        options |= {"platform": platform, "preference": "three_stage", "scale_shape": (32,)}
        backward = jax_gn.plan_backward(shape, dtype, **options)
        assert backward.family == "three_stage"
        assert backward.workspace_bytes == 2 * n * groups * ACCUMULATORS[dtype]
        assert jax_gn.plan_forward(shape, dtype, **options).workspace_bytes == 0


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("case", [*problems.NAMED, *problems.CORNERS], ids=lambda case: case.name)
def test_cuda_plans_of_any_device(case, layout, op):
    """Workspace is the problem's: the tracing machine need not be the running one."""
    case = dataclasses.replace(case, layout=layout)
    for preference in (None, *calls.families()):
        try:
            plans = [
                MAKERS[op](**case.plan_arguments, platform="cuda", device=d, preference=preference)
                for d in DEVICES
            ]
        except NotImplementedError:
            assert preference is not None  # without one, every problem is served on every device
            continue
        assert len({plan.workspace_bytes for plan in plans}) == 1
        served = {preference} if preference else {"resident", "streaming"}
        assert {plan.family for plan in plans} <= served
        for plan, device in zip(plans, DEVICES, strict=True):
            assert plan.arch == f"sm_{device.capability}"
            assert len(plan.kernels) == len(plan.grid) >= 1
            assert all(1 <= grid < 2**31 for grid in plan.grid)


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("kind", [_plan.MomentsPlan, _plan.ChannelSumsPlan])
@pytest.mark.parametrize("case", [*problems.NAMED, *problems.CORNERS], ids=lambda case: case.name)
def test_plans_of_sums(case, kind, layout):
    """Each tensor once, a workspace that neither device nor parameters change."""
    case = dataclasses.replace(case, layout=layout, dtype="bfloat16")
    axis = case.options["channel_axis"]
    forms = [(None, None), ((case.shape[-1],),) * 2, ((case.shape[0], case.shape[-1]), None)]
    for platform, families in (("cpu", ("blocked",)), ("cuda", ("streaming",))):
        for preference in (None, *families, "three_stage"):
            plans = [
                _plan.make_plan(
                    kind,
                    make_problem(
                        case.full_shape,
                        case.dtype,
                        num_groups=case.groups,
                        channel_axis=axis,
                        scale_shape=scale,
                        bias_shape=bias,
                    ),
                    platform,
                    device,
                    preference,
                )
                for device in DEVICES
                for scale, bias in forms
            ]
            assert len({plan.workspace_bytes for plan in plans}) == 1
            assert {plan.family for plan in plans} == {preference or families[0]}
            assert all(1 <= grid < 2**31 for plan in plans for grid in plan.grid)
            tensors = {"forward": 1, "backward": 2}[kind.op]
            bytes_of_x = 2 * math.prod(case.shape)
            assert plans[0].bytes_compulsory == tensors * bytes_of_x
            if preference != "three_stage":
                assert plans[0].bytes_moved == plans[0].bytes_compulsory
            assert "sums only" in str(plans[0])
    resident = "family 'resident' has no"
    with pytest.raises(NotImplementedError, match=resident):
        _plan.make_plan(kind, plans[0].problem, "cuda", None, "resident")


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", RESIDENT)
def test_resident_fits_its_device(name, dtype, layout, op):
    """Shared memory and threads of a block as the device has them; clusters from sm_90 on only: a
    team of one block holds a slab of its own elsewhere."""
    shape, groups = RESIDENT[name]
    served = []
    for device in (*DEVICES, jax_gn.DeviceLimits(120, 170, 101376, 96 * 2**20)):
        try:
            stage = _resident(op, dtype, layout, shape, groups, device)
        except NotImplementedError:
            served.append(False)
            continue
        served.append(True)
        assert stage["shared_bytes"][0] <= device.shared_memory_per_block
        assert stage["threads"][0] <= 512 and stage["threads"][0] % 32 == 0
        # What is held moves once; of what all blocks of the device share, some passes.
        assert 1 <= stage["bytes_moved"] / stage["bytes_compulsory"] < 5 / 3
    assert served[DEVICES.index(jax_gn.DeviceLimits())]


@pytest.mark.parametrize("multiprocessors", [1, 16, 60, 108, 132])
def test_resident_grid_follows_the_device(multiprocessors, op):
    """Teams that go on to other slabs: no more than there is room for, and at least one."""
    shape, groups = RESIDENT["bit_r50_28"]
    device = dataclasses.replace(jax_gn.DeviceLimits(), multiprocessors=multiprocessors)
    answer = _resident(op, "bfloat16", "channels_last", shape, groups, device)
    whole = _resident(op, "bfloat16", "channels_last", shape, groups, jax_gn.DeviceLimits())
    assert answer["threads"] == whole["threads"] and answer["shared_bytes"] == whole["shared_bytes"]
    per_processor = 233472 // (answer["shared_bytes"][0] + 1024)
    assert 1 <= answer["grid"][0] <= max(16, multiprocessors * per_processor)


@pytest.mark.parametrize("multiprocessors", [16, 60, 108, 132, 148, 188])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((4, 512, 512, 128), 32), ((13, 128, 128, 1920), 32), ((3, 200, 200, 320), 32)],
)
@pytest.mark.parametrize("layout", problems.LAYOUTS)
def test_blocks_of_grid_teams_run_at_once(shape, groups, multiprocessors, layout, op):
    """Beyond a cluster's shared memory blocks wait for one another: all must fit. A device that
    could run more than an H200 doesn't; the planner refuses what the workspace has no room for."""
    device = dataclasses.replace(jax_gn.DeviceLimits(), multiprocessors=multiprocessors)
    whole = _resident(op, "bfloat16", layout, shape, groups, jax_gn.DeviceLimits())
    if whole["kernels"][0] not in (f"resident_tile_{op}", f"resident_span_{op}"):
        assert whole["bytes_moved"] == whole["bytes_compulsory"]  # clusters serve it
        return
    if layout == "channels_first" and 2 * multiprocessors < shape[-1] // groups:
        with pytest.raises(NotImplementedError, match="no room"):  # a block for each channel
            _resident(op, "bfloat16", layout, shape, groups, device)
        return
    answer = _resident(op, "bfloat16", layout, shape, groups, device)
    room = device.shared_memory_per_block + 1024
    assert room // (answer["shared_bytes"][0] + 1024) >= 2
    assert 16 < answer["grid"][0] <= 2 * min(multiprocessors, 132)
    assert answer["workspace_bytes"] == whole["workspace_bytes"]
    # Channels first, what the blocks hold together may be enough.
    least = answer["bytes_compulsory"] + (layout == "channels_last")
    assert least <= answer["bytes_moved"] < 2 * answer["bytes_compulsory"]


@pytest.mark.parametrize(
    ("shape", "groups", "activation", "op"),
    [
        ((32, 56, 56, 256), 32, None, "forward"),
        ((128, 28, 28, 512), 32, "gelu", "backward"),
        ((8, 128, 128, 1024), 1024, "silu", "forward"),
    ],
)
def test_a_cluster_serves_where_grid_teams_are_not_worthwhile(shape, groups, activation, op):
    plan = MAKERS[op](shape, "bfloat16", num_groups=groups, activation=activation, platform="cuda")
    assert plan.family == "resident" and plan.bytes_moved == plan.bytes_compulsory


@pytest.mark.parametrize(
    ("spatial", "channels", "groups", "kind"),
    [
        (64, 1280, 32, "pack"),  # sd15_unet_8: many short channels in a group
        (49, 2048, 32, "pack"),  # bit_r50_7: channels end inside packs
        (49, 60, 4, "run"),  # groups, too
        (7, 64, 4, "run"),  # a pack would meet three channels
        (49999, 512, 512, "run"),  # wav2vec2
    ],
)
def test_resident_kernels_of_channels_first(spatial, channels, groups, kind, op):
    shape = (4, spatial, channels)
    answer = _resident(op, "bfloat16", "channels_first", shape, groups, jax_gn.DeviceLimits())
    assert answer["kernels"][0] == f"resident_{kind}_{op}"
    # Packs know no channel when they sum x up.
    answer = _resident(
        op, "bfloat16", "channels_first", shape, groups, jax_gn.DeviceLimits(), "per_sample"
    )
    assert answer["kernels"][0] == f"resident_run_{op}"


def _resident(op, dtype, layout, shape, groups, device, addend="absent"):
    n, *spatial, channels = shape
    return _ffi.planner().plan(
        op=op,
        dtype=dtype,
        layout=layout,
        activation="silu",
        scale="per_channel",
        bias="per_channel",
        addend=addend,
        scale_dtype=dtype,
        bias_dtype=dtype,
        addend_dtype=dtype,
        n=n,
        spatial=math.prod(spatial),
        channels=channels,
        groups=groups,
        platform="cuda",
        preference="resident",
        **dataclasses.asdict(device),
    )


@pytest.mark.parametrize("field", ["capability", "multiprocessors", "shared_memory_per_block"])
@pytest.mark.parametrize("value", [0, -5, 1.5, True])
def test_device_limits_are_sizes(field, value):
    with pytest.raises(ValueError, match=field):
        jax_gn.DeviceLimits(**{field: value})


# The named problems as they are, not cut: planning allocates nothing.
@pytest.mark.parametrize(
    "shape, groups",
    [((16, 64, 64, 320), 32), ((2, 128, 128, 128, 32), 32), ((2**20, 2**14, 32), 8)],
    ids=["sd15", "nnunet", "2**39 elements"],
)
def test_huge_problems(platform, op, shape, groups):
    """64-bit arithmetic throughout."""
    plan = MAKERS[op](shape, "float32", num_groups=groups, platform=platform)
    assert plan.bytes_compulsory == {"forward": 2, "backward": 3}[op] * 4 * math.prod(shape)
    assert plan.bytes_moved >= plan.bytes_compulsory and plan.workspace_bytes >= 0
    three = MAKERS[op](
        shape, "float32", num_groups=groups, platform=platform, preference="three_stage"
    )
    assert three.workspace_bytes == {"forward": 0, "backward": 8 * shape[0] * groups}[op]


@pytest.mark.parametrize("channel_axis", [1, -1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("axes", [(2**50, 1, 1), (1, 2**50, 1), (1, 1, 2**50)], ids=str)
def test_as_many_elements_as_there_may_be(platform, op, dtype, channel_axis, axes):
    """No count wraps around: none is negative, or less than what it contains. A GPU may refuse."""
    channels = axes[channel_axis]
    for per_sample, groups in itertools.product((False, True), {1, channels}):
        plans = calls.plans(
            MAKERS[op],
            shape=axes,
            dtype=dtype,
            num_groups=groups,
            channel_axis=channel_axis,
            scale_shape=(axes[0], channels) if per_sample else (channels,),
            activation="silu",
            platform=platform,
        )
        for plan in plans:
            tensors = {"forward": 2, "backward": 3}[op]
            assert plan.bytes_moved >= tensors * 2**50 * SIZES[dtype]
            assert plan.bytes_moved >= plan.bytes_compulsory >= tensors * 2**50 * SIZES[dtype]
            assert 0 <= plan.workspace_bytes < 2**60
            str(plan)


@pytest.mark.parametrize("shape", [(0, 8, 8, 32), (2, 0, 8, 32)])
def test_empty_problems_have_plans(platform, op, shape):
    plan = MAKERS[op](shape, "float32", num_groups=4, platform=platform)
    assert plan.bytes_compulsory == 0 and plan.bytes_moved == 0
    assert "0 compulsory" in str(plan)


def test_platform_and_device_defaults(op):
    plan = MAKERS[op]((2, 9, 8), "float32", num_groups=2)
    assert plan == MAKERS[op]((2, 9, 8), "float32", num_groups=2, platform=HERE)
    assert jax_gn.DeviceLimits() == jax_gn.DeviceLimits(90, 132, 232448, 62914560)


@pytest.mark.parametrize(
    "changes, error, text",
    [
        ({"platform": "tpu"}, ValueError, "platform must be one of cpu, cuda, got 'tpu'"),
        ({"preference": "fastest"}, ValueError, "preference must be .*three_stage.*got 'fastest'"),
        ({"preference": "auto"}, ValueError, "preference must be .*got 'auto'"),
        ({"device": 90}, TypeError, "device must be a DeviceLimits or None, got int"),
        ({"shape": (2, 9, -8)}, ValueError, r"negative.*\(2, 9, -8\)"),
        ({"shape": (2.0, 9, 8)}, TypeError, "entry of shape must be an integer, got 2.0"),
        ({"shape": 8}, TypeError, "shape must be a sequence of integers, got 8"),
        ({"shape": (2, 9, 0)}, ValueError, "no channels"),
        ({"dtype": "int8"}, TypeError, "x must be one of float32, .*got int8"),
        ({"dtype": None}, TypeError, "x must be one of float32, .*got None"),
        ({"num_groups": 3}, ValueError, "num_groups=3 for C=8"),
        ({"scale_shape": (9,)}, ValueError, r"scale must have shape \(8,\)"),
        ({"scale_dtype": "float16"}, ValueError, "scale_dtype is given without scale_shape"),
        ({"bias_shape": (8,), "bias_dtype": "int32"}, TypeError, "bias must be one of"),
        ({"activation": "elu"}, ValueError, "'elu'"),
    ],
)
def test_refused(op, changes, error, text):
    arguments = {"shape": (2, 9, 8), "dtype": "float32", "num_groups": 2} | changes
    with pytest.raises(error, match=text):
        MAKERS[op](**arguments)


def test_unserved_preference_is_not_implemented():
    """A family of another platform: a valid problem that it can't serve."""
    served = {
        name: {p.family for p in calls.plans(jax_gn.plan_forward, **_ARGUMENTS, platform=name)}
        for name in ("cpu", "cuda")
    }
    assert "three_stage" in served["cpu"] & served["cuda"]
    assert served["cpu"] | served["cuda"] == set(calls.families())
    for name, families in served.items():
        for family in set(calls.families()) - families:
            with pytest.raises(NotImplementedError, match=family):
                jax_gn.plan_forward(**_ARGUMENTS, platform=name, preference=family)


_ARGUMENTS = {"shape": (2, 9, 8), "dtype": "float32", "num_groups": 2}


@pytest.mark.parametrize("layout", problems.LAYOUTS)
@pytest.mark.parametrize(
    "name", ["sd15_unet_16", "bit_r50_7", "nnunet_in_64", "mlp_rows", "c31_g31"]
)
def test_every_family_gives_the_right_numbers(name, layout):
    """Through plan.run, from its own statistics; bit for bit what group_norm gives where chosen."""
    case = next(c for c in (*problems.NAMED, *problems.CORNERS) if c.name == name)
    case = dataclasses.replace(case, layout=layout, activation="silu")
    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    problem = problem_of(
        x, scale, bias, **{k: v for k, v in case.options.items() if k != "epsilon"}
    )

    @jax.jit
    def definition(x, scale, bias, dy):
        y, *statistics = _reference.forward(problem, x, scale, bias, epsilon=case.epsilon)
        return y, *statistics, *_reference.backward(problem, dy, x, scale, bias, None, *statistics)

    names = ("y", "mean", "rstd", "dx", "dscale", "dbias")
    reference = dict(zip(names, definition(x, scale, bias, dy), strict=True))
    numerics.assert_definition(reference, case.expected, case.longest_sum)
    forwards = calls.plans(jax_gn.plan_forward, **case.plan_arguments, platform=HERE)
    backwards = calls.plans(jax_gn.plan_backward, **case.plan_arguments, platform=HERE)
    assert len(forwards) >= 2 and len(backwards) >= 2
    for forward, backward in itertools.zip_longest(forwards, backwards, fillvalue=forwards[0]):
        y, mean, rstd = forward.run(x, scale, bias, epsilon=case.epsilon)
        results = (y, mean, rstd, *backward.run(dy, x, scale, bias, mean, rstd))
        results = dict(zip(names, results, strict=True))
        numerics.assert_as_good_as(results, reference, case.expected)


def test_run_is_what_group_norm_runs():
    case = problems.NAMED[0]
    x, scale, bias, dy = map(jnp.asarray, case.arrays)
    y, mean, rstd = jax_gn.plan_forward(**case.plan_arguments).run(
        x, scale, bias, epsilon=case.epsilon
    )
    plan = jax_gn.plan_backward(**case.plan_arguments)
    results = (y, *jax.jit(plan.run)(dy, x, scale, bias, mean, rstd))
    ours = calls.value_and_gradients(case, "ffi")
    for value, name in zip(results, ("y", "dx", "dscale", "dbias"), strict=True):
        numerics.assert_same_bits(value, ours[name])
