from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from verl_fapo import memory as memory_module
from verl_fapo.critique import UnknownReason, Verdict
from verl_fapo.memory import VERSION, VerdictMemory, checkpoint_fingerprint, memory_key

FLAWED = Verdict(index=3, box="3")
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 16384, "samples": 1}

PUT_MANY = """
import sys
from pathlib import Path
from verl_fapo.critique import Verdict
from verl_fapo.memory import VerdictMemory

memory = VerdictMemory(Path(sys.argv[1]), max_entries=10**6)
print("ready", flush=True)
sys.stdin.read(1)
for i in range(int(sys.argv[2]), int(sys.argv[3])):
    memory.put(str(i), Verdict(index=i), f"critique {i} " * 1000)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "verdicts.sqlite"


@pytest.fixture
def memory(path: Path) -> VerdictMemory:
    return VerdictMemory(path, max_entries=1000)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "PAUSE_SECONDS", 0.2)


def ask(path: Path, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(statement).fetchall()


@contextmanager
def putting(path: Path, first: int, last: int) -> Iterator[subprocess.Popen]:
    """A process that puts keys once it is sent a line."""
    command = [sys.executable, "-c", PUT_MANY, str(path), str(first), str(last)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("verdict", "critique"),
    [
        pytest.param(Verdict(index=-1, box="-1"), "All is right. \\boxed{-1}", id="clean"),
        pytest.param(FLAWED, "", id="flawed, no text"),
        pytest.param(Verdict(index=10**30), "x", id="index beyond 64 bits"),
        *(pytest.param(Verdict(reason=reason, box=None), "hm", id=reason) for reason in UnknownReason),
        pytest.param(Verdict(index=0, box="\ud800\0"), "a\0b\udcffc", id="lone surrogates and NULs"),
        pytest.param(FLAWED, "\ud83d\ude00 is not \U0001f600", id="two surrogates stay two"),
        pytest.param(FLAWED, "\r\n\u2028\ufeff'\";--", id="line ends and quotes"),
        pytest.param(FLAWED, "paragraph " * 200_000, id="2 MB"),
    ],
)
def test_what_was_put_comes_back(memory, path, verdict, critique):
    memory.put("key", verdict, critique)
    for reader in (memory, VerdictMemory(path, max_entries=1)):
        remembered, text = reader.get("key")
        assert (remembered, remembered.box, text) == (verdict, verdict.box, critique)
        assert remembered.reason is verdict.reason
    assert memory.get("another key") is None


def test_the_last_put_of_a_key_counts(memory, path):
    memory.put("key", FLAWED, "first")
    memory.put("key", Verdict(index=-1), "second")
    assert memory.get("key") == (Verdict(index=-1), "second")
    assert ask(path, "SELECT count(*) FROM verdicts") == [(1,)]


def test_critiques_are_kept_small(memory, path):
    memory.put("key", FLAWED, "Paragraph 3 adds where it should subtract. " * 1000)
    assert path.stat().st_size < 20_000


def test_no_write_ahead_log_as_shared_file_systems_have_none(memory, path):
    memory.put("key", FLAWED, "x")
    assert ask(path, "PRAGMA journal_mode") == [("delete",)]


def test_nothing_stays_open(memory, path):
    memory.put("key", FLAWED, "x")
    memory.get("key")
    opened = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    assert not [name for name in opened if name.startswith(str(path.parent))]
    memory.close()
    assert memory.get("key")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"prompt": "another"}, id="prompt"),
        pytest.param({"prompt": "prompt "}, id="a blank"),
        pytest.param({"checkpoint": "another"}, id="checkpoint"),
        pytest.param({"prompt": "promptc", "checkpoint": "heckpoint"}, id="a letter moves"),
        *(pytest.param({"sampling": SAMPLING | {name: 2}}, id=name) for name in SAMPLING),
        pytest.param({"sampling": {}}, id="no sampling"),
    ],
)
def test_key_changes_with_each_ingredient(change):
    same = {"prompt": "prompt", "checkpoint": "checkpoint", "sampling": SAMPLING}
    assert memory_key(**(same | change)) != memory_key(**same)


def test_key_is_the_same_in_every_process_and_order():
    again = memory_key("p", checkpoint="c", sampling=dict(reversed(SAMPLING.items())))
    assert memory_key("p", checkpoint="c", sampling=SAMPLING) == again
    # printf '["p","c",{"samples":1}]' | sha256sum
    expected = "4a067508a6964c652adf69ee1ddfbc3e683452694f73fc0656f61990e046eb3e"
    assert memory_key("p", checkpoint="c", sampling={"samples": 1}) == expected


def test_key_of_any_text():
    texts = ["\ud83d\ude00", "\U0001f600", "\ud83d", "\\ud83d", "\0", "", '","']
    assert len({memory_key(text, checkpoint="c", sampling=SAMPLING) for text in texts}) == len(texts)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "judge"
    (folder / "odd.bin").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(bytes(2**20))
    (folder / "README.md").write_text("A judge.")
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    return folder


def write(name: str, content: bytes, seconds: int = 1) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)
        os.utime(folder / name, (seconds, seconds))

    return change


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / old).rename(folder / new)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        pytest.param(write("model.safetensors", bytes(2**20), 2), True, id="time of a large file"),
        pytest.param(write("model.safetensors", bytes(2**20 + 1)), True, id="size of a large file"),
        pytest.param(write("config.json", b"[]"), True, id="content of a small file"),
        pytest.param(write("config.json", b"{}", 2), False, id="time of a small file"),
        pytest.param(write("tokenizer.model", b""), True, id="a new file"),
        pytest.param(rename("model.safetensors", "other.safetensors"), True, id="a new name"),
        pytest.param(write("README.md", b"Another."), False, id="what the judge does not read"),
        pytest.param(rename("", "../moved"), False, id="the folder is moved"),
    ],
)
def test_fingerprint_changes_with_the_weights(checkpoint, change, differs):
    before = checkpoint_fingerprint(checkpoint)
    change(checkpoint)
    folder = checkpoint if checkpoint.exists() else checkpoint.with_name("moved")
    assert (checkpoint_fingerprint(folder) != before) is differs


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(rename("", "../moved"), id="no folder"),
        pytest.param(lambda folder: [file.unlink() for file in folder.iterdir() if file.is_file()], id="no file"),
        pytest.param(lambda folder: (folder / "a.bin").symlink_to("nowhere"), id="dangling link"),
    ],
)
def test_fingerprint_of_what_can_not_be_read_is_an_error(checkpoint, spoil):
    spoil(checkpoint)
    with pytest.raises(OSError):
        checkpoint_fingerprint(checkpoint)


def test_the_oldest_go(path):
    memory = VerdictMemory(path, max_entries=10)
    for i in range(25):
        memory.put(str(i), Verdict(index=i), "x")
        memory.put(str(i), Verdict(index=i), "y")
        assert ask(path, "SELECT count(*) FROM verdicts") == [(min(i + 1, 10),)]
    assert [i for i in range(25) if memory.get(str(i))] == list(range(15, 25))


def test_a_lower_bound_holds_from_the_next_put_on(memory, path):
    for i in range(20):
        memory.put(str(i), FLAWED, "x")
    VerdictMemory(path, max_entries=3).put("20", FLAWED, "x")
    assert [i for i in range(21) if memory.get(str(i))] == [18, 19, 20]


def test_a_full_store_stops_growing(path):
    memory = VerdictMemory(path, max_entries=10)
    texts = [os.urandom(5000).hex() for _ in range(40)]
    for i, text in enumerate(texts[:20]):
        memory.put(str(i), FLAWED, text)
    size = path.stat().st_size
    for i, text in enumerate(texts[20:]):
        memory.put(str(i + 20), FLAWED, text)
    assert path.stat().st_size <= size + 20_000


def make_folder(path: Path) -> None:
    path.mkdir()


def make_parent_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("x")


def make_garbage(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def make_header_only(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + bytes(range(84)))


def make_truncated(path: Path) -> None:
    memory = VerdictMemory(path, max_entries=100)
    for i in range(50):
        memory.put(str(i), FLAWED, os.urandom(2000).hex())
    with path.open("r+b") as file:
        file.truncate(4096)


def make_damaged_inside(path: Path) -> None:
    make_truncated(path)
    with path.open("ab") as file:
        file.write(b"\xff" * 200_000)


def make_other_database(path: Path) -> None:
    ask(path, "CREATE TABLE bills (amount INTEGER)")


def make_other_database_of_our_version(path: Path) -> None:
    make_other_database(path)
    ask(path, f"PRAGMA user_version = {VERSION}")


def make_other_columns(path: Path) -> None:
    ask(path, "CREATE TABLE verdicts (question TEXT)")
    ask(path, f"PRAGMA user_version = {VERSION}")


def make_future(path: Path) -> None:
    VerdictMemory(path, max_entries=1).put("key", FLAWED, "x")
    ask(path, f"PRAGMA user_version = {VERSION + 1}")


BROKEN = [
    make_folder,
    make_parent_a_file,
    make_garbage,
    make_header_only,
    make_truncated,
    make_damaged_inside,
    make_other_database,
    make_other_database_of_our_version,
    make_other_columns,
    make_future,
    os.mkfifo,
]


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda spoil: spoil.__name__.removeprefix("make_"))
def test_broken_file_is_a_miss_that_costs_little_and_is_logged_once(path, spoil, caplog):
    path.parent.mkdir()
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    memory = VerdictMemory(path, max_entries=10)
    started = time.monotonic()
    for _ in range(20):
        memory.put("key", FLAWED, "x")
        assert memory.get("key") is None
    assert time.monotonic() - started < 1
    kinds = [record.args[1] for record in caplog.records]
    assert kinds and len(kinds) == len(set(kinds))
    assert str(path) in caplog.text
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("spoil", [make_folder, make_garbage, make_future], ids=["folder", "garbage", "future"])
def test_works_again_after_the_cause_is_gone(path, spoil):
    path.parent.mkdir()
    spoil(path)
    memory = VerdictMemory(path, max_entries=10)
    memory.put("key", FLAWED, "x")
    path.rename(path.with_name("aside"))
    memory.put("key", FLAWED, "x")
    assert memory.get("key") == (FLAWED, "x")


def test_removed_file_is_made_anew(memory, path):
    memory.put("key", FLAWED, "x")
    path.unlink()
    assert memory.get("key") is None
    memory.put("key", FLAWED, "x")
    assert memory.get("key") and path.exists()


def test_full_disk_is_a_miss_and_what_was_kept_is_still_there(memory, path, caplog):
    memory.put("old", FLAWED, "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        for _ in range(3):
            memory.put("new", FLAWED, os.urandom(50_000).hex())
        assert memory.get("new") is None
        assert memory.get("old") == (FLAWED, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    memory.put("new", FLAWED, "x")
    assert memory.get("new") and memory.get("old")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_file_is_read(memory, path, caplog):
    memory.put("key", FLAWED, "x")
    path.chmod(0o444)
    path.parent.chmod(0o555)
    memory.put("another", FLAWED, "x")
    assert memory.get("key") and len(caplog.records) == 1


def test_locked_file_costs_one_wait_and_works_again_later(memory, path, caplog, monkeypatch):
    monkeypatch.setattr(memory_module, "BUSY_SECONDS", 0.3)
    memory.put("key", FLAWED, "x")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            assert not any(pool.map(memory.get, ["key"] * 100))
        assert time.monotonic() - started < 1.5
    assert caplog.records
    time.sleep(memory_module.PAUSE_SECONDS)
    assert memory.get("key") == (FLAWED, "x")
    kinds = [record.args[1] for record in caplog.records]
    assert len(kinds) == len(set(kinds)) and set(kinds) <= {"SQLITE_BUSY", "TimeoutError"}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"junk", id="not compressed"),
        pytest.param("text", id="text"),
        pytest.param(7, id="number"),
        *(
            pytest.param(zlib.compress(text), id=text[:40].decode("latin-1"))
            for text in [
                b"\xff",
                b"{}",
                b"7",
                b"[0,null,null]",
                b'[0,null,null,"x",1]',
                b'["0",null,null,"x"]',
                b'[true,null,null,"x"]',
                b'[1.0,null,null,"x"]',
                b'[-2,null,null,"x"]',
                b'[null,null,null,"x"]',
                b'[null,"",null,"x"]',
                b'[0,"",null,"x"]',
                b'[null,"tired",null,"x"]',
                b'[null,[],null,"x"]',
                b'[0,"no_box",null,"x"]',
                b"[0,null,null,7]",
                b'[0,null,7,"x"]',
                b"[" * 100_000,
            ]
        ),
    ],
)
def test_row_that_is_nonsense_is_a_miss_until_it_is_put_again(memory, path, value):
    memory.put("key", FLAWED, "x")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE verdicts SET value = ?", (value,))
    assert memory.get("key") is None
    memory.put("key", FLAWED, "y")
    assert memory.get("key") == (FLAWED, "y")


def test_two_processes_lose_and_double_nothing(path):
    with putting(path, 0, 200) as one, putting(path, 100, 300) as other:
        for process in (one, other):
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert [process.wait(30) for process in (one, other)] == [0, 0]
        assert one.stderr.read() + other.stderr.read() == b""
    memory = VerdictMemory(path, max_entries=10**6)
    assert ask(path, "SELECT count(*), max(id) FROM verdicts") == [(300, 300)]
    assert all(memory.get(str(i)) == (Verdict(index=i), f"critique {i} " * 1000) for i in range(300))


@pytest.mark.parametrize("at_least", [1, 20, 60])
def test_killed_process_leaves_a_store_that_can_be_read(memory, path, at_least):
    with putting(path, 0, 100_000) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        while not memory.get(str(at_least)):
            assert process.poll() is None
        process.kill()
        process.wait(10)
    num_whole = ask(path, "SELECT count(*) FROM verdicts")[0][0]
    assert num_whole > at_least
    assert all(memory.get(str(i)) == (Verdict(index=i), f"critique {i} " * 1000) for i in range(num_whole))
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    memory.put("after", FLAWED, "x")
    assert memory.get("after")


HALF_A_TRANSACTION = """
import os, signal, sqlite3, sys

db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")  # pages go to the file before the end
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE verdicts SET value = randomblob(300000)")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_half_a_transaction_is_taken_back(memory, path):
    memory.put("key", FLAWED, "x")
    done = subprocess.run([sys.executable, "-c", HALF_A_TRANSACTION, str(path)], timeout=30)
    assert done.returncode == -signal.SIGKILL and path.with_name(f"{path.name}-journal").stat().st_size
    assert memory.get("key") == (FLAWED, "x")


def test_threads_lose_and_double_nothing(memory, path, caplog):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: memory.put(str(i % 100), Verdict(index=i % 100), "x"), range(200)))
        got = list(pool.map(memory.get, map(str, range(100))))
    assert got == [(Verdict(index=i), "x") for i in range(100)]
    assert ask(path, "SELECT count(*) FROM verdicts") == [(100,)] and not caplog.records


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_fork_works_on_while_a_thread_of_its_parent_is_at_it(memory):
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: memory._try(lambda db: (inside.set(), leave.wait(30))))
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        memory.put("child", FLAWED, "x")
        os._exit(0 if memory.get("child") else 1)
    started = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0 and time.monotonic() - started < 1
    leave.set()
    thread.join()
    assert memory.get("child") == (FLAWED, "x")
