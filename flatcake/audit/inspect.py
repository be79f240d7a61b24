"""`flatcake inspect`: what is in the directories of stores, open or closed, without touching them.

Exit codes: 0; 1 when something is damaged or missing, which is said; 2 for a caller's mistake: no such directory,
no permission, a newer format.
"""

import argparse
import json
import sys

from flatcake import __version__
from flatcake.audit.report import as_mapping, as_text
from flatcake.audit.stores import describe, group
from flatcake.io.seam import Files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", nargs="+", metavar="DIRECTORY", help="first directory of a store, or all in order")
    parser.add_argument("--all", action="store_true", help="all scopes instead of the largest")
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line, with all scopes")


def run(args: argparse.Namespace) -> int:
    """Look, report, and return the exit code."""
    files = Files()
    stores = [describe(files, roots) for roots in group(files, args.directory)]
    if args.json:
        body = {"version": __version__, "stores": [as_mapping(store) for store in stores]}
        sys.stdout.write(json.dumps(body) + "\n")
    elif args.all:
        sys.stdout.write("\n".join(as_text(store, scopes_max=None) for store in stores))
    else:
        sys.stdout.write("\n".join(as_text(store) for store in stores))
    return 1 if any(store.problems for store in stores) else 0
