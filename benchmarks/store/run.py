#!/usr/bin/env python3
"""Terrace's store beside RocksDB on the same work, one after the other in one run:

  run.py [--keys 20000000] [--runs 3] [--seed S] [--scratch FOLDER] [--output FIGURES.json]

Each system is loaded and measured --runs times in turn, each time with other keys; figures are medians with the least and
the most of n samples: one load a run, --repeats reads of each size, --rounds of writes. RocksDB tries --read-threads, from the
most on until fewer are clearly slower, for each size of batch, and is measured with the best. scripts/setup-peers installs it;
scripts/build then builds the program. Each system runs alone in a process within --limit-mib of memory: where this user may
make one, in a control group, which counts the page cache too; the first line says whether. Figures of different machines, or
of different minutes of a shared one, don't compare: read the ratios.
"""
import argparse
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from memory_limit import MemoryLimit  # noqa: E402

PROGRAM = ROOT / "build/benchmarks/peers_bench"
SYSTEMS = ("terrace", "rocksdb")


def measure(system, options, limit, seed):
    scratch = tempfile.mkdtemp(prefix="terrace-bench-", dir=options.scratch)
    command = [PROGRAM, "--system", system, "--folder", scratch, "--keys", options.keys, "--row-bytes", options.row_bytes,
               "--repeats", options.repeats, "--rounds", options.rounds, "--update-seconds", options.update_seconds,
               "--threads", os.cpu_count(), "--read-threads", *options.read_threads, "--seed", seed]
    for batch in options.batch:
        command += ["--batch", batch]
    try:
        result = limit.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
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
    """What is compared: (work, samples of keys a second by system, aim)."""
    def each(get):
        return {system: get(figures[system]) for system in SYSTEMS}

    aims = {"20000": 1.3, "200000": 2.8, "1000000": 6.0}
    yield "first load, settled", each(lambda f: f["load"]["keys_per_second"]), 20
    yield "its tenths, not settled", each(lambda f: f["load"]["part_keys_per_second"]), None
    for batch in figures["terrace"]["read"]:
        yield f"read {int(batch):,}", each(lambda f: f["read"][batch]["keys_per_second"]), aims.get(batch)
    yield "writes, burst", each(lambda f: f["burst"]["keys_per_second"]), 20
    yield "writes, compaction paid", each(lambda f: f["sustained"]["keys_per_second"]), 10


def spread(values, scale=1, digits=2):
    """Median (least..most)."""
    return "{:,.{d}f} ({:,.{d}f}..{:,.{d}f})".format(*(f(values) * scale for f in (statistics.median, min, max)), d=digits)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=20_000_000)
    parser.add_argument("--row-bytes", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=3, help="of each system, each with a store of its own")
    parser.add_argument("--repeats", type=int, default=5, help="reads of each size in a run")
    parser.add_argument("--rounds", type=int, default=3, help="of bursts and of sustained writes in a run, each begun settled")
    parser.add_argument("--update-seconds", type=float, default=10, help="of a round of sustained writes")
    parser.add_argument("--read-threads", type=int, nargs="+", default=[1, 4, 16, 32, 64], help="tried for RocksDB")
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
    limit = MemoryLimit(options.limit_mib << 20)
    print(f"machine: {processor}, {os.cpu_count()} cores, Linux {platform.release()}; {options.keys:,} keys of {options.row_bytes} B, "
          f"{limit}; --seed {options.seed}, {options.runs} runs of each")
    runs = [{system: measure(system, options, limit, options.seed + run) for system in SYSTEMS} for run in range(options.runs)]
    figures = together(runs)

    print(f"{'thousand keys a second':>26} {'Terrace':>28} {'RocksDB':>28} {'ratio':>7} {'aim':>5} {'n':>4}")
    for work, rates, aim in rows_of(figures):
        cells = [spread(rates[system], 1e-3, 0) for system in SYSTEMS]
        ratio = statistics.median(rates["terrace"]) / statistics.median(rates["rocksdb"])
        print(f"{work:>26} {cells[0]:>28} {cells[1]:>28} {ratio:>7.2f} {aim if aim else '-':>5} {len(rates['terrace']):>4}")
    for batch in figures["terrace"]["read"]:
        of_batch = {system: figures[system]["read"][batch] for system in SYSTEMS}
        cpu, read = ({system: of_batch[system][name] for system in SYSTEMS} for name in ("cpu_seconds_per_key", "read_bytes_per_key"))
        less = statistics.median(cpu["rocksdb"]) / statistics.median(cpu["terrace"])
        threads = ", ".join(map(str, of_batch["rocksdb"]["threads"]))
        tried = ", ".join(map(str, sorted({threads for threads, _ in of_batch["rocksdb"]["tried_threads"]})))
        print(f"CPU a key, read {int(batch):,}: {spread(cpu['terrace'], 1e6)} and {spread(cpu['rocksdb'], 1e6)} us, 1/{less:.1f} (aim 1/8); "
              f"from the disk {spread(read['terrace'], 1, 0)} and {spread(read['rocksdb'], 1, 0)} B; RocksDB with the best number of "
              f"threads, run by run {threads} (of {tried}); n {len(cpu['terrace'])}")
    for system in SYSTEMS:
        figure = figures[system]
        write = figure["sustained"]
        print(f"{system}: write amplification {spread(figure['load']['write_amplification'])} of the load, "
              f"{spread(write['write_amplification'])} sustained at {spread(write['space'])} times the rows' space; longest write "
              f"{spread(write['longest_write_seconds'])} s (median {spread(write['median_write_seconds'], 1, 3)}); "
              f"peak memory {max(figure['peak_memory_bytes']) / 1e6:,.0f} MB; n {len(write['space'])} of space and the load, "
              f"{len(write['keys_per_second'])} else")
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps({"machine": processor, "seed": options.seed, "memory": str(limit),
                                                            "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
