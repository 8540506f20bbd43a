"""A limit of memory for each process of a comparison, and what it is worth where it can't be had."""
import contextlib
import os
import pathlib
import subprocess

GROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def places_of_groups():
    """(folder in which a control group may be made, its file of the limit), what should work first."""
    if not (GROUPS / "cgroup.controllers").exists():
        return [(GROUPS / "memory", "memory.limit_in_bytes")]
    own = next(line for line in OWN_GROUPS.read_text().splitlines() if line.startswith("0::"))
    place = GROUPS / own.removeprefix("0::").lstrip("/")
    # A group with processes of its own gives no limit of memory to groups in it, but the group around it does.
    return [(folder, "memory.max") for folder in (place, place.parent) if folder.is_relative_to(GROUPS)]


def make_group(count):
    """A control group with so many bytes. OSError: this user can't have one."""
    refused = None
    for folder, limit in places_of_groups():
        group = folder / f"terrace-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            refused = refused or error
            continue
        try:
            with open(group / limit, "r+") as file:
                file.write(str(count))
            # What is swapped out is no memory; where swap is not counted there is none.
            for name, value in (("memory.memsw.limit_in_bytes", count), ("memory.swap.max", 0)):
                with contextlib.suppress(OSError), open(group / name, "r+") as file:
                    file.write(str(value))
            return group
        except OSError as error:
            refused = refused or error
            group.rmdir()
    raise refused


@contextlib.contextmanager
def within_group(count):
    """What to put before a command so that it and its page cache have so many bytes."""
    group = make_group(count)
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "enter"]
    finally:
        group.rmdir()


@contextlib.contextmanager
def within_rlimit(count):
    """Likewise, of what it maps for itself alone; the page cache is not counted."""
    yield ["sh", "-c", f'ulimit -d {count // 1024} && exec "$@"', "limit"]


def why_not(limit, count):
    """None where a command can be run within it: entering a group may be refused as well."""
    try:
        with limit(count) as prefix:
            entered = subprocess.run([*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            return None if entered.returncode == 0 else entered.stderr.strip()
    except OSError as error:
        return str(error)


class MemoryLimit:
    """The best limit of so many bytes that a process can have here; str() says which it is."""

    def __init__(self, count):
        self.count = count
        size = f"{count >> 20} MiB each"
        refused = why_not(within_group, count)
        if refused is None:
            self.within, self.text = within_group, f"a limit of {size}, page cache included"
            return
        if why_not(within_rlimit, count) is None:
            self.within, self.text = within_rlimit, f"a limit of {size} of private memory, page cache not counted ({refused})"
            return
        self.within, self.text = lambda _: contextlib.nullcontext([]), f"no limit of memory ({refused})"

    def __str__(self):
        return self.text

    def run(self, command, **options):
        """subprocess.run within it."""
        with self.within(self.count) as prefix:
            return subprocess.run([*prefix, *map(str, command)], **options)
