"""Scatter, gather and sums in host memory, against a copy of one page at a time."""

import numpy as np
import pytest
import torch

from flatcake.io.paged import PagedKV
from flatcake.kernels.checksum import sum_bytes
from flatcake.kernels.hostcopy import HostPages, gather_segments, scatter_segments, sum_segments

PAGES, PER_BLOCK, BLOCKS = 20, 2, 6

LAYOUTS = {
    "K and V": lambda: [[torch.zeros(PAGES, 4, 6, dtype=torch.int16), torch.zeros(PAGES, 4, 6, dtype=torch.int16)]] * 1,
    "rows": lambda: [[torch.zeros(2, PAGES, 4, 8, dtype=torch.int16).movedim(1, 0)]],
    "two layers, words of 4 bytes": lambda: [
        [torch.zeros(PAGES, 132, dtype=torch.uint8)],
        [torch.zeros(PAGES, 3, dtype=torch.int32), torch.zeros(PAGES, 40, dtype=torch.uint8)],
    ],
    "rows with holes": lambda: [[torch.zeros(PAGES, 4, 16, dtype=torch.int32)[..., :5]]],
}


class Bench:
    """Tensors, their description, a slot of random bytes, and segments of all blocks of all layers."""

    def __init__(self, name: str) -> None:
        self.tensors = LAYOUTS[name]()
        self.kv = PagedKV.of_layers(self.tensors, page_tokens=1)
        self.geometry = self.kv.geometry(PER_BLOCK)
        self.host = HostPages.of(self.geometry, self.kv.host_views())
        self.rng = np.random.default_rng(1)
        segments, at = [], 0
        for layer in range(self.geometry.layer_count):
            for first, count in ((3, 3), (0, 2), (2, 1)):  # In no order of the request.
                segments.append((at, layer, first, count))
                at += count * self.geometry.piece_bytes(layer)
        self.segments = np.array(segments, np.int64)
        self.slot = self.rng.integers(0, 256, at, dtype=np.uint8)
        self.pages = self.rng.permutation(PAGES)[: BLOCKS * PER_BLOCK].reshape(BLOCKS, PER_BLOCK)
        self.fill()

    def fill(self) -> None:
        for tensor in (part for layer in self.tensors for part in layer):
            tensor.copy_(torch.from_numpy(self.rng.integers(0, 100, tensor.shape)))

    def parts(self):
        """Per page of each piece: layer, component, page, and its bytes in the slot as a view."""
        for offset, layer, first, count in self.segments.tolist():
            for nth in range(count):
                start = offset + nth * self.geometry.piece_bytes(layer)
                for part, (at, component) in enumerate(
                    zip(self.geometry.component_offsets(layer), self.geometry.layers[layer], strict=True)
                ):
                    for number, page in enumerate(self.pages[first + nth].tolist()):
                        begin = start + at + number * component.page_bytes
                        yield layer, part, page, self.slot[begin : begin + component.page_bytes]

    def page(self, layer: int, part: int, page: int) -> bytes:
        return self.tensors[layer][part][page].contiguous().view(torch.uint8).numpy().tobytes()

    def snapshot(self) -> dict[tuple[int, int, int], bytes]:
        return {
            (layer, part, page): self.page(layer, part, page)
            for layer, parts in enumerate(self.tensors)
            for part in range(len(parts))
            for page in range(PAGES)
        }


@pytest.fixture(params=LAYOUTS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


@pytest.mark.parametrize("holes", [0, 1, 5, 12])
def test_scatter_writes_the_named_pages_and_no_other(bench: Bench, holes: int) -> None:
    bench.pages.reshape(-1)[bench.rng.permutation(BLOCKS * PER_BLOCK)[:holes]] = -1
    wanted = bench.snapshot()
    before = dict(wanted)
    wanted |= {(layer, part, page): view.tobytes() for layer, part, page, view in bench.parts() if page >= 0}
    assert (wanted == before) == (holes == 12)
    scatter_segments(bench.slot, bench.segments, bench.pages, bench.host)
    assert bench.snapshot() == wanted


def test_gather_fills_the_pieces_and_leaves_their_padding(bench: Bench) -> None:
    before, pools = bench.slot.copy(), bench.snapshot()
    gather_segments(bench.slot, bench.segments, bench.pages, bench.host)
    assert not np.array_equal(bench.slot, before)
    written = np.zeros(len(before), bool)
    for layer, part, page, view in bench.parts():
        assert view.tobytes() == pools[layer, part, page]
        start = view.ctypes.data - bench.slot.ctypes.data
        written[start : start + len(view)] = True
    assert (bench.slot[~written] == before[~written]).all()
    assert bench.snapshot() == pools


def test_gather_undoes_scatter(bench: Bench) -> None:
    sent = bench.slot.copy()
    scatter_segments(bench.slot, bench.segments, bench.pages, bench.host)
    for *_, view in bench.parts():
        view[:] = 0
    gather_segments(bench.slot, bench.segments, bench.pages, bench.host)
    assert np.array_equal(bench.slot, sent)


def test_sums_are_those_of_the_payload_in_the_order_of_the_pieces(bench: Bench) -> None:
    pieces = int(bench.segments[:, 3].sum())
    seeds = bench.rng.integers(0, 2**32, pieces, dtype=np.uint32)
    wanted = []
    for offset, layer, _, count in bench.segments.tolist():
        for nth in range(count):
            start, total, word = offset + nth * bench.geometry.piece_bytes(layer), 0, 0
            for at, component in zip(
                bench.geometry.component_offsets(layer), bench.geometry.layers[layer], strict=True
            ):
                size = component.page_bytes * PER_BLOCK
                payload = bench.slot[start + at : start + at + size]
                total += int(sum_bytes(payload.tobytes(), int(seeds[len(wanted)]), first_word=word)[0])
                word += -(-size // 8)
            wanted.append(total % 2**32)
    found = sum_segments(bench.slot, bench.segments, seeds, bench.host)
    assert found.dtype == np.uint32 and found.tolist() == wanted
    bench.slot[bench.segments[0, 0]] ^= 1
    again = sum_segments(bench.slot, bench.segments, seeds, bench.host)
    assert (again != found).tolist() == [True] + [False] * (pieces - 1)
