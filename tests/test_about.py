"""What a manifest says of its store: it comes back whole, or not at all."""

import random
from dataclasses import replace

from flatcake.about import About, decode_about, encode_about
from flatcake.geometry import Component, Geometry
from flatcake.keys import FORMAT_VERSION, Identity
from flatcake.manifest import origin_digest

GEOMETRY = Geometry(
    block_tokens=32,
    page_tokens=16,
    layers=((Component("k", 4096), Component("v", 4096)), (Component("latent", 36),)),
    dtype="bf16",
)
IDENTITY = Identity(model="m", revision="r", kv_dtype="bf16", layout=f"x/{GEOMETRY.fingerprint()}", block_tokens=32)
ABOUT = About(
    identity=IDENTITY,
    geometry=GEOMETRY,
    pool_file_bytes=1 << 30,
    directories=("/a", "/b\u00e9"),
    rank=3,
    dram_bytes=1 << 33,
    verify=True,
)


def test_it_comes_back_as_it_was() -> None:
    for about in (ABOUT, replace(ABOUT, verify=False, dram_bytes=0), replace(ABOUT, directories=("/odd\udcff",))):
        found = decode_about(encode_about(about))
        assert found == about and found.geometry.fingerprint() == GEOMETRY.fingerprint()


def test_its_origin_is_that_of_the_rows() -> None:
    assert ABOUT.origin() == origin_digest(IDENTITY.digest(), 1 << 30, 2, 3, FORMAT_VERSION)
    changes = ({"rank": 4}, {"pool_file_bytes": 1 << 29}, {"directories": ("/a",)})
    assert len({ABOUT.origin(), *(replace(ABOUT, **change).origin() for change in changes)}) == 4  # type: ignore[arg-type]
    assert replace(ABOUT, directories=("/moved", "/elsewhere")).origin() == ABOUT.origin()


def test_damage_of_any_kind_is_none() -> None:
    whole, rng = encode_about(ABOUT), random.Random(3)
    for body in (
        None,
        3,
        "text",
        b"",
        whole[:15],
        whole[:-1],
        whole + b" ",
        b"\0" * 16 + b"{}",
        b"x" * 16 + b"[" * 9999,
    ):
        assert decode_about(body) is None
    for _ in range(400):
        body = bytearray(whole)
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        assert decode_about(bytes(body)) is None
