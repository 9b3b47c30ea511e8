"""Fingerprint of a model directory: tells two sets of weights apart without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import BinaryIO, Dict, List, Tuple

#: Files that hold weights, by what vLLM's loaders look for.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Small files that decide what the weights mean; generation defaults and READMEs do not.
MEANING_NAMES = ("config.json", "params.json", "preprocessor_config.json")
#: vLLM takes any file that ends in one of the quantisers' names (``get_quant_config``).
MEANING_SUFFIXES = (".index.json", ".py", "quant_config.json", "quantize_config.json", "processor_config.json")

SAMPLE_BYTES = 4096
#: Samples of a file that has no table of tensors.
SAMPLES = 256
#: Largest safetensors header that its own library accepts, in bytes.
HEADER_MAX = 100_000_000
_BUFFER_BYTES = 1 << 24


class WeightsError(ValueError):
    """The directory cannot be fingerprinted. The message names the file and the reason."""


def model_files(model_dir: str) -> Tuple[List[str], List[str]]:
    """Names of the weight files and of the files that give them meaning, sorted.

    Raises :class:`WeightsError` for a directory without either.
    """
    try:
        names = sorted(os.listdir(model_dir))
    except OSError as error:
        raise WeightsError(f"{model_dir}: {error.strerror}") from None
    names = [name for name in names if os.path.isfile(os.path.join(model_dir, name))]
    weights = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    meaning = [name for name in names if name in MEANING_NAMES or name.endswith(MEANING_SUFFIXES)]
    if not weights or "config.json" not in meaning:
        raise WeightsError(f"{model_dir} has no weights ({', '.join(WEIGHT_SUFFIXES)}) beside a config.json")
    return weights, meaning


def fingerprint(model_dir: str) -> str:
    """64 hex digits over what the model is, without reading all of it.

    Hashed are the small files that give the weights meaning, whole, and of each weight file
    its name, its size in bytes, the safetensors header and :data:`SAMPLE_BYTES` from the middle
    of every tensor. A fine-tuned model under the same names and sizes differs in those; a
    single changed weight may not (see :func:`content_sha256`). A model of 90,000 tensors costs
    some hundred MB of small reads. Code in directories below is not seen. Raises :class:`WeightsError`.
    """
    weights, meaning = model_files(model_dir)
    document: Dict[str, List[object]] = {}
    for name in meaning:
        document[name] = [_sha256(os.path.join(model_dir, name))]
    for name in weights:
        path = os.path.join(model_dir, name)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                document[name] = [size, _sampled(file, size, name.endswith(".safetensors"))]
        except OSError as error:
            raise WeightsError(f"{path}: {error.strerror}") from None
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def content_sha256(model_dir: str) -> str:
    """64 hex digits over every byte of the model: as slow as the disk. Raises :class:`WeightsError`."""
    weights, meaning = model_files(model_dir)
    document = {name: _sha256(os.path.join(model_dir, name)) for name in (*weights, *meaning)}
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(_BUFFER_BYTES), b""):
                digest.update(block)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None
    return digest.hexdigest()


def _sampled(file: BinaryIO, size: int, has_header: bool) -> str:
    digest = hashlib.sha256()
    places = _tensor_places(file, size, digest) if has_header else []
    if not places:
        step = max(size // SAMPLES, 1)
        places = [(start, min(start + step, size)) for start in range(0, size, step)]
    for start, end in places:
        length = min(SAMPLE_BYTES, end - start)
        file.seek(start + (end - start - length) // 2)
        digest.update(file.read(length))
    return digest.hexdigest()


def _tensor_places(file: BinaryIO, size: int, digest: hashlib._Hash) -> List[Tuple[int, int]]:
    """Byte ranges of the tensors; the header that lists them goes into the digest."""
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if length > min(HEADER_MAX, size - 8):
        raise WeightsError(f"{file.name} is not a safetensors file: its header would be {length} bytes long")
    header = file.read(length)
    digest.update(header)
    try:
        table = json.loads(header)
        ranges = [tensor["data_offsets"] for name, tensor in table.items() if name != "__metadata__"]
        places = [(8 + length + int(start), 8 + length + int(end)) for start, end in ranges]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise WeightsError(f"{file.name} is not a safetensors file: its header is no table of tensors") from None
    if any(not 8 + length <= start <= end <= size for start, end in places):
        raise WeightsError(f"{file.name} is cut off: its header lists tensors beyond its {size} bytes")
    return sorted(places)
