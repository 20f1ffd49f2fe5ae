"""What ffi/cpu_module.cc offers (tests/test_stubs.py compares)."""

from typing import Any

ffi_api_version: tuple[int, int]
families: tuple[str, ...]

def registrations() -> dict[str, Any]: ...
def instruction_set() -> str: ...
def plan(
    *,
    op: str,
    sums_only: bool,
    dtype: str,
    layout: str,
    activation: str,
    scale: str,
    bias: str,
    addend: str,
    scale_dtype: str,
    bias_dtype: str,
    addend_dtype: str,
    n: int,
    spatial: int,
    channels: int,
    groups: int,
    platform: str,
    capability: int,
    multiprocessors: int,
    shared_memory_per_block: int,
    l2_bytes: int,
    preference: str,
) -> dict[str, Any]: ...
