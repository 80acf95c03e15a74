"""The state of a stream as plain data in a checkpoint, and digests of its samples, which show whether a
stream goes on where another one stopped."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from secc.runtime.host.tensor_bytes import view_bytes

_DIGESTED_BYTES = 1 << 16  # of each value: all of a smaller one, else its two ends
_JSON, _TORCH = "json", "torch"


def encode_state(state: Any) -> dict[str, Any] | None:
    """Returns what `state_dict()` gave as JSON data: as it is, or as the bytes of `torch.save`. None for what
    could not be loaded from there without running code."""
    try:
        if json.loads(json.dumps(state)) == state:
            return {_JSON: state}
    except (TypeError, ValueError, RecursionError):
        pass
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:  # whatever pickling raises
        return None
    return {_TORCH: base64.b64encode(buffer.getvalue()).decode()}


def decode_state(encoded: Mapping[str, Any]) -> Any:
    """Returns the state that `encode_state` encoded."""
    if _JSON in encoded:
        return encoded[_JSON]
    return torch.load(io.BytesIO(base64.b64decode(encoded[_TORCH])), weights_only=True)


def digest_value(value: Any, start: int = 0) -> int:
    """Returns a CRC-32 of a sample: of its keys, of types and shapes, and of contents, but for the middle of
    large ones. The same in every process."""
    if isinstance(value, Mapping):
        entries: Mapping[Any, Any] = value
        for key, one in entries.items():
            start = digest_value(one, _crc(repr(key).encode(), start))
        return start
    if isinstance(value, list | tuple):
        members: Sequence[Any] = value
        if all(isinstance(v, int | float) for v in members):
            return _crc(repr(members).encode(), start)
        for one in members:
            start = digest_value(one, start)
        return _crc(str(len(members)).encode(), start)
    if isinstance(value, str):
        return _crc(value.encode(errors="surrogatepass"), _crc(b"text", start))
    if isinstance(value, bytes | bytearray | memoryview):
        return _crc(value, _crc(b"bytes", start))
    if isinstance(value, torch.Tensor):
        return _digest_tensor(value, start)
    if value is None or isinstance(value, bool | int | float | complex):
        return _crc(repr(value).encode(), start)
    return _digest_object(value, start)


def _digest_object(value: Any, start: int) -> int:
    """Digests arrays of NumPy and pictures of PIL; of other objects only the type."""
    kind, size = getattr(value, "dtype", None), getattr(value, "shape", getattr(value, "size", None))
    if str(kind) != "object" and size is not None and callable(getattr(value, "tobytes", None)):
        return _crc(value.tobytes(), _crc(f"{kind} {size}".encode(), start))
    return _crc(type(value).__qualname__.encode(), start)


def _digest_tensor(value: torch.Tensor, start: int) -> int:
    start = _crc(f"{value.dtype} {tuple(value.shape)}".encode(), start)
    if value.layout != torch.strided or value.device.type != "cpu" or not value.numel():
        return start
    return _crc(view_bytes(value).numpy().data, start)


def _crc(data: bytes | bytearray | memoryview, start: int) -> int:
    if len(data) > _DIGESTED_BYTES:
        half = _DIGESTED_BYTES // 2
        start = zlib.crc32(str(len(data)).encode(), zlib.crc32(data[-half:], start))
        data = data[:half]
    return zlib.crc32(data, start)
