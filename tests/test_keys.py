"""Keys: equal in every process, and different from the first difference on."""

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import ConfigError, ShapeError
from flatcake.keys import FORMAT_VERSION, Chain, Identity, chain

IDENTITY = Identity(model="llama", revision="abc", kv_dtype="bf16", layout="k,v", block_tokens=4)

CHANGES = {
    "model": "llama2",
    "revision": "abd",
    "kv_dtype": "fp8",
    "layout": "v,k",
    "block_tokens": 8,
    "tp_size": 2,
    "pp_size": 2,
    "weight_version": 1,
    "format_version": FORMAT_VERSION + 1,
}

GOLDEN = "1c776673894488f9193135ab551b81b6f5c14b1ea875cb65774af199f7431de0"
"""Keys of tokens 0 to 7 with salt s and extra e."""

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def rows(keys):
    return [tuple(row) for row in keys.tolist()]


def test_every_field_has_a_change_here():
    assert set(CHANGES) == set(Identity.__dataclass_fields__)


@pytest.mark.parametrize("name", CHANGES)
def test_identity_digest_depends_on_every_field(name):
    other = replace(IDENTITY, **{name: CHANGES[name]})
    assert len(IDENTITY.digest()) == 16
    assert other.digest() != IDENTITY.digest()
    tokens = list(range(16))
    assert not set(rows(chain(other, tokens))) & set(rows(chain(IDENTITY, tokens)))


def test_identity_fields_do_not_run_together():
    one = replace(IDENTITY, model="ab", revision="c")
    two = replace(IDENTITY, model="a", revision="bc")
    swapped = replace(IDENTITY, model="c", revision="ab")
    sizes = [replace(IDENTITY, tp_size=1, pp_size=12), replace(IDENTITY, tp_size=11, pp_size=2)]
    digests = {identity.digest() for identity in (one, two, swapped, *sizes)}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", 7),
        ("revision", b"abc"),
        ("layout", "\ud800"),
        ("kv_dtype", None),
        ("block_tokens", 0),
        ("block_tokens", 16.0),
        ("block_tokens", True),
        ("tp_size", 0),
        ("pp_size", -1),
        ("weight_version", -1),
        ("format_version", 0),
    ],
)
def test_identity_refuses_and_names_the_field(name, value):
    with pytest.raises(ConfigError, match=rf"Identity\.{name}=.*: expected"):
        replace(IDENTITY, **{name: value})


def test_identity_is_frozen():
    with pytest.raises(AttributeError):
        IDENTITY.model = "other"


def test_chain_is_what_the_design_says():
    def sized(part):
        return len(part).to_bytes(8, "little") + part

    def digest(data, **kwargs):
        return hashlib.blake2b(data, digest_size=16, **kwargs).digest()

    tokens = np.array([1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], "<u4")
    root = digest(sized(IDENTITY.digest()) + sized(b"s") + sized(b"e"), person=b"flatcake.root")
    first = digest(root + tokens[:4].tobytes())
    second = digest(first + tokens[4:8].tobytes())
    keys = chain(IDENTITY, tokens, salt=b"s", extra=b"e")
    assert keys.dtype == np.uint64 and keys.shape == (2, 2)
    assert keys.astype("<u8").tobytes() == first + second
    assert keys[0, 0] == int.from_bytes(first[:8], "little") and keys[0, 1] == int.from_bytes(first[8:], "little")


def test_chain_never_changes_its_meaning():
    # Keys are stored on disk: a change here must come with a higher FORMAT_VERSION.
    assert FORMAT_VERSION == 1
    assert chain(IDENTITY, range(8), salt=b"s", extra=b"e").astype("<u8").tobytes().hex() == GOLDEN


PROGRAM = """
from flatcake.keys import Identity, chain
identity = Identity(model="llama", revision="abc", kv_dtype="bf16", layout="k,v", block_tokens=4)
print(chain(identity, range(8), salt=b"s", extra=b"e").astype("<u8").tobytes().hex())
"""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_processes_agree_whatever_their_hash_seed(seed):
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == GOLDEN


