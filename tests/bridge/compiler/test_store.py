"""Compiled programs on disk: found again, never mistaken, never without bound."""

import json
import os
import threading

import pytest
from service_client import DOUBLE, ONE_DEVICE, ServiceClient, unary

from bridge.compiler.frames import Kind
from bridge.compiler.store import ProgramStore


def compile_once(cache, program=DOUBLE, fingerprint="test"):
    """(reply, statistics) of a service that compiles one program."""
    service = ServiceClient(cache, fingerprint=fingerprint)
    try:
        reply = service.compile(program)
        return reply, json.loads(service.ask(Kind.STATS)[1][0])
    finally:
        service.close()


def test_a_second_service_finds_what_the_first_compiled(tmp_path):
    """The same bytes come back without a compile."""
    first, counts = compile_once(tmp_path)
    assert counts["compiled"] == 1 and counts["store_hits"] == 0
    second, counts = compile_once(tmp_path)
    assert counts["compiled"] == 0 and counts["store_hits"] == 1
    assert second == first


def test_another_fingerprint_finds_nothing(tmp_path):
    """What other passes, another inner plugin or another CPU left is not used."""
    compile_once(tmp_path)
    _, counts = compile_once(tmp_path, fingerprint="other")
    assert counts["compiled"] == 1 and counts["store_hits"] == 0


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data[:-1] + b"x", lambda data: b""])
def test_a_damaged_entry_is_a_miss(tmp_path, damage):
    """A cut, changed or empty file is compiled anew and replaced."""
    good, _ = compile_once(tmp_path)
    (entry,) = (tmp_path / "programs" / "test").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    again, counts = compile_once(tmp_path)
    assert again == good and counts["store_hits"] == 0
    _, counts = compile_once(tmp_path)
    assert counts["store_hits"] == 1


def test_an_error_is_not_kept(tmp_path):
    """A program that failed is tried again."""
    bad = unary("%r = stablehlo.custom_call @no_such_call(%x) : (tensor<4xf32>) -> tensor<4xf32>")
    for _ in range(2):
        reply, counts = compile_once(tmp_path, bad)
        assert reply[0] == Kind.ERROR and counts["failed"] == 1


def test_a_program_that_many_ask_for_at_once_is_compiled_once(tmp_path):
    """Ranks of a mesh ask for the same program; one compile serves them all."""
    service = ServiceClient(tmp_path)
    try:
        replies = []
        threads = [threading.Thread(target=lambda: replies.append(service.compile(DOUBLE))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = json.loads(service.ask(Kind.STATS)[1][0])
    finally:
        service.close()
    assert counts["compiled"] == 1 and counts["store_hits"] == 5
    assert all(reply == replies[0] for reply in replies)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    """Without a place to keep it a program still compiles."""
    (tmp_path / "programs").write_text("a file where the folder should be")
    reply, counts = compile_once(tmp_path)
    assert reply[0] == Kind.EXECUTABLE and counts["compiled"] == 1


def test_options_tell_programs_apart():
    """The same program with other options, or bytes split otherwise, has another name."""
    keys = {ProgramStore.key(DOUBLE, b"mlir", options) for options in (b"", ONE_DEVICE)}
    keys |= {ProgramStore.key(b"ab", b"c"), ProgramStore.key(b"a", b"bc")}
    assert len(keys) == 4


def test_the_oldest_programs_go_when_the_limit_is_reached(tmp_path):
    """What was used longest ago is removed, of other stamps too; what was used of late stays."""
    old = ProgramStore(tmp_path, "old", limit=1 << 30)
    for number in range(3):
        old.keep(f"{number}", Kind.EXECUTABLE, [bytes(4000), b"{}"])
        os.utime(tmp_path / "old" / f"{number}", (number, number))
    assert old.find("0") is not None  # now the youngest
    ProgramStore(tmp_path, "new", limit=9000).keep("3", Kind.EXECUTABLE, [bytes(4000), b"{}"])
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left == {"0", "3"}
