"""Rows of keys and of addresses, as the index takes them: checked, split, compared and counted.

Pure.  Keys are uint64 [n, 2], addresses uint64 [n].
"""

import numpy as np
import numpy.typing as npt

from flatcake.errors import AddressError, ShapeError
from flatcake.gva import GVA_LIMIT, MEDIUM_LIMIT, MEDIUM_SHIFT

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


def halves(keys: Words) -> tuple[Words, Words]:
    """Check keys and split them into contiguous columns."""
    if not isinstance(keys, np.ndarray) or keys.dtype != np.uint64 or keys.ndim != 2 or keys.shape[1] != 2:
        raise ShapeError(f"keys: expected uint64 [n, 2], got {_described(keys)}")
    return np.ascontiguousarray(keys[:, 0]), np.ascontiguousarray(keys[:, 1])


def check_gvas(gvas: Words, count: int) -> None:
    """Refuse what is not one address for each of `count` keys."""
    if not isinstance(gvas, np.ndarray) or gvas.dtype != np.uint64 or gvas.shape != (count,):
        raise ShapeError(f"gvas: expected uint64 [{count}], got {_described(gvas)}")
    if count and int(gvas.max()) >= GVA_LIMIT:
        raise AddressError(f"gvas: {int(gvas.max()):#x} is no address; expected values that gva.encode returns")


def are_distinct(first: Words) -> bool:
    """Whether no two keys can be equal, since their first halves differ."""
    in_order = np.sort(first)
    return bool((in_order[1:] != in_order[:-1]).all())


def by_medium(gvas: Words) -> Numbers:
    """Count addresses by their medium."""
    return np.bincount((gvas >> np.uint64(MEDIUM_SHIFT)).astype(np.int64), minlength=MEDIUM_LIMIT)


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def grouped(first: Words, last: Words) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Sort rows by key, equal keys in their given order, and mark where each distinct key starts."""
    order = np.lexsort((last, first))
    starts = np.ones(len(order), np.bool_)
    starts[1:] = np.diff(first[order]).astype(np.bool_) | np.diff(last[order]).astype(np.bool_)
    return order, starts
