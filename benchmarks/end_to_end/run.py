#!/usr/bin/env python3
"""Whole-system speed, each figure with the command that took it.

  run.py peers     examples/s from a click log against PyTorch and FBGEMM on the CPU fed with ready tensors, all in
                   memory, of which each has as much as --budget says (scripts/setup-peers first)
  run.py curve     examples/s against model bytes / memory budget, with either index
  run.py overlap   wall time at depth 2 against what the job could take at best
  run.py interrupt seconds from SIGINT to the end of the process, with its checkpoint

"n threads" means a process bound to n cores. Figures of different machines, or of different minutes of
a shared one, don't compare: read the ratios.
"""
import argparse
import json
import mmap
import os
import pathlib
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from memory_limit import MemoryLimit  # noqa: E402

TERRACE = ROOT / "build/bin/terrace"
PEERS_PYTHON = ROOT / ".venv-peers/bin/python"
GIB = 1 << 30


def machine():
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = int(re.search(r"MemTotal:\s+(\d+)", open("/proc/meminfo").read()).group(1)) >> 20
    return f"{model}, {os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}"


def bound(command, threads):
    cores = sorted(os.sched_getaffinity(0))[:threads]
    if len(cores) < threads:
        raise SystemExit(f"{threads} threads asked, {len(cores)} cores here")
    return ["taskset", "-c", ",".join(map(str, cores)), *map(str, command)]


def execute(command, env=None, run=subprocess.run):
    result = run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if result.returncode != 0:
        raise SystemExit(f"exit {result.returncode}: {' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result.stdout


def bytes_of(text):
    """Of a size as in job files, with a unit or without."""
    match = re.fullmatch(r"([\d.]+) *(?:([kmgt])(i?)b|b)?", str(text).lower())
    if not match:
        raise SystemExit(f"'{text}' is no size: 1500MiB, say")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("kmgt".index(unit) + 1 if unit else 0))


