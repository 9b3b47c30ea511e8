"""Cache files: the name that LMCache gives a chunk, and the frame that makes its bytes checkable.

A framed file is one page of header and the stored bytes, padded to whole pages. The header
carries the whole key and the layout, so that a file under another name, or made for another
layout, is found out; the CRC covers the header and the stored bytes, so that it can be
verified without knowing the codec.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Callable, Optional, Tuple

PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
MAGIC = b"KVPFRAME"
FORMAT_VERSION = 1

#: Codecs by their number in the frame. A number is never given to another codec.
CODECS = {"none": 0, "zstd": 1, "lz4": 2}
_CODEC_NAMES = {number: name for name, number in CODECS.items()}

#: magic, version, codec, unused, CRC-32C, raw and stored length (bytes), kv_rank, object
#: group, and the lengths of what follows: chunk hash, model name, salt, layout.
_HEADER = struct.Struct("<8sHBBIQQIIHHHH")
_CRC_OFFSET = 12

#: crc32c(data, start) of the package crc32c.
Crc = Callable[[memoryview, int], int]


class FrameError(ValueError):
    """The file is no intact frame of this key. The message says what is wrong with it."""


class UnknownFrame(FrameError):
    """A version or codec of another release: a miss, and not ours to remove."""


@dataclass(frozen=True)
class ChunkKey:
    """What LMCache finds a chunk by (``lmcache.v1.distributed.api.ObjectKey``)."""

    model_name: str
    chunk_hash: bytes
    kv_rank: int
    object_group: int = 0
    salt: str = ""


_NAME = re.compile(r"([^@]+)_([0-9a-f]{8})_(0|[1-9a-f][0-9a-f]*)_([0-9a-f]{8,128})(?:@([^@/\\\0]{1,128}))?\.bin")
_TEMP = re.compile(r".+\.bin\.tmp\.[0-9a-f]+")
#: Longest name of a Linux file, in bytes.
NAME_MAX = 255


def file_name(key: ChunkKey) -> str:
    """Name of the chunk's file, as ``nixl_store_dynamic`` spells it (``_object_key_to_filename``)."""
    salt = f"@{key.salt}" if key.salt else ""
    return f"{spelled(key.model_name)}_{key.kv_rank:08x}_{key.object_group:x}_{key.chunk_hash.hex()}{salt}.bin"


def split_name(name: str) -> Optional[Tuple[str, bytes, int, int, str]]:
    """The parts of a chunk's file name in the order of :class:`ChunkKey`; None for another file."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    model, rank, group, chunk_hash, salt = match.groups()
    if len(chunk_hash) % 2:
        return None
    return model, bytes.fromhex(chunk_hash), int(rank, 16), int(group, 16), salt or ""


def split_hash(tail: str) -> Optional[bytes]:
    """The hash of ``HASH.bin``, None where it is not spelled as a chunk's name spells it."""
    try:
        chunk_hash = bytes.fromhex(tail[:-4])
    except ValueError:
        return None
    return chunk_hash if chunk_hash.hex() + ".bin" == tail else None


def parse_name(name: str) -> Optional[ChunkKey]:
    """The key of a file name; None for a file that is no chunk. ``a/b`` comes back as ``a--b``."""
    parts = split_name(name)
    return None if parts is None else ChunkKey(*parts)


def spelled(model_name: str) -> str:
    """The model name as file names have it, and so as anything has it that a scan finds again."""
    return model_name.replace("/", "--")


def base_model(model_name: str) -> str:
    """The name that was pinned: LMCache appends ``##...`` to it for some layouts
    (``get_dcp_decorated_model_name``)."""
    return model_name.split("##", 1)[0]


def is_temp(name: str) -> bool:
    """Whether the name is that of an unfinished write, ours or the stock adapter's."""
    return _TEMP.fullmatch(name) is not None


