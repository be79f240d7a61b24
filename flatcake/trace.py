"""NVTX ranges, one domain for the whole library: `with span("restore.tile", size_bytes=n): ...`.

Names are `component.verb` and never vary; numbers travel in the payload.  Costs under a microsecond when
no profiler is attached.
"""

from contextlib import AbstractContextManager

import nvtx

_DOMAIN = "flatcake"


def span(name: str, *, size_bytes: int = 0) -> AbstractContextManager[None]:
    """Open an NVTX range called `name`, with a size in bytes as its payload."""
    opened: AbstractContextManager[None] = nvtx.annotate(name, domain=_DOMAIN, payload=size_bytes)
    return opened
