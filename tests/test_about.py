"""What a manifest says of its store: it comes back whole, or not at all."""

import hashlib
import json
import random
from dataclasses import replace

from flatcake.about import About, RankHomes, decode_about, encode_about
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
RANKS = tuple(RankHomes(rank, (f"/a/{rank}", f"/b/{rank}")) for rank in range(4))


def test_it_comes_back_as_it_was() -> None:
    for about in (
        ABOUT,
        replace(ABOUT, verify=False, dram_bytes=0),
        replace(ABOUT, directories=("/odd\udcff",)),
        replace(ABOUT, ranks=RANKS),
    ):
        found = decode_about(encode_about(about))
        assert found == about and found.geometry.fingerprint() == GEOMETRY.fingerprint()


def test_its_origin_is_that_of_the_rows() -> None:
    assert ABOUT.origin() == origin_digest(IDENTITY.digest(), 1 << 30, 2, 3, FORMAT_VERSION)
    changes = ({"rank": 4}, {"pool_file_bytes": 1 << 29}, {"directories": ("/a",)})
    assert len({ABOUT.origin(), *(replace(ABOUT, **change).origin() for change in changes)}) == 4  # type: ignore[arg-type]
    assert replace(ABOUT, directories=("/moved", "/elsewhere")).origin() == ABOUT.origin()


def test_under_a_coordinator_the_number_of_ranks_counts() -> None:
    about = replace(ABOUT, ranks=RANKS, rank=0, directories=RANKS[0].directories)
    assert about.origin() == origin_digest(IDENTITY.digest(), 1 << 30, 2, 4, FORMAT_VERSION)
    assert about.homes == RANKS and ABOUT.homes == (RankHomes(3, ABOUT.directories),)


def test_what_was_written_before_there_were_ranks_is_read() -> None:
    text = json.loads(encode_about(ABOUT)[16:])
    del text["ranks"]
    body = json.dumps(text).encode()
    digest = hashlib.blake2b(body, digest_size=16, key=ABOUT.origin(), person=b"flatcake.about").digest()
    assert decode_about(digest + body) == ABOUT


def test_uneven_ranks_are_none() -> None:
    for ranks in ((RANKS[0], RankHomes(1, ())), (RankHomes(0, ("/a",)),)):
        assert decode_about(encode_about(replace(ABOUT, ranks=ranks))) is None
    assert decode_about(encode_about(replace(ABOUT, directories=()))) is None


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
