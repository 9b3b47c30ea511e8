"""Lossless codecs of the stored bytes. What is read back is byte for byte what was given.

16-bit KV compresses by its high bytes alone (sign, exponent and the first bits of the
mantissa); the low bytes are noise, and stay as they are. So the two planes are split, and
only the high one is compressed. Both directions leave the GIL.
"""

from __future__ import annotations

import struct
import threading

import lz4.block
import numpy as np
import zstandard

#: What stands in front of the planes: length of the compressed high plane, in bytes.
_PREFIX = struct.Struct("<Q")

#: Literal coding is what pays on exponents; matches do not (measured on real bf16 KV).
_ZSTD = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    compression_level=1,
    min_match=7,
    hash_log=6,
    window_log=17,
    target_length=0,
    write_content_size=1,
)
_local = threading.local()


def encode(codec: str, raw: memoryview) -> bytes | memoryview:
    """The stored bytes of ``raw``, whose length is even for ``zstd`` and ``lz4``."""
    if codec == "none":
        return raw
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 2)
    high = np.ascontiguousarray(planes[:, 1])
    packed = _compress(codec, high)
    stored = bytearray(_PREFIX.size + len(packed) + len(high))
    _PREFIX.pack_into(stored, 0, len(packed))
    stored[_PREFIX.size : _PREFIX.size + len(packed)] = packed
    np.frombuffer(stored, dtype=np.uint8)[_PREFIX.size + len(packed) :] = planes[:, 0]
    return memoryview(stored)


def decode(codec: str, stored: memoryview, raw: memoryview) -> None:
    """Fill ``raw`` from its stored bytes. Raises ValueError for bytes that are not those of ``raw``'s length."""
    if codec == "none":
        raw[:] = stored[: len(raw)]
        return
    half = len(raw) // 2
    (length,) = _PREFIX.unpack_from(stored, 0)
    if len(stored) != _PREFIX.size + length + half:
        raise ValueError(f"{len(stored)} stored bytes do not hold {len(raw)} raw ones")
    high = _decompress(codec, stored[_PREFIX.size : _PREFIX.size + length], half)
    if len(high) != half:
        raise ValueError(f"the high plane has {len(high)} bytes, not {half}")
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 2)
    planes[:, 1] = np.frombuffer(high, dtype=np.uint8)
    planes[:, 0] = np.frombuffer(stored, dtype=np.uint8)[_PREFIX.size + length :]


def _compress(codec: str, plane: np.ndarray) -> bytes:
    if codec == "lz4":
        return lz4.block.compress(plane.data, store_size=False)
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
    return _local.compressor.compress(plane.data)


def _decompress(codec: str, packed: memoryview, length: int) -> bytes:
    try:
        if codec == "lz4":
            return lz4.block.decompress(packed, uncompressed_size=length)
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        return _local.decompressor.decompress(packed, max_output_size=length)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise ValueError(f"the high plane cannot be unpacked: {error}") from None