def padded(length: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-length // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class Frame:
    """A header. ``raw_length`` and ``stored_length`` are bytes; ``layout`` names shapes and dtypes."""

    key: ChunkKey
    layout: str
    codec: str
    raw_length: int
    stored_length: int
    crc: int = 0

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + padded(self.stored_length)

    def header(self) -> bytearray:
        """The page in front of the stored bytes. Raises ValueError for a key that no page can carry."""
        texts = [self.key.chunk_hash, self.key.model_name.encode(), self.key.salt.encode(), self.layout.encode()]
        page = bytearray(HEADER_BYTES)
        if _HEADER.size + sum(map(len, texts)) > HEADER_BYTES:
            raise ValueError(f"the key and layout of {file_name(self.key)[:100]} do not fit into {HEADER_BYTES} bytes")
        _HEADER.pack_into(
            page,
            0,
            *(MAGIC, FORMAT_VERSION, CODECS[self.codec], 0, self.crc, self.raw_length, self.stored_length),
            *(self.key.kv_rank, self.key.object_group, *map(len, texts)),
        )
        page[_HEADER.size : _HEADER.size + sum(map(len, texts))] = b"".join(texts)
        return page

    def sealed(self, stored: memoryview, crc32c: Crc) -> bytearray:
        """The page with the CRC over itself (with that field 0) and the stored bytes."""
        page = self.header()
        page[_CRC_OFFSET : _CRC_OFFSET + 4] = b"\0\0\0\0"
        crc = crc32c(stored, crc32c(memoryview(page), 0))
        page[_CRC_OFFSET : _CRC_OFFSET + 4] = crc.to_bytes(4, "little")
        return page


def read_header(page: memoryview) -> Frame:
    """The frame of a header page, whose CRC is not checked yet.

    Raises :class:`UnknownFrame` for a version or codec of another release, :class:`FrameError`
    for anything that no release wrote.
    """
    if len(page) < HEADER_BYTES:
        raise FrameError(f"the file has {len(page)} bytes, less than a header")
    magic, version, codec, _, crc, raw, stored, rank, group, *lengths = _HEADER.unpack_from(page, 0)
    if magic != MAGIC:
        raise FrameError("no frame: the file does not start with one")
    if version != FORMAT_VERSION:
        raise UnknownFrame(f"version {version} of the frame; known: {FORMAT_VERSION}")
    if codec not in _CODEC_NAMES:
        raise UnknownFrame(f"codec {codec}; known: {', '.join(CODECS)}")
    if _HEADER.size + sum(lengths) > HEADER_BYTES:
        raise FrameError("the header is longer than its page")
    texts, at = [], _HEADER.size
    for length in lengths:
        texts.append(bytes(page[at : at + length]))
        at += length
    try:
        model, salt, layout = (text.decode() for text in texts[1:])
    except UnicodeDecodeError:
        raise FrameError("a name in the header is no UTF-8") from None
    return Frame(ChunkKey(model, texts[0], rank, group, salt), layout, _CODEC_NAMES[codec], raw, stored, crc)


def check(frame: Frame, file_bytes: int, page: memoryview, stored: memoryview, crc32c: Crc) -> None:
    """Raises :class:`FrameError` where length or CRC are not those of the header.

    ``file_bytes`` is the size of the file, ``stored`` the bytes behind the header.
    """
    if file_bytes != frame.file_bytes:
        raise FrameError(f"the file has {file_bytes} bytes, its header says {frame.file_bytes}")
    blank = bytearray(page[:HEADER_BYTES])
    blank[_CRC_OFFSET : _CRC_OFFSET + 4] = b"\0\0\0\0"
    if crc32c(stored[: frame.stored_length], crc32c(memoryview(blank), 0)) != frame.crc:
        raise FrameError("the checksum does not match")


def expect(frame: Frame, key: ChunkKey, layout: str, raw_length: int) -> None:
    """Raises :class:`FrameError` where the file is of another key or layout than is asked for."""
    if frame.key != key:
        raise FrameError(f"the file holds {file_name(frame.key)}")
    if (frame.layout, frame.raw_length) != (layout, raw_length):
        raise FrameError(
            f"the file holds {frame.raw_length} bytes of {frame.layout}, {raw_length} of {layout} are asked for"
        )
