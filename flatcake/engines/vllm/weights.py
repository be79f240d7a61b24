"""A fingerprint of a model's weights, from a sample of its files.

The connector never sees the weights, and a name says nothing about them: another checkpoint under the same path
must hit nothing.  Reading all of it would cost minutes, so each file gives its size and some stretches of its bytes.
"""

import hashlib
from pathlib import Path

SAMPLES = 16
SAMPLE_BYTES = 4096
SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".npz")


def fingerprint(model: str) -> str:
    """Digest the weight files of a local directory or file, and its `config.json`; empty for anything else.

    Cost: 64 KiB read a file.
    """
    root = Path(model)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(path for path in root.iterdir() if path.suffix in SUFFIXES or path.name == "config.json")
    else:
        return ""
    state = hashlib.blake2b(digest_size=16, person=b"flatcake.weight")
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for place in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()
