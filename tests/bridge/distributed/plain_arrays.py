"""numpy arrays to device buffers and back, without torch or JAX."""

import ml_dtypes
import numpy as np

# The element type's name in StableHLO to numpy's type and PJRT_Buffer_Type.
ELEMENTS = {
    "i1": (np.dtype(np.bool_), 1),
    "i8": (np.dtype(np.int8), 2),
    "i16": (np.dtype(np.int16), 3),
    "i32": (np.dtype(np.int32), 4),
    "i64": (np.dtype(np.int64), 5),
    "ui8": (np.dtype(np.uint8), 6),
    "ui16": (np.dtype(np.uint16), 7),
    "ui32": (np.dtype(np.uint32), 8),
    "ui64": (np.dtype(np.uint64), 9),
    "f16": (np.dtype(np.float16), 10),
    "f32": (np.dtype(np.float32), 11),
    "f64": (np.dtype(np.float64), 12),
    "bf16": (np.dtype(ml_dtypes.bfloat16), 13),
    "complex<f32>": (np.dtype(np.complex64), 14),
    "complex<f64>": (np.dtype(np.complex128), 15),
}
_CODES = {dtype: code for dtype, code in ELEMENTS.values()}
_DTYPES = {code: dtype for dtype, code in ELEMENTS.values()}


def to_device(client, device, array: np.ndarray):
    """A buffer with the array's values."""
    array = np.ascontiguousarray(array)
    raw = array.view(np.uint8).reshape(-1) if array.size else np.zeros(1, np.uint8)  # an address is wanted for nothing too
    return client.buffer_from_host(raw, _CODES[array.dtype], array.shape, device)


def from_device(buffer) -> np.ndarray:
    """The buffer's values; raises what its program raised."""
    dtype, shape = _DTYPES[buffer.element_type], buffer.dimensions
    raw = np.empty(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, np.uint8)
    if raw.size:
        buffer.to_host(raw)
    return raw.view(dtype).reshape(shape)
