"""FC-GVA: one 64-bit address for every block on every medium.  Paper §3.2.

Bits 63:60 hold the medium, 59:48 the node, 47:0 the byte offset.  The value is an address, never a key.
Pure integer arithmetic: what lies at an address, and whether it is allocated, is not known here.
Read path:  keys -> index -> [gva] -> plan -> media
"""

import operator
from enum import IntEnum
from typing import NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from flatcake.errors import AddressError


class Medium(IntEnum):
    """Where bytes live.  Media are peers: none caches another.  Values 2 to 15 are reserved."""

    DRAM = 0
    SSD = 1


class Address(NamedTuple):
    """The three fields of an address."""

    medium: Medium
    node: int
    offset_bytes: int


NODE_SHIFT = 48
MEDIUM_SHIFT = 60
MEDIUM_LIMIT = len(Medium)
NODE_LIMIT = 1 << (MEDIUM_SHIFT - NODE_SHIFT)
OFFSET_BYTES_LIMIT = 1 << NODE_SHIFT
GVA_LIMIT = MEDIUM_LIMIT << MEDIUM_SHIFT
"""Every valid address is below this; `2**64 - 1` is therefore never one."""


def encode(medium: SupportsIndex, node: SupportsIndex, offset_bytes: SupportsIndex) -> int:
    """Pack three fields into an address; DRAM addresses are exactly those below ``2**60``.

    Raises:
        AddressError: A field is no integer, negative, too large, or a reserved medium.
    """
    return (
        _field("medium", medium, MEDIUM_LIMIT) << MEDIUM_SHIFT
        | _field("node", node, NODE_LIMIT) << NODE_SHIFT
        | _field("offset_bytes", offset_bytes, OFFSET_BYTES_LIMIT)
    )


def decode(gva: SupportsIndex) -> Address:
    """Unpack an address; the inverse of `encode`.

    Raises:
        AddressError: No integer, negative, or of a reserved medium.
    """
    value = _field("gva", gva, GVA_LIMIT)
    return Address(
        Medium(value >> MEDIUM_SHIFT),
        value >> NODE_SHIFT & (NODE_LIMIT - 1),
        value & (OFFSET_BYTES_LIMIT - 1),
    )


def encode_array(medium: npt.ArrayLike, node: npt.ArrayLike, offsets_bytes: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """`encode` for whole arrays.

    Args:
        medium: Integers, one or one per offset.
        node: Integers, one or one per offset.
        offsets_bytes: Integers of any shape.

    Returns:
        uint64 addresses in the common shape of the three.

    Raises:
        AddressError: As in `encode`, or the shapes do not go together.
    """
    media = _fields("medium", medium, MEDIUM_LIMIT)
    nodes = _fields("node", node, NODE_LIMIT)
    offsets = _fields("offset_bytes", offsets_bytes, OFFSET_BYTES_LIMIT)
    try:
        np.broadcast_shapes(media.shape, nodes.shape, offsets.shape)
    except ValueError:
        raise AddressError(
            f"medium {media.shape}, node {nodes.shape}, offset_bytes {offsets.shape}: expected shapes that broadcast"
        ) from None
    return np.asarray(media << np.uint64(MEDIUM_SHIFT) | nodes << np.uint64(NODE_SHIFT) | offsets)


def decode_array(
    gvas: npt.ArrayLike,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """`decode` for whole arrays.

    Returns:
        Media (uint8), nodes (uint16) and byte offsets (int64), each in the shape of `gvas`.

    Raises:
        AddressError: As in `decode`.
    """
    values = _fields("gva", gvas, GVA_LIMIT)
    return (
        np.asarray(values >> np.uint64(MEDIUM_SHIFT)).astype(np.uint8),
        np.asarray(values >> np.uint64(NODE_SHIFT) & np.uint64(NODE_LIMIT - 1)).astype(np.uint16),
        np.asarray(values & np.uint64(OFFSET_BYTES_LIMIT - 1)).astype(np.int64),
    )


def _field(name: str, value: SupportsIndex, limit: int) -> int:
    """Check one scalar; a bool is refused because it is never an address field on purpose."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool | np.bool_) or not 0 <= number < limit:
        raise AddressError(f"{name}={value!r}: expected an integer from 0 to {limit - 1:#x}")
    return number


def _fields(name: str, values: npt.ArrayLike, limit: int) -> npt.NDArray[np.uint64]:
    """Check an array of one field and widen it; an empty one may have any dtype, as `[]` has."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise AddressError(f"{name}: expected an array of integers, got {type(values).__name__}") from None
    if array.size:
        if array.dtype.kind not in "iu":
            raise AddressError(f"{name}: expected integers from 0 to {limit - 1:#x}, got dtype {array.dtype}")
        for worst in (int(array.max()), int(array.min()) if array.dtype.kind == "i" else 0):
            if not 0 <= worst < limit:
                raise AddressError(f"{name}={worst}: expected integers from 0 to {limit - 1:#x}")
    return array.astype(np.uint64, copy=False)
