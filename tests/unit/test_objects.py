"""Names and frames of cache files: what is damaged, swapped or of another release is found out."""

import random
import zlib

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import objects
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, Frame, FrameError

KEY = ChunkKey("qwen3-32b-kvp-" + "0" * 32, bytes(range(32)), 0x04010401, 1, "salt")
RAW = random.Random(1).randbytes(10000)
LAYOUT = "[[2, 64, 256, 1024]] bfloat16"


def crc(data, start):
    """Any CRC will do here; the VM has CRC-32C."""
    return zlib.crc32(data, start)


def framed(raw=RAW, **changes):
    frame = Frame(
        **{"key": KEY, "layout": LAYOUT, "codec": "none", "raw_length": len(raw), "stored_length": len(raw), **changes}
    )
    body = memoryview(raw + bytes(objects.padded(len(raw)) - len(raw)))
    return bytes(frame.sealed(body[: len(raw)], crc)) + bytes(body)


def read(data, key=KEY, layout=LAYOUT, raw_length=10000):
    page, stored = memoryview(data)[: objects.HEADER_BYTES], memoryview(data)[objects.HEADER_BYTES :]
    frame = objects.read_header(page)
    objects.check(frame, len(data), page, stored, crc)
    objects.expect(frame, key, layout, raw_length)
    return bytes(stored[: frame.stored_length])


def test_there_and_back():
    data = framed()
    assert read(data) == RAW
    assert len(data) % objects.PAGE_BYTES == 0
    assert data[objects.HEADER_BYTES : objects.HEADER_BYTES + len(RAW)] == RAW


def test_any_flipped_bit_is_found():
    data = framed()
    places = random.Random(2).sample(range((objects.HEADER_BYTES + len(RAW)) * 8), 500)
    for place in [*range(80 * 8), *places]:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(FrameError):
            read(bytes(flipped))


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 8192, len(framed()) - 4096, len(framed()) - 1])
def test_a_short_file_is_found(length):
    with pytest.raises(FrameError):
        read(framed()[:length])


def test_a_long_file_is_found():
    with pytest.raises(FrameError, match="its header says"):
        read(framed() + bytes(4096))


@pytest.mark.parametrize(
    "other",
    [
        ChunkKey(KEY.model_name, bytes(32), KEY.kv_rank, 1, "salt"),
        ChunkKey("other", KEY.chunk_hash, KEY.kv_rank, 1, "salt"),
        ChunkKey(KEY.model_name, KEY.chunk_hash, 1, 1, "salt"),
        ChunkKey(KEY.model_name, KEY.chunk_hash, KEY.kv_rank, 0, "salt"),
        ChunkKey(KEY.model_name, KEY.chunk_hash, KEY.kv_rank, 1, ""),
    ],
)
def test_a_file_of_another_key_is_found(other):
    with pytest.raises(FrameError, match="the file holds"):
        read(framed(), key=other)


def test_another_layout_is_found():
    with pytest.raises(FrameError, match="the file holds"):
        read(framed(), layout="[[2, 64, 256, 1024]] float16")
    with pytest.raises(FrameError, match="the file holds"):
        read(framed(), raw_length=20000)


def test_another_release_is_not_damage():
    data = bytearray(framed())
    data[8] = 2
    with pytest.raises(objects.UnknownFrame, match="version 2"):
        read(bytes(data))
    data = bytearray(framed())
    data[10] = 99
    with pytest.raises(objects.UnknownFrame, match="codec 99"):
        read(bytes(data))


def test_lengths_of_a_hostile_header_are_bounded():
    data = bytearray(framed())
    data[44:52] = b"\xff" * 8
    with pytest.raises(FrameError, match="longer than its page"):
        read(bytes(data))
    with pytest.raises(ValueError, match="do not fit"):
        Frame(KEY, "x" * 5000, "none", 1, 1).header()


@pytest.mark.parametrize(
    "key",
    [
        KEY,
        ChunkKey("m", bytes(32), 0),
        ChunkKey("a_b_c", b"\1" * 32, 0xFFFFFFFF, 0x1F),
        ChunkKey("x" * 100, bytes(32), 1, 0, "s_1.bin"),
    ],
)
def test_names_and_back(key):
    assert objects.parse_name(objects.file_name(key)) == key


def test_the_name_is_the_stock_adapters():
    assert objects.file_name(ChunkKey("a/b", b"\xab" * 32, 16777472)) == f"a--b_01000100_0_{'ab' * 32}.bin"


@pytest.mark.parametrize(
    "name",
    [
        *("", "x.bin", "kvp-0.json", "lmcache-server.pid", "m_01000100_0_zz.bin"),
        f"m_1_0_{'ab' * 32}.bin",
        f"m_01000100_0_{'ab' * 32}.bin.tmp.1f",
        f"m_01000100_0_{'ab' * 32}@a/b.bin",
        f"m_01000100_00_{'ab' * 32}.bin",
    ],
)
def test_what_is_no_chunk_is_none(name):
    assert objects.parse_name(name) is None


def test_temp_names():
    name = objects.file_name(KEY)
    assert objects.is_temp(f"{name}.tmp.0123abcd")
    assert not objects.is_temp(name)
    assert not objects.is_temp("x.tmp.1")
