#!/usr/bin/env python3
"""Terrace's store beside RocksDB on the same work, one after the other in one run:

  run.py [--keys 20000000] [--runs 3] [--seed S] [--scratch FOLDER] [--output FIGURES.json]

Each system is loaded and measured --runs times in turn, each time with other keys; figures are medians with the least and the
most. scripts/setup-peers installs RocksDB; scripts/build then builds the program. Each system runs alone in a process
and, where this user may make one, in a control group of --limit-mib of memory, which counts the page cache
too; the first line says whether. Figures of different machines, or of different minutes of a shared one, don't compare: read the ratios.
"""
import argparse
import contextlib
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAM = ROOT / "build/benchmarks/peers_bench"
GROUPS = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")
SYSTEMS = ("terrace", "rocksdb")


def places_of_groups():
    """(folder in which a control group may be made, its file of the limit), what should work first."""
    if not (GROUPS / "cgroup.controllers").exists():
        return [(GROUPS / "memory", "memory.limit_in_bytes")]
    own = next(line for line in OWN_GROUPS.read_text().splitlines() if line.startswith("0::"))
    place = GROUPS / own.removeprefix("0::").lstrip("/")
    # A group with processes of its own gives no limit of memory to groups in it, but the group around it does.
    return [(folder, "memory.max") for folder in (place, place.parent) if folder.is_relative_to(GROUPS)]


def make_group(mib):
    """A control group with so much memory. OSError: this user can't have one."""
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
                file.write(str(mib << 20))
            return group
        except OSError as error:
            refused = refused or error
            group.rmdir()
    raise refused


@contextlib.contextmanager
def memory_limit(mib):
    """What to put before a command so that it and its page cache have so much memory."""
    group = make_group(mib)
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "enter"]
    finally:
        group.rmdir()


def why_unlimited(mib):
    """None where a command can be limited: entering a group may be refused as well."""
    try:
        with memory_limit(mib) as prefix:
            entered = subprocess.run([*prefix, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            return None if entered.returncode == 0 else entered.stderr.strip()
    except OSError as error:
        return str(error)


def measure(system, options, limited, seed):
    scratch = tempfile.mkdtemp(prefix="terrace-bench-", dir=options.scratch)
    command = [PROGRAM, "--system", system, "--folder", scratch, "--keys", options.keys, "--row-bytes", options.row_bytes,
               "--repeats", options.repeats, "--update-seconds", options.update_seconds, "--threads", os.cpu_count(),
               "--seed", seed]
    for batch in options.batch:
        command += ["--batch", batch]
    try:
        with memory_limit(options.limit_mib) if limited else contextlib.nullcontext([]) as prefix:
            result = subprocess.run([*prefix, *map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    finally:
        shutil.rmtree(scratch)
    if result.returncode != 0:
        raise SystemExit(f"{system}: exit {result.returncode}\n{result.stderr[-3000:]}")
    return json.loads(result.stdout)


def together(runs):
    """One figure of several runs: what was measured in each, or several times in each, as a list."""
    if isinstance(runs[0], dict):
        return {name: together([run[name] for run in runs]) for name in runs[0]}
    return [value for run in runs for value in run] if isinstance(runs[0], list) else list(runs)


def rows_of(figures):
    """What is compared: (work, unit, figure by system, aim); a figure is (median, least, most)."""
    def each(get):
        spread = {system: get(figures[system]) for system in SYSTEMS}
        return {system: (statistics.median(values), min(values), max(values)) for system, values in spread.items()}

    aims = {"20000": 1.3, "200000": 2.8, "1000000": 6.0}
    yield "first load, settled", each(lambda f: f["load"]["keys_per_second"]), 20
    for batch in figures["terrace"]["read"]:
        yield f"read {int(batch):,}", each(lambda f: f["read"][batch]["keys_per_second"]), aims.get(batch)
    yield "writes, burst", each(lambda f: f["burst"]["keys_per_second"]), 20
    yield "writes, compaction paid", each(lambda f: f["sustained"]["keys_per_second"]), 10


def spread(values):
    """Median (least..most)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=20_000_000)
    parser.add_argument("--row-bytes", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=3, help="of each system, each with a store of its own")
    parser.add_argument("--repeats", type=int, default=5, help="reads of each size in a run")
    parser.add_argument("--update-seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, help="of the first run's keys (default: another one each time, printed)")
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--scratch", help="folder on the disk that is measured (default: the system's temporary one)")
    parser.add_argument("--output", help="JSON file for all figures")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = time.time_ns() // 1000 % 10**9
    if not PROGRAM.exists():
        raise SystemExit(f"no {PROGRAM}: run scripts/setup-peers, then scripts/build")
    processor = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    unlimited = why_unlimited(options.limit_mib)
    memory = f"a limit of {options.limit_mib} MiB each" if unlimited is None else f"no limit of memory ({unlimited})"
    print(f"machine: {processor}, {os.cpu_count()} cores, Linux {platform.release()}; {options.keys:,} keys of {options.row_bytes} B, "
          f"{memory}; --seed {options.seed}, {options.runs} runs of each")
    runs = [{system: measure(system, options, unlimited is None, options.seed + run) for system in SYSTEMS} for run in range(options.runs)]
    figures = together(runs)

    print(f"{'thousand keys a second':>26} {'Terrace':>28} {'RocksDB':>28} {'ratio':>7} {'aim':>5}")
    for work, rates, aim in rows_of(figures):
        cells = ["{:,.0f} ({:,.0f}..{:,.0f})".format(*(x / 1000 for x in rates[system])) for system in SYSTEMS]
        ratio = rates["terrace"][0] / rates["rocksdb"][0]
        print(f"{work:>26} {cells[0]:>28} {cells[1]:>28} {ratio:>7.2f} {aim if aim else '-':>5}")
    for batch in figures["terrace"]["read"]:
        cpu = {system: statistics.median(figures[system]["read"][batch]["cpu_seconds_per_key"]) for system in SYSTEMS}
        read = {system: statistics.median(figures[system]["read"][batch]["read_bytes_per_key"]) for system in SYSTEMS}
        print(f"CPU a key, read {int(batch):,}: {cpu['terrace'] * 1e6:.2f} and {cpu['rocksdb'] * 1e6:.2f} us, "
              f"1/{cpu['rocksdb'] / cpu['terrace']:.1f} (aim 1/8); from the disk {read['terrace']:,.0f} and {read['rocksdb']:,.0f} B")
    for system in SYSTEMS:
        figure = figures[system]
        write = figure["sustained"]
        print(f"{system}: write amplification {spread(figure['load']['write_amplification'])} of the load, "
              f"{spread(write['write_amplification'])} sustained at {spread(write['space'])} times the rows' space; longest write "
              f"{spread(write['longest_write_seconds'])} s (median {statistics.median(write['median_write_seconds']):.3f}); "
              f"peak memory {max(figure['peak_memory_bytes']) / 1e6:,.0f} MB")
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps({"machine": processor, "seed": options.seed, "memory": memory,
                                                            "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