def touch_memory(count):
    """Uses so much memory for a moment. Where the machine is a guest whose host takes back what is free, the first use of a
    page costs up to a hundred times a later one: that is neither program's, and which of two runs in turn pays is chance."""
    page = mmap.PAGESIZE
    free = int(re.search(r"MemAvailable:\s+(\d+)", open("/proc/meminfo").read()).group(1)) << 10
    count = min(count, free // 8 * 7)
    with mmap.mmap(-1, count // page * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel without them.
        memory[::page] = bytes(len(memory) // page)


class Watch:
    """Second by second, while it is entered: the share of the first `threads` cores' time that nobody used, and of the
    time that the disk of `folder` was busy (None where the system does not say). Others' work counts as well."""

    def __init__(self, threads, folder):
        self.names = {f"cpu{core}" for core in sorted(os.sched_getaffinity(0))[:threads]}
        device = os.stat(folder).st_dev
        self.device = [str(os.major(device)), str(os.minor(device))]
        self.seconds = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def sample(self):
        lines = [line.split() for line in open("/proc/stat")]
        cores = [[int(ticks) for ticks in line[1:9]] for line in lines if line[0] in self.names]
        disks = [line.split() for line in open("/proc/diskstats")]
        busy = [int(line[12]) for line in disks if line[:2] == self.device]
        return time.monotonic(), sum(c[3] + c[4] for c in cores), sum(map(sum, cores)), busy[0] if busy else None

    def watch(self):
        before = self.sample()
        while not self.stop.wait(1):
            now = self.sample()
            took, idle, ticks = (b - a for a, b in zip(before[:3], now[:3]))
            disk = None if now[3] is None else min(1, (now[3] - before[3]) / 1000 / took)
            self.seconds.append({"cores_idle": idle / max(ticks, 1), "disk_busy": disk})
            before = now

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


class Trainer:
    """Runs of `terrace train` in a scratch folder."""

    def __init__(self, options, run=subprocess.run):
        self.run = run
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="terrace-bench-", dir=options.scratch))
        self.binary = options.binary
        self.settings = [argument for setting in options.set for argument in ("--set", setting)]
        self.count = 0

    def command(self, job, threads):
        """What trains it, and the run's folder."""
        self.count += 1
        run = self.folder / f"run{self.count}"
        path = self.folder / f"run{self.count}.yaml"
        path.write_text(yaml.safe_dump({**job, "output": str(run)}, sort_keys=False))
        return bound([self.binary, "train", path, *self.settings], threads), run

    def train(self, job, threads, keep=False):
        command, run = self.command(job, threads)
        execute(command, run=self.run)
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        if not keep:
            shutil.rmtree(run)
        return summary, lines

    def log(self, seed, rows, cardinality):
        """A click log as text; only the last one asked for is kept."""
        path = self.folder / f"{rows}-{cardinality}.tsv"
        if not path.exists():
            for other in self.folder.glob("*.tsv"):
                other.unlink()
            execute([str(self.binary), "generate", "--seed", str(seed), "--rows", str(rows), "--cardinality", str(cardinality), "--zipf", "1.05",
                     "--output", str(path)])
        return path

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def synthetic(seed, rows, cardinality, dim, hidden, minibatch, threads, budget, **more):
    job = {
        "seed": seed,
        "data": {"format": "synthetic", "rows": rows, "cardinality": cardinality, "zipf": 1.05},
        "table": {"dim": dim, "optimizer": {"type": "adagrad", "learning_rate": 0.05}},
        "network": {"type": "dnn", "hidden": hidden, "optimizer": {"type": "adam", "learning_rate": 0.001}},
        "training": {"minibatch": minibatch, "batch": max(65536, minibatch), "threads": threads},
        "memory": {"budget": budget},
        "ssd": {"quota": "60GiB"},
        "checkpoint": {"every_batches": 0, "keep": 1},
        "metrics": {"every_examples": max(65536, minibatch)},
    }
    for name, value in more.items():
        job[name] = {**job.get(name, {}), **value}
    return job


def middle(lines, begin=0.4, end=0.9):
    """Performance of the intervals in the middle of a run: before it rows are new and memory fills, after it
    training only uses up what was brought up ahead."""
    spans = [line["performance"] for line in lines if line["kind"] == "interval"]
    return spans[int(len(spans) * begin):int(len(spans) * end)] or spans


def rate_of(spans):
    """Examples a second of some intervals, as one span."""
    seconds = sum(p["interval_seconds"] for p in spans)
    return sum(p["examples_per_second"] * p["interval_seconds"] for p in spans) / seconds


# --- peers ----------------------------------------------------------------------------------------

def peers(options):
    targets = {"64,32": 2.0, "256,128": 1.4, "1024,512,256": 1.15}
    if not PEERS_PYTHON.exists():
        raise SystemExit("run scripts/setup-peers first")
    limit = MemoryLimit(bytes_of(options.budget))
    trainer = Trainer(options, limit.run)
    results = []
    print(f"machine: {machine()}; {limit}")
    print(f"dim {options.dim}, 26 slots of {options.cardinality:,} categories, Zipf 1.05; examples/s, the median (least..most) of "
          f"intervals; of Terrace the median of {options.repeats} runs")
    print(f"{'network':>14} {'batch':>6} {'threads':>7} {'torch':>27} {'FBGEMM':>27} {'dense only':>27} {'Terrace':>27} "
          f"{'ratio':>6} {'aim':>5} {'beyond dense':>13}  {'peak MiB of each':>22}")
    try:
        for hidden in options.hidden:
            for minibatch in options.minibatch:
                for threads in options.threads:
                    row = compare(options, trainer, limit, hidden, minibatch, threads)
                    row["target"] = targets.get(hidden)
                    results.append(row)
                    print_comparison(row)
    finally:
        trainer.close()
    return results


def compare(options, trainer, limit, hidden, minibatch, threads):
    row = {"hidden": hidden, "minibatch": minibatch, "threads": threads, "memory": str(limit)}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for peer in ("torch", "fbgemm", "dense"):
        best = None
        # "medium" routes fp32 GEMMs to another library that is faster on some processors; where the
        # processor has bf16 tiles it would lose precision, so it is tried only without them.
        for precision in ("highest",) if has_amx() else ("highest", "medium"):
            found = json.loads(execute(bound(
                [PEERS_PYTHON, ROOT / "benchmarks/end_to_end/peer.py", peer, "--threads", threads, "--dim", options.dim,
                 "--hidden", hidden, "--minibatch", minibatch, "--cardinality", options.cardinality, "--seconds",
                 options.seconds, "--precision", precision, "--seed", options.seed], threads), environment, limit.run))
            found["precision"] = precision
            if best is None or found["median"] > best["median"]:
                best = found
        row[peer] = best
    rates, intervals, whole, cpu, peaks = [], [], [], [], []
    # The peers' rows all exist when they are timed, and no page is new. Here that is so in the second epoch, of
    # which the first tenth and the end, for which all has been read ahead, don't count.
    rows = max(8, int(row["fbgemm"]["median"] * options.seconds * 2) // options.batch) * options.batch
    for _ in range(options.repeats):
        job = synthetic(options.seed, rows, options.cardinality, options.dim, [int(h) for h in hidden.split(",")], minibatch, threads,
                        options.budget, training={"batch": options.batch})
        job["data"] = {"format": "criteo", "train": [str(trainer.log(options.seed, rows, options.cardinality))], "epochs": 2}
        summary, lines = trainer.train(job, threads)
        if summary["cache"]["evictions"]:
            raise SystemExit("rows were evicted: this comparison is in memory, raise --budget")
        spans = middle(lines, 0.55, 0.8)
        if any(span["cache"]["created"] for span in spans):
            raise SystemExit("rows were created in the second epoch")
        rates.append(rate_of(spans))
        intervals += [span["examples_per_second"] for span in spans]
        peaks.append(summary["memory"]["peak_bytes"])
        whole.append(summary["examples_per_second"])
        cpu.append(summary["cpu_seconds"])
    row["terrace"] = {"median": statistics.median(rates), "least": min(intervals), "most": max(intervals),
                      "samples": len(intervals), "peak_bytes": max(peaks), "whole_run": statistics.median(whole), "cpu_seconds": statistics.median(cpu),
                      "examples": 2 * rows}
    row["ratio"] = row["terrace"]["median"] / max(row["torch"]["median"], row["fbgemm"]["median"])
    seconds = {name: minibatch / row[name]["median"] for name in ("fbgemm", "dense", "terrace")}
    beyond = seconds["fbgemm"] - seconds["dense"]
    row["beyond_dense_share"] = (seconds["terrace"] - seconds["dense"]) / beyond if beyond > 0 else None
    return row


def has_amx():
    return "amx_bf16" in open("/proc/cpuinfo").read()


def print_comparison(row):
    def cell(name):
        spread = f"({row[name]['least']:,.0f}..{row[name]['most']:,.0f})"
        return f"{row[name]['median']:>9,.0f} {spread:>17}"
    aim = f"{row['target']:.2f}" if row["target"] else "-"
    peaks = " ".join(f"{row[name]['peak_bytes'] >> 20}" for name in ("torch", "fbgemm", "dense", "terrace"))
    # FBGEMM may seem to take no time beyond the dense step, where that is most of all.
    share = f"{100 * row['beyond_dense_share']:.0f} %" if row["beyond_dense_share"] is not None else "-"
    print(f"{row['hidden']:>14} {row['minibatch']:>6} {row['threads']:>7} {cell('torch')} {cell('fbgemm')} {cell('dense')} "
          f"{cell('terrace')} {row['ratio']:>6.2f} {aim:>5} {share:>13}  {peaks:>22}", flush=True)


# --- curve ----------------------------------------------------------------------------------------

def curve(options):
    trainer = Trainer(options)
    results = []
    print(f"machine: {machine()}")
    print(f"Zipf 1.05, 26 slots, minibatch 2048, {options.hidden[0]}, {options.threads[-1]} threads, index {options.index}, look-ahead "
          f"{options.look_ahead}{''.join(', ' + setting for setting in options.set)}; "
          f"examples/s: the median of {options.repeats} runs (least..most), the other figures of that run")
    print(f"{'dim':>4} {'model/budget':>12} {'budget':>9} {'examples/s':>27} {'share':>6} {'whole run':>9} {'hits':>6} {'read':>9} {'written':>9} "
          f"{'index B/key':>11} {'peak':>9} {'cores busy':>10} {'reads/s':>8}")
    try:
        for dim in options.dims:
            base = None
            # How large the model is shows only when it is trained; that run's figures are not used. Its size by key
            # counts: by group, blocks that are not full would count as model.
            size = curve_point(options, trainer, dim, 0.5, options.model_gib * GIB, {})
            table = {} if options.index == "key" else {"index": options.index, "expected_keys": size["rows"]}
            for ratio in options.ratios:
                runs = sorted((curve_point(options, trainer, dim, ratio, size["model_bytes"], table) for _ in range(options.repeats)),
                              key=lambda run: run["rate"])
                row = {**runs[len(runs) // 2], "rates": [run["rate"] for run in runs]}
                row["rate"] = statistics.median(row["rates"])
                base = base or row["rate"]
                row["share"] = row["rate"] / base
                results.append(row)
                print_point(row)
    finally:
        trainer.close()
    return results


def curve_point(options, trainer, dim, ratio, model_bytes, table):
    """The model is the same at each point; the budget shrinks. Shares are of the first point's median rate."""
    threads = options.threads[-1]
    budget = int(model_bytes / ratio)
    if budget < options.least_budget_gib * GIB:
        raise SystemExit(f"a budget of {budget / GIB:.2f} GiB: raise --rows and --model-gib")
    job = synthetic(options.seed, options.rows, options.cardinality, dim, [int(h) for h in options.hidden[0].split(",")], 2048,
                    threads, budget, training={"batch": options.batch}, metrics={"every_examples": options.batch}, table=table,
                    cache={"look_ahead": options.look_ahead})
    summary, lines = trainer.train(job, threads)
    if summary["memory"]["peak_bytes"] > budget:
        raise SystemExit(f"the process took {summary['memory']['peak_bytes']:,} bytes of a budget of {budget:,}")
    accesses = summary["cache"]["hits"] + summary["cache"]["misses"]
    spans = middle(lines)
    return {"dim": dim, "ratio": model_bytes / budget, "asked_ratio": ratio, "budget_bytes": budget, "index": options.index,
            "model_bytes": summary["model_bytes"], "rows": summary["rows"], "rate": rate_of(spans),
            "whole_run": summary["examples_per_second"], "hit_rate": summary["cache"]["hits"] / max(accesses, 1), "ssd": summary["ssd"],
            "index_bytes_per_key": summary["memory"]["index_bytes_per_key"], "peak_bytes": summary["memory"]["peak_bytes"],
            "seconds": summary["seconds"], "cores_busy": summary["cpu_seconds"] / summary["seconds"] / threads,
            "read_requests_per_second": sum(p["ssd"]["read_requests"] for p in spans) / sum(p["interval_seconds"] for p in spans)}


def print_point(row):
    print(f"{row['dim']:>4} {row['ratio']:>12.2f} {row['budget_bytes'] / GIB:>5.2f} GiB "
          f"{row['rate']:>9,.0f} ({row['rates'][0]:,.0f}..{row['rates'][-1]:,.0f}) {100 * row['share']:>4.0f} % {row['whole_run']:>9,.0f} "
          f"{100 * row['hit_rate']:>4.1f} % {row['ssd']['read_bytes'] / GIB:>5.1f} GiB {row['ssd']['write_bytes'] / GIB:>5.1f} GiB "
          f"{row['index_bytes_per_key']:>11.1f} {row['peak_bytes'] / GIB:>5.2f} GiB {100 * row['cores_busy']:>8.0f} % "
          f"{row['read_requests_per_second']:>8,.0f}", flush=True)


# --- overlap --------------------------------------------------------------------------------------

def overlap(options):
    """wall(depth 2) / max(longest stage of the same job at depth 0, CPU seconds / cores), where the CPU seconds are those of the
    run: what it would take if nothing ever waited. Beside it the ratio with those of depth 0, which has also what depth 2
    computes more. The machine is shared and its rates drift: a depth 0 and a depth 2 take turns, and each turn has its ratio."""
    trainer = Trainer(options)
    print(f"machine: {machine()}")
    try:
        turns = [overlap_turn(options, trainer) for _ in range(options.repeats)]
    finally:
        trainer.close()
    ratios, to_depth_0 = (sorted(turn[name] for turn in turns) for name in ("ratio", "ratio_to_cpu_at_depth_0"))
    print(f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}; aim 1.10), with the CPU seconds of depth 0 "
          f"{statistics.median(to_depth_0):.2f} ({to_depth_0[0]:.2f}..{to_depth_0[-1]:.2f})")
    print_timeline(sorted(turns, key=lambda turn: turn["ratio"])[len(turns) // 2]["timeline_depth_2"])
    return {"ratio": statistics.median(ratios), "target": 1.10, "turns": turns}


def overlap_turn(options, trainer):
    threads = options.threads[-1]
    hidden = [int(h) for h in options.hidden[0].split(",")]
    runs = {}
    for depth in (0, 2):
        job = synthetic(options.seed, options.rows, options.cardinality, options.dims[0], hidden, 2048, threads, options.budget,
                        training={"batch": options.batch}, pipeline={"depth": depth})
        touch_memory(bytes_of(options.budget))
        with Watch(threads, trainer.folder) as watch:
            runs[depth] = trainer.train(job, threads)[0]
        # Up to the final checkpoint: the run's folder is removed afterwards.
        runs[depth]["timeline"] = watch.seconds[:int(runs[depth]["seconds"])]
    stages = runs[0]["stages"]
    longest = max(stages, key=lambda name: stages[name]["busy_seconds"])
    bound_stage = stages[longest]["busy_seconds"]
    cpu = {depth: runs[depth]["cpu_seconds"] / threads for depth in (0, 2)}
    wall = runs[2]["seconds"]
    turn = {"wall_depth_0": runs[0]["seconds"], "wall_depth_2": wall, "longest_stage": longest, "longest_stage_seconds": bound_stage,
            "cpu_seconds_per_core": cpu[2], "cpu_seconds_per_core_at_depth_0": cpu[0], "ratio": wall / max(bound_stage, cpu[2]),
            "ratio_to_cpu_at_depth_0": wall / max(bound_stage, cpu[0]), "stages": stages, "timeline_depth_2": runs[2]["timeline"]}
    print(f"depth 0: {turn['wall_depth_0']:.2f} s, longest stage {longest} {bound_stage:.2f} s, CPU seconds / cores {cpu[0]:.2f} s; "
          f"depth 2: {wall:.2f} s, CPU seconds / cores {cpu[2]:.2f} s; ratio {turn['ratio']:.2f}", flush=True)
    return turn


def print_timeline(seconds):
    """A tenth of the run a column."""
    parts = [part for part in (seconds[len(seconds) * i // 10:len(seconds) * (i + 1) // 10] for i in range(10)) if part]
    for name in ("cores_idle", "disk_busy"):
        if parts and all(second[name] is not None for second in seconds):
            shares = (statistics.mean(second[name] for second in part) for part in parts)
            print(f"depth 2, {name.replace('_', ' ')}, by tenths of the run: " + " ".join(f"{100 * s:.0f} %" for s in shares))


def has_trained(run):
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def interrupt(options):
    """The aim is that of SIGINT: 20 seconds, whatever is dirty."""
    trainer = Trainer(options)
    print(f"machine: {machine()}")
    results = []
    try:
        for after in options.after:
            threads = options.threads[-1]
            job = synthetic(options.seed, options.rows, options.cardinality, options.dims[0], [int(h) for h in options.hidden[0].split(",")],
                            2048, threads, options.budget, training={"batch": options.batch})
            command, run = trainer.command(job, threads)
            with open(trainer.folder / "log", "w+") as log:
                process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                try:
                    while process.poll() is None and not has_trained(run):
                        time.sleep(0.01)
                    code = process.wait(after)
                    log.seek(0)
                    raise SystemExit(f"the run ended with {code} before it was interrupted (more --rows?):\n{log.read()[-2000:]}")
                except subprocess.TimeoutExpired:
                    start = time.monotonic()
                    process.send_signal(signal.SIGINT)
                code = process.wait()
                seconds = time.monotonic() - start
                log.seek(0)
                if code != 130:
                    raise SystemExit(f"exit status {code}, not 130 (with 0 it had trained all: more --rows?):\n{log.read()[-2000:]}")
            summary = json.loads((run / "summary.json").read_text())
            results.append({"after": after, "seconds": seconds, "examples": summary["examples"], "rows": summary["rows"],
                            "model_bytes": summary["model_bytes"], "write_bytes": summary["ssd"]["write_bytes"]})
            print(f"SIGINT after {after:g} s, at {summary['examples']:,} examples and {summary['model_bytes'] / GIB:.1f} GiB of model: {seconds:.1f} s to the end "
                  f"(aim 20)", flush=True)
            shutil.rmtree(run)
    finally:
        trainer.close()
    return {"target": 20, "runs": results}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("peers", peers), ("curve", curve), ("overlap", overlap), ("interrupt", interrupt)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--threads", type=int, nargs="+", default=[1, 2] if name == "peers" else [2])
        command.add_argument("--hidden", nargs="+", default=["64,32", "256,128", "1024,512,256"] if name == "peers" else ["256,128"])
        command.add_argument("--scratch", default=None, help="folder of the runs (default: the system's temporary one)")
        command.add_argument("--output", help="JSON file for all figures")
        command.add_argument("--binary", type=pathlib.Path, default=TERRACE, help="another build, to compare with")
        command.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="of the job of each run, as of terrace train")
        command.add_argument("--repeats", type=int, default=3)
        command.add_argument("--seed", type=int, help="of model and log (default: another one each time, printed)")
        if name == "peers":
            command.add_argument("--dim", type=int, default=16)
            command.add_argument("--minibatch", type=int, nargs="+", default=[512, 2048])
            command.add_argument("--cardinality", type=int, default=100_000)
            command.add_argument("--seconds", type=float, default=6)
            command.add_argument("--budget", default="8GiB")
        else:
            command.add_argument("--rows", type=int, default=4_000_000)
            command.add_argument("--cardinality", type=int, default=10_000_000)
        command.add_argument("--batch", type=int, default=262144 if name == "peers" else 131072)
        if name == "curve":
            command.add_argument("--dims", type=int, nargs="+", default=[32, 64])
            command.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1, 2, 4, 8])
            command.add_argument("--look-ahead", choices=["auto", "off"], default="auto", help="cache.look_ahead")
            command.add_argument("--index", choices=["key", "group", "auto"], default="key",
                                 help="of the table; group and auto expect the keys that a first run, by key, has found")
            command.add_argument("--least-budget-gib", type=float, default=1)
            command.add_argument("--model-gib", type=float, default=8, help="about what the model comes to")
        if name in ("overlap", "interrupt"):
            command.add_argument("--dims", type=int, nargs="+", default=[32])
            command.add_argument("--budget", default="2GiB")
        if name == "interrupt":
            command.add_argument("--after", type=float, nargs="+", default=[10, 20, 30], help="seconds from its first line of metrics on, of a run each")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = time.time_ns() // 1000 % 10**9
    print(f"--seed {options.seed}")
    figures = options.function(options)
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps(
            {"machine": machine(), "command": sys.argv[1:], "seed": options.seed, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
