"""vLLM's hashes of a request's blocks as the store's keys.  Pure."""

from dataclasses import dataclass

from flatcake.engines.vllm.signals import EngineRequest
from flatcake.keys import Identity, keys_of_digests
from flatcake.messages import KeyArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens in a block of the store, and in one of vLLM, which hashes each."""

    store: int
    engine: int

    @property
    def ratio(self) -> int:
        """Blocks of vLLM in one of the store."""
        return self.store // self.engine


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Keys under one identity."""

    identity: Identity
    sizes: Sizes

    def keys(self, request: EngineRequest, blocks: int) -> KeyArray:
        """Keys of the leading blocks: each the last of vLLM's hashes in it, which chain all tokens and extras."""
        return keys_of_digests(self.identity, self.digests(request, blocks))

    def digests(self, request: EngineRequest, blocks: int) -> list[bytes]:
        """The hashes that they come from."""
        step = self.sizes.ratio
        return [bytes(digest) for digest in request.block_hashes[step - 1 : blocks * step : step]]