@given(TOKENS, st.integers(0, 39), st.integers(1, 2**32 - 1))
def test_changed_token_changes_keys_from_its_block_on(tokens, at, step):
    before = rows(chain(IDENTITY, tokens))
    assert len(before) == len(tokens) // 4
    if at >= len(tokens):
        return
    tokens[at] = (tokens[at] + step) % 2**32
    after = rows(chain(IDENTITY, tokens))
    assert after[: at // 4] == before[: at // 4]
    assert not set(after[at // 4 :]) & set(before)


@given(TOKENS, st.integers(0, 3))
def test_partial_last_block_has_no_key(tokens, kept):
    full = tokens[: len(tokens) // 4 * 4]
    assert rows(chain(IDENTITY, full + [9] * kept)) == rows(chain(IDENTITY, full))


def test_equal_blocks_at_other_places_have_other_keys():
    keys = rows(chain(IDENTITY, [1, 2, 3, 4] * 5))
    assert len(set(keys)) == 5


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_salt_and_extra_separate_whole_chains(salt, extra, salt2, extra2):
    one = set(rows(chain(IDENTITY, range(12), salt=salt, extra=extra)))
    two = set(rows(chain(IDENTITY, range(12), salt=salt2, extra=extra2)))
    assert one == two if (salt, extra) == (salt2, extra2) else not one & two


@given(st.binary(max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_bytes_cannot_move_between_salt_and_extra(data, cut, cut2):
    one = rows(chain(IDENTITY, range(4), salt=data[:cut], extra=data[cut:]))
    two = rows(chain(IDENTITY, range(4), salt=data[:cut2], extra=data[cut2:]))
    assert (one == two) == (data[:cut] == data[:cut2])


@given(TOKENS, st.lists(st.integers(0, 40), max_size=5))
def test_extend_in_parts_equals_one_chain(tokens, cuts):
    growing = Chain(IDENTITY, salt=b"s", extra=b"e")
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    parts = [growing.extend(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    assert rows(np.concatenate(parts)) == rows(chain(IDENTITY, tokens, salt=b"s", extra=b"e"))


def test_extend_refused_leaves_the_chain_unchanged():
    growing = Chain(IDENTITY)
    growing.extend([1, 2, 3])
    with pytest.raises(ShapeError):
        growing.extend([4, 5, 6, 7, -1])
    assert rows(growing.extend([4])) == rows(chain(IDENTITY, [1, 2, 3, 4]))


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", ">i8", "u8", "i2", "u1"])
def test_chain_does_not_depend_on_the_dtype(dtype):
    tokens = np.arange(20).astype(dtype)
    assert rows(chain(IDENTITY, tokens)) == rows(chain(IDENTITY, list(range(20))))
    assert rows(chain(IDENTITY, tokens[::2])) == rows(chain(IDENTITY, range(0, 20, 2)))
    assert rows(chain(IDENTITY, tuple(range(20)))) == rows(chain(IDENTITY, tokens))


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [2**70],
        [1.0],
        [True],
        ["a"],
        [None],
        "abcd",
        5,
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.zeros((2, 4), np.int64),
        np.array([2**63], np.uint64),
        {1, 2, 3, 4},
    ],
)
def test_chain_refuses_what_is_no_token_row(tokens):
    with pytest.raises(ShapeError, match="tokens: expected"):
        chain(IDENTITY, tokens)


def test_no_tokens_have_no_keys():
    for tokens in ([], (), np.empty(0, np.int64)):
        assert chain(IDENTITY, tokens).shape == (0, 2)
    with pytest.raises(ShapeError):
        chain(IDENTITY, np.empty((0, 2), np.int64))


@pytest.mark.parametrize("name", ["salt", "extra"])
def test_salt_is_bytes_and_is_never_shown(name):
    secret = "tenant-secret"
    with pytest.raises(ConfigError, match=f"{name}: expected bytes, got str") as caught:
        chain(IDENTITY, [], **{name: secret})
    assert secret not in str(caught.value)
    growing = Chain(IDENTITY, **{name: secret.encode()})
    assert secret not in repr(growing)
    assert all(secret.encode() not in value for value in vars(growing).values() if isinstance(value, bytes))
