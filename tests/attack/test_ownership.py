"""Directories: what lies in the place of our files, whose they are, fork, exit, and permissions."""

import os
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from flatcake.errors import ClosedError, FlatCakeError, FormatError, OwnershipError
from flatcake.gva import Medium
from flatcake.io.posix import PosixEngine
from tests.fakes import FaultyFiles
from tests.stores import (
    CHAT,
    WAIT_S,
    Memory,
    check,
    make_config,
    make_store,
    make_tokens,
    restore,
    save,
    simple_layout,
)

NAMES = ("lock", "format", "pool-0000.fc", "pool-0003.fc")
CHILD_S = 60


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


def put(kind: str, path: Path, victim: Path) -> None:
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "dangling symlink":
        path.symlink_to(victim.with_name("nothing"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
        if os.geteuid() == 0:
            path.unlink()
            try:
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
            except OSError:
                path.symlink_to("/dev/zero")


def tree(home: Path) -> dict[str, tuple[int, int, bytes]]:
    """Mode, size and small content of everything there, links not followed."""
    found = {}
    for path in sorted(home.rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) and info.st_size < 10_000 else b""
        found[str(path)] = (info.st_mode, info.st_size, content)
    return found


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("kind", ["symlink", "dangling symlink", "fifo", "directory", "socket", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_of_ours_is_refused_and_kept(
    memory: Memory, tmp_path: Path, name: str, kind: str, used: bool
) -> None:
    home, victim = tmp_path / "pool", tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    home.mkdir(mode=0o700)
    if used:
        with make_store(memory, make_config(memory, [home])):
            pass
        (home / name).unlink()
    put(kind, home / name, victim)
    before = tree(tmp_path)
    with pytest.raises((FlatCakeError, OSError)) as caught:
        make_store(memory, make_config(memory, [home]))
    assert name in str(caught.value)
    after = tree(tmp_path)
    assert victim.read_bytes() == b"precious" * 1000
    assert all(after[path] == state for path, state in before.items() if not path.endswith("/lock"))
    assert (home / name).lstat().st_mode == before[str(home / name)][0]


@pytest.mark.parametrize("mask", [0, 0o077, 0o777])
def test_all_is_the_owners_alone_whatever_the_umask(memory: Memory, tmp_path: Path, mask: int) -> None:
    home, before = tmp_path / "a" / "b" / "pool", os.umask(mask)
    try:
        with make_store(memory, make_config(memory, [home])) as store:
            save(store, memory, "s", make_tokens("a", 2))
        with make_store(memory, make_config(memory, [home])):
            pass
    finally:
        os.umask(before)
    for path in (home.parent.parent, home.parent, home):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert len(list(home.iterdir())) > 2
    for path in home.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_fork_keeps_no_directory_and_owns_none(memory: Memory, tmp_path: Path) -> None:
    """A child of fork holds every descriptor, and none of the threads."""
    tokens = make_tokens("a", 4)
    store = make_store(memory, make_config(memory, [tmp_path]))
    save(store, memory, "s", tokens)
    begun, go, told, tell = *os.pipe(), *os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        said = b"ok"
        try:
            for call in (
                lambda: store.match(tokens),
                lambda: store.save("t", make_tokens("b", 2), np.arange(4)),
                lambda: store.plane.cancel_all("x") or store.reset(),
            ):
                try:
                    call()
                    said = b"a call went through"
                except ClosedError as error:
                    if "fork" not in str(error):
                        said = str(error).encode()
            store.close()
            os.write(tell, said)
            os.read(begun, 1)
        finally:
            os._exit(0)
    try:
        said = os.read(told, 1000)
        assert said == b"ok"
        with pytest.raises(OwnershipError):  # The child's close has let go of nothing.
            make_store(memory, make_config(memory, [tmp_path]))
        assert restore(store, memory, tokens).blocks == 4
        check(store)
        assert store.close()
        with make_store(memory, make_config(memory, [tmp_path])):  # Though the child still lives.
            pass
    finally:
        store.close()
        os.write(go, b"x")
        os.waitpid(child, 0)
        for fd in (begun, go, told, tell):
            os.close(fd)


def run_child(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )


def test_the_interpreter_ends_with_transfers_stuck(tmp_path: Path) -> None:
    done = run_child(
        """
        import sys, threading
        from pathlib import Path
        import numpy as np
        from tests.fakes import FaultyFiles
        from tests.stores import *
        memory, files = Memory(simple_layout()), FaultyFiles()
        store = make_store(memory, make_config(memory, [sys.argv[1]]), files=files)
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        for verb in ("read", "write"):
            files.hold(verb)
            if verb == "read":
                with store.lease(store.match(tokens)) as lease:
                    handle = store.restore(lease, np.arange(12))
            else:
                other = store.save("t", make_tokens("b", 6), np.arange(12))
            assert files.arrived.acquire(timeout=30)
        print("stuck")
        """,
        str(tmp_path),
    )
    assert (done.returncode, done.stdout.strip()) == (0, "stuck"), done.stderr
    assert not done.stderr, done.stderr


@pytest.mark.leaves("stores")  # Its transfers return after the pump has ended.
@pytest.mark.parametrize("verb", ["read", "write"])
def test_close_with_transfers_stuck_says_so_and_a_later_one_ends_all(memory: Memory, tmp_path: Path, verb: str) -> None:
    files, tokens = FaultyFiles(), make_tokens("a", 6)
    config = make_config(memory, [tmp_path], timeouts={"close_ns": 50_000_000})
    store = make_store(memory, config, files=files)
    save(store, memory, "s", tokens)
    gate = files.hold(verb)
    lease = store.lease(store.match(tokens))
    handles = [store.restore(lease, np.arange(12)), store.save("t", make_tokens("b", 6), np.arange(12))]
    assert files.arrived.acquire(timeout=WAIT_S)
    assert not store.close()
    assert [bool(handle.result()) for handle in handles] == [True, True]
    assert files.open_fds, "files were closed under a transfer"
    memory.fill(seed=3)
    before = memory.snapshot()
    gate.set()
    engine = store.plane.parts.media[Medium.SSD].engine
    assert isinstance(engine, PosixEngine) and engine.close(int(WAIT_S * 1e9))
    assert store.close()
    assert not files.open_fds and memory.is_equal(before)
    lease.close()


def test_two_names_of_one_directory(memory: Memory, tmp_path: Path) -> None:
    home = tmp_path / "pool"
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    with make_store(memory, make_config(memory, [home])) as store:
        save(store, memory, "s", make_tokens("a", 2), CHAT)
        for other in (tmp_path / "link", home / ".." / "pool", str(home) + "/"):
            with pytest.raises(OwnershipError, match=f"pid {os.getpid()}"):
                make_store(memory, make_config(memory, [other]))
        with make_store(memory, make_config(memory, [tmp_path / "beside"])):
            pass
        assert restore(store, memory, make_tokens("a", 2)).blocks == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "nul",
        "{" * 3000,
        '{"magic": "flatcake-pool"}',
        '{"magic": "flatcake-pool", "version": 1e999}',
        "é\x00",
    ],
)
def test_any_header_opens_or_is_refused_by_name(memory: Memory, tmp_path: Path, text: str) -> None:
    (tmp_path / "format").write_text(text)
    try:
        with make_store(memory, make_config(memory, [tmp_path])) as store:
            assert save(store, memory, "s", make_tokens("a", 2)).written_blocks == 2
    except FormatError as error:
        assert "format" in str(error)
        assert (tmp_path / "format").read_text() == text
