"""Changes as vLLM's KV events, which routers listen to."""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from flatcake.engines.vllm.changes import Removed, Stored
from flatcake.gva import Medium

_MEDIA = {Medium.DRAM: MEDIUM_CPU, Medium.SSD: MEDIUM_STORAGE}
LOCAL = "LOCAL"


def events_of(changes: Iterable[Stored | Removed], block_tokens: int) -> Iterator[Any]:
    """One event a change, in order."""
    for change in changes:
        hashes = [maybe_convert_block_hash(BlockHash(digest)) for digest in change.digests]
        medium = _MEDIA[change.medium]
        if isinstance(change, Removed):
            yield BlockRemoved(block_hashes=hashes, medium=medium, locality=LOCAL)
            continue
        parent = change.parent
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=change.tokens,
            block_size=block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=change.adapter,
            locality=LOCAL,
            session_id=change.session,
        )
