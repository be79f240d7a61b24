"""Names of what an engine keeps below each of its directories: docs/vllm.md, docs/inspect.md.

Pure.  The manifest is in `catalog` below the first directory, a rank's pool in `rank-N` below every one of them;
data-parallel replicas are engines of their own, in `replica-N`.
"""

import re

CATALOG = "catalog"
RANK = re.compile(r"rank-(0|[1-9][0-9]{0,5})")
REPLICA = re.compile(r"replica-(0|[1-9][0-9]{0,5})")


def catalog_in(directory: str) -> str:
    return f"{directory}/{CATALOG}"


def rank_in(directory: str, rank: int) -> str:
    return f"{directory}/rank-{rank}"


def replica_in(directory: str, replica: int) -> str:
    return f"{directory}/replica-{replica}"


def number_in(name: str) -> int:
    """The number in the name of a rank's or a replica's directory."""
    return int(name.rpartition("-")[2])
