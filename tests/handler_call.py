"""Calls a registered CPU handler as XLA does, with memory of our own: poison, guard bands, any lie.

XLA's own results can't be looked at where a call is refused, and its frames are always consistent.
The structures are those of xla/ffi/api/c_api.h, interface 0.1, which every later runtime keeps.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math

import numpy as np

GUARD = 256  # bytes on either side of each buffer
# name -> (XLA's number of the type, bytes)
DTYPES = {
    "float32": (11, 4),
    "float16": (10, 2),
    "bfloat16": (16, 2),
    "float64": (12, 8),
    "uint8": (6, 1),
    "int32": (4, 4),
    "complex64": (15, 8),
    "pred": (1, 1),
    "float8_e4m3fn": (20, 1),
    "token": (17, 0),
    "unheard of": (63, 1),  # the largest that the enumeration may hold
}
EXECUTE, BUFFER, SCALAR, STRING = 3, 1, 3, 4
P, I64, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t


def _struct(name: str, *fields: tuple) -> type[ctypes.Structure]:
    """One of XLA's structures: its size and its extensions first."""
    head = [("struct_size", SIZE), ("extension_start", P)]
    return type(name, (ctypes.Structure,), {"_fields_": head + list(fields)})


Raw = _struct("Buffer", ("dtype", ctypes.c_int), ("data", P), ("rank", I64), ("dims", P))
Operands = _struct("Args", ("size", I64), ("types", P), ("values", P))
Attrs = _struct("Attrs", ("size", I64), ("types", P), ("names", P), ("values", P))
Frame = _struct(
    "CallFrame",
    *(("api", P), ("ctx", P), ("stage", ctypes.c_int)),
    *(("args", Operands), ("rets", Operands), ("attrs", Attrs), ("future", P)),
)
ErrorCreate = _struct("ErrorCreate", ("message", ctypes.c_char_p), ("code", ctypes.c_int))
Schedule = _struct("Schedule", ("ctx", P), ("task", P), ("data", P))
NumThreads = _struct("NumThreads", ("ctx", P), ("num_threads", ctypes.POINTER(I64)))
Version = _struct("Version", ("major", ctypes.c_int), ("minor", ctypes.c_int))
# Functions of the api, in order: 0 Error_Create, 11 ThreadPool_Schedule, 12 ThreadPool_NumThreads.
Api = _struct("Api", ("version", Version), ("internal", P), ("functions", P * 64))


class Span(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char_p), ("size", SIZE)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int), ("value", P)]


@dataclasses.dataclass
class Buffer:
    """Memory between guard bands, filled with one byte; dims may lie about it."""

    dims: tuple[int, ...]
    dtype: str
    fill: int = 0xA5

    def __post_init__(self):
        size = math.prod(self.dims) * DTYPES[self.dtype][1]
        self.size = size if 0 <= size < 2**24 else 0
        self._memory = np.full(self.size + 2 * GUARD, self.fill, np.uint8)
        self._dims = (I64 * len(self.dims))(*self.dims)

    @property
    def bytes(self) -> np.ndarray:
        return self._memory[GUARD : GUARD + self.size]

    def untouched(self) -> bool:
        return bool((self._memory == self.fill).all())

    def guards_untouched(self) -> bool:
        ends = (self._memory[:GUARD], self._memory[GUARD + self.size :])
        return all((end == self.fill).all() for end in ends)

    def raw(self):
        data = self._memory.ctypes.data + GUARD
        dims = ctypes.cast(self._dims, P)
        return _filled(Raw, DTYPES[self.dtype][0], data, len(self.dims), dims)


def _filled(kind, *values):
    return kind(ctypes.sizeof(kind), None, *values)


def call(capsule, operands: list[Buffer], results: list[Buffer], attributes: dict):
    """(code, message) of one call; code 0 and "" where it was taken.

    attributes: str, np.float64, np.float32 or np.int64 by name.
    """
    errors = []

    @ctypes.CFUNCTYPE(P, ctypes.POINTER(ErrorCreate))
    def error_create(arguments):
        errors.append((arguments[0].code, arguments[0].message.decode()))
        return len(errors)  # not null; nobody looks inside

    @ctypes.CFUNCTYPE(P, ctypes.POINTER(Schedule))
    def schedule(arguments):
        ctypes.CFUNCTYPE(None, P)(arguments[0].task)(arguments[0].data)

    @ctypes.CFUNCTYPE(P, ctypes.POINTER(NumThreads))
    def num_threads(arguments):
        arguments[0].num_threads[0] = 3

    api = _filled(Api, _filled(Version, 0, 1))
    for index, function in ((0, error_create), (11, schedule), (12, num_threads)):
        api.functions[index] = ctypes.cast(function, P)
    keep: list = [api]
    frame = _filled(Frame, ctypes.addressof(api), None, EXECUTE)
    frame.struct_size = Frame.future.offset  # as XLA counts it
    for field, buffers in (("args", operands), ("rets", results)):
        raw = [buffer.raw() for buffer in buffers]
        keep.append(raw)
        setattr(frame, field, _list(keep, Operands, [BUFFER] * len(raw), raw))
    items = sorted(attributes.items())  # as XLA has them
    names = [Span(name.encode(), len(name)) for name, _ in items]
    typed = [_attribute(keep, value) for _, value in items]
    types, values = [kind for kind, _ in typed], [value for _, value in typed]
    keep += [names, values]
    frame.attrs = _list(keep, Attrs, types, values, names)
    _handler(capsule)(ctypes.byref(frame))
    return errors[-1] if errors else (0, "")


def _list(keep: list, kind, types, values, names=None):
    arrays = [(ctypes.c_int * len(types))(*types)]
    for column in ([names] if names is not None else []) + [values]:
        arrays.append((P * len(column))(*map(ctypes.addressof, column)))
    keep.append(arrays)
    return _filled(kind, len(types), *(ctypes.cast(a, P) for a in arrays))


def _attribute(keep: list, value):
    if isinstance(value, str):
        return STRING, Span(value.encode(), len(value.encode()))
    kind = {"float64": (12, ctypes.c_double), "float32": (11, ctypes.c_float), "int64": (5, I64)}
    dtype, ctype = kind[np.asarray(value).dtype.name]
    number = ctype(value.item())
    keep.append(number)
    return SCALAR, Scalar(dtype, ctypes.addressof(number))


def _handler(capsule):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(P, P)(pointer(capsule, None))
