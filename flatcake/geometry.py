"""What one block of KV cache is made of: layers, components, pages, and the bytes of each.

Pure: sizes only, no tensors and no addresses.  `layout` places pieces in extents from it, `io.paged` binds
it to an engine's tensors, `keys.Identity` carries its fingerprint.
"""

import hashlib
from dataclasses import dataclass

from flatcake.errors import ShapeError
from flatcake.units import DIRECT_BYTES, align_up

PART_ALIGN_BYTES = 16
"""Components start at multiples of this inside a piece, so that kernels can use 16-byte accesses."""


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of state in one layer: K, V, an MLA latent, an index, or K and V in one stretch."""

    name: str
    page_bytes: int
    """Bytes of one page, taken as they are: dtype and inner layout belong to the identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of a block: `layers[l]` lists the components of layer l, in the order they are stored."""

    block_tokens: int
    page_tokens: int
    layers: tuple[tuple[Component, ...], ...]
    dtype: str = ""
    """Free text for the identity, e.g. ``"bfloat16"``; bytes are opaque to the store."""

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.block_tokens < 1 or self.block_tokens % self.page_tokens:
            raise ShapeError(
                f"block of {self.block_tokens} tokens, page of {self.page_tokens}: "
                "expected a whole number of pages in a block"
            )
        if not self.layers or not all(self.layers):
            raise ShapeError(f"{len(self.layers)} layers: expected at least one, each with a component")
        for layer, components in enumerate(self.layers):
            for component in components:
                if component.page_bytes < 4 or component.page_bytes % 4:
                    raise ShapeError(
                        f"layer {layer} {component.name}: {component.page_bytes} bytes a page; expected a multiple of 4"
                    )

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def component_offsets(self, layer: int) -> tuple[int, ...]:
        """Where each component of `layer` starts in its piece, in bytes."""
        offsets, at = [], 0
        for component in self.layers[layer]:
            offsets.append(at)
            at = align_up(at + component.page_bytes * self.pages_per_block, PART_ALIGN_BYTES)
        return tuple(offsets)

    def payload_bytes(self, layer: int) -> int:
        """Bytes of one piece of `layer` that the engine wrote, without padding."""
        return sum(component.page_bytes for component in self.layers[layer]) * self.pages_per_block

    def piece_bytes(self, layer: int) -> int:
        """Bytes of one piece of `layer` on a medium, padded for direct I/O."""
        last = self.layers[layer][-1].page_bytes * self.pages_per_block
        return align_up(self.component_offsets(layer)[-1] + last, DIRECT_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, padding included."""
        return sum(self.piece_bytes(layer) for layer in range(self.layer_count))

    @property
    def block_payload_bytes(self) -> int:
        """Bytes of one block over all layers, padding left out."""
        return sum(self.payload_bytes(layer) for layer in range(self.layer_count))

    def fingerprint(self) -> str:
        """A digest of everything above, for `Identity.layout` and the headers of files."""
        layers = [[(component.name, component.page_bytes) for component in layer] for layer in self.layers]
        text = repr((self.block_tokens, self.page_tokens, self.dtype, layers))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
