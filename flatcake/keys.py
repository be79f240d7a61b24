"""Block keys: chained 128-bit digests of identity, salt, extra and all tokens so far.  Paper §3.2.

Equal keys mean equal bytes in every layer, so everything that changes the bytes goes in.  The keys of a
process are those of any other: Python's own `hash` is never used.  A salt is a secret of its tenant: it
is digested at once, neither kept nor shown.
Read path:  tokens -> [keys] -> index -> plan
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flatcake.errors import ConfigError, ShapeError
from flatcake.fields import check_types, require

FORMAT_VERSION = 1
"""Version of the stored bytes and of this digest; raised when either changes."""

_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
_TOKEN_LIMIT = 1 << (8 * _TOKEN_BYTES)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything about a store that changes the bytes of a block (its tokens, salt and extra aside)."""

    model: str
    """Name of the model."""
    revision: str
    """Fingerprint of its weights."""
    kv_dtype: str
    """Element type of the KV cache, scales included."""
    layout: str
    """Description or digest of the byte layout of one block."""
    block_tokens: int
    """Tokens in one block."""
    tp_size: int = 1
    """Tensor-parallel ranks: each holds its share of the heads."""
    pp_size: int = 1
    """Pipeline-parallel ranks: each holds its share of the layers."""
    weight_version: int = 0
    """Raised each time that the weights are updated in place."""
    format_version: int = FORMAT_VERSION
    """Version of the stored bytes."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model", "revision", "kv_dtype", "layout"):
            require(self, name, _has_utf8(getattr(self, name)), "text that is not empty")
        for name in ("block_tokens", "tp_size", "pp_size", "format_version"):
            require(self, name, getattr(self, name) >= 1, "1 or more")
        require(self, "weight_version", self.weight_version >= 0, "0 or more")

    def digest(self) -> bytes:
        """Digest all fields with their names as 16 bytes, equal in every process and on every machine."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        parts = [text for field in fields(self) for text in (field.name, str(getattr(self, field.name)))]
        return _digest(b"flatcake.ident", *(part.encode() for part in parts))


class Chain:
    """The keys of one growing token sequence: each token is hashed once.  For one thread.

    Args:
        identity: What the bytes depend on besides the sequence.
        salt: Secret that separates tenants; chains of different salts share no key.
        extra: What else this request's bytes depend on, such as its adapter or image digests.

    Raises:
        ConfigError: `salt` or `extra` is not `bytes`.
    """

    def __init__(self, identity: Identity, *, salt: bytes = b"", extra: bytes = b"") -> None:
        for name, value in (("salt", salt), ("extra", extra)):
            if not isinstance(value, bytes):  # The value itself is never shown.
                raise ConfigError(f"{name}: expected bytes, got {type(value).__name__}")
        self._block_bytes = identity.block_tokens * _TOKEN_BYTES
        self._last = _digest(b"flatcake.root", identity.digest(), salt, extra)
        self._rest = b""

    def extend(self, tokens: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.uint64]:
        """Append tokens, and return the keys of the blocks that they fill.

        Args:
            tokens: One dimension of integers, each at least 0 and below ``2**32``.

        Returns:
            uint64 [blocks, 2]: the first and the last 8 bytes of each digest, little endian.  Tokens
            beyond the last full block wait for the next call.

        Raises:
            ShapeError: `tokens` is something else; the chain is unchanged then.

        Cost: O(len(tokens)); about 1 µs a block of 64 tokens.
        """
        data = memoryview(self._rest + _token_bytes(tokens))
        step, last = self._block_bytes, self._last
        end = len(data) // step * step
        digests = []
        blake2b = hashlib.blake2b
        for start in range(0, end, step):
            last = blake2b(last + data[start : start + step], digest_size=_DIGEST_BYTES).digest()
            digests.append(last)
        self._last, self._rest = last, bytes(data[end:])
        return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2).astype(np.uint64)


def chain(
    identity: Identity, tokens: Sequence[int] | npt.ArrayLike, *, salt: bytes = b"", extra: bytes = b""
) -> npt.NDArray[np.uint64]:
    """Compute the keys of all full blocks of a sequence.

    Key i digests key i - 1 and the tokens of block i; before the first stands a digest of identity,
    salt and extra.  Equal keys therefore mean equal prefixes.

    Args:
        identity: What the bytes depend on besides the sequence.
        tokens: As for `Chain.extend`.
        salt: Secret that separates tenants.
        extra: What else this request's bytes depend on.

    Returns:
        uint64 [blocks, 2], one row per full block; tokens beyond the last full block have none.

    Raises:
        ShapeError: `tokens` is not one dimension of integers from 0 to ``2**32 - 1``.
        ConfigError: `salt` or `extra` is not `bytes`.

    Cost: O(len(tokens)).  Source: paper §3.2, key.
    """
    return Chain(identity, salt=salt, extra=extra).extend(tokens)


def keys_of_digests(identity: Identity, digests: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Turn an engine's own block digests into keys: for engines that chain tokens, salt and extras themselves.

    Args:
        identity: What the bytes depend on besides the sequence.
        digests: One per block, in order.  Each must be a cryptographic digest of everything that the block's bytes
            depend on besides the identity: all tokens so far, the tenant's salt, adapter and image digests.

    Returns:
        uint64 [blocks, 2], as from `chain`; keys of the two never meet.

    Cost: about 1 µs a block.
    """
    root = _digest(b"flatcake.engine", identity.digest())
    keys = [hashlib.blake2b(root + digest, digest_size=_DIGEST_BYTES).digest() for digest in digests]
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2).astype(np.uint64)


def _digest(purpose: bytes, *parts: bytes) -> bytes:
    """Digest parts with their lengths, so that no byte can move from one part to the next."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=purpose)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _token_bytes(tokens: Sequence[int] | npt.ArrayLike) -> bytes:
    """Check tokens and write them as 4 bytes each, little endian; their values are never shown."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError):
        raise ShapeError(f"tokens: expected one dimension of integers, got {type(tokens).__name__}") from None
    if array.ndim != 1:
        raise ShapeError(f"tokens: expected one dimension, got shape {array.shape}")
    if array.size == 0:
        return b""
    if array.dtype.kind not in "iu":
        raise ShapeError(f"tokens: expected integers from 0 to {_TOKEN_LIMIT - 1}, got dtype {array.dtype}")
    if not 0 <= int(np.bitwise_or.reduce(array)) < _TOKEN_LIMIT:  # One that is negative or too large makes it so.
        raise ShapeError(f"tokens: expected integers from 0 to {_TOKEN_LIMIT - 1}, got one outside")
    return array.astype("<u4").tobytes()


def _has_utf8(text: str) -> bool:
    return bool(text) and not any("\ud800" <= char <= "\udfff" for char in text)  # Lone surrogates have none.
