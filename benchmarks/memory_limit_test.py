"""A limit is claimed only where there is one, and then it holds."""
import subprocess
import sys

import memory_limit
import pytest

TAKE_256_MIB = [sys.executable, "-c", "b = bytearray(256 << 20); b[::4096] = bytes(len(b) // 4096)"]


def exit_status(limit, command):
    return limit.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode


@pytest.fixture
def no_groups(monkeypatch, tmp_path):
    """Version 1 of control groups, or with the file cgroup.controllers version 2, as folders that make no limits."""
    monkeypatch.setattr(memory_limit, "GROUPS", tmp_path)
    monkeypatch.setattr(memory_limit, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "memory").mkdir()
    (tmp_path / "own").write_text("2:cpu:/x\n0::/user/session\n")
    (tmp_path / "user/session").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("version", [1, 2])
def test_without_control_groups(no_groups, version):
    if version == 2:
        (no_groups / "cgroup.controllers").write_text("memory\n")
        assert memory_limit.places_of_groups() == [(no_groups / "user/session", "memory.max"), (no_groups / "user", "memory.max")]
    limit = memory_limit.MemoryLimit(128 << 20)
    assert "128 MiB each of private memory, page cache not counted (" in str(limit)
    assert exit_status(limit, TAKE_256_MIB) != 0
    assert exit_status(limit, [sys.executable, "-c", "pass"]) == 0
    assert not list(no_groups.rglob("terrace-bench-*")), "none is left"


def test_without_any(no_groups, monkeypatch):
    monkeypatch.setattr(memory_limit, "why_not", lambda limit, count: "refused")
    limit = memory_limit.MemoryLimit(77 << 20)
    assert str(limit) == "no limit of memory (refused)"
    assert exit_status(limit, TAKE_256_MIB) == 0


def test_with_what_there_is_here():
    limit = memory_limit.MemoryLimit(128 << 20)
    if "no limit" in str(limit):
        pytest.skip(str(limit))
    assert exit_status(limit, TAKE_256_MIB) != 0
    assert exit_status(limit, [sys.executable, "-c", "pass"]) == 0
