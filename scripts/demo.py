"""What scripts/demo does once the program is built: generate a click log, train, evaluate, report."""
import argparse
import json
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TERRACE = ROOT / "build/bin/terrace"
FOLDER = ROOT / "runs/demo"
SEED = 2026
MIB = 1 << 20
INTERRUPTED = 130  # Exit status: after a checkpoint.

JOB = """\
# The job of scripts/demo: a model several times larger than the memory of the whole process.
seed: {seed}
output: {run}
data: {{format: criteo, train: [{train}], validation: [{validation}]}}
table: {{dim: {dim}, optimizer: {{type: adagrad, learning_rate: 0.05}}}}
network: {{type: dnn, hidden: [64, 32]}}
training: {{batch: 32768, minibatch: 1024, threads: 2}}
memory: {{budget: {budget}}}
ssd: {{quota: {quota}}}
checkpoint: {{every_batches: 20, keep: 1}}
"""


def say(text):
    print(f"demo: {text}", flush=True)


def fail(text):
    print(f"demo: {text}", file=sys.stderr)
    sys.exit(1)


def run(*arguments, shown=True):
    """Runs the program; its output is seen as it comes. Ends the demo where it fails."""
    command = [str(TERRACE), *map(str, arguments)]
    if shown:
        say("$ " + " ".join(shorten(c) for c in command))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    told = 0
    while True:
        try:
            output = process.communicate()[0]
            break
        except KeyboardInterrupt:
            # The program was told as well: it takes a checkpoint, or ends at once when told again.
            told += 1
    if process.returncode == INTERRUPTED or process.returncode == -signal.SIGINT:
        print(output, end="")
        sys.exit(INTERRUPTED)
    if process.returncode != 0 and told > 1:
        fail("interrupted twice: the program ended at once")
    if process.returncode != 0:
        print(output)
        fail(f"terrace {arguments[0]} ended with exit status {process.returncode} (its message is above)")
    return output


def shorten(argument):
    return argument.removeprefix(str(ROOT) + "/")


def generate(rows, first_row, path):
    """A file of the log and what the oracle reaches on it; kept from an earlier demo where it is the same."""
    note = path.with_name(path.name + ".json")
    settings = {"rows": rows, "first_row": first_row, "seed": SEED, "cardinality": 10_000_000, "zipf": 1.05}
    if note.exists() and path.exists():
        kept = json.loads(note.read_text())
        if kept["settings"] == settings and kept["bytes"] == path.stat().st_size:
            say(f"{shorten(str(path))} is there from an earlier demo")
            return kept["oracle"]
    options = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    oracle = json.loads(run("generate", "--output", path, *options, "--json"))["oracle"]
    note.write_text(json.dumps({"settings": settings, "bytes": path.stat().st_size, "oracle": oracle}))
    return oracle


def mib(count):
    return f"{count / MIB:,.0f} MiB" if count < 10 * 1024 * MIB else f"{count / MIB / 1024:,.1f} GiB"


def report(summary, oracle, evaluated, run_folder, seconds):
    cache, ssd, memory = summary["cache"], summary["ssd"], summary["memory"]
    stages = summary["stages"]
    longest = max(stages, key=lambda name: stages[name]["busy_seconds"])
    accesses = cache["hits"] + cache["misses"]
    lines = [
        ("examples", f"{summary['examples']:,} at {summary['examples_per_second']:,.0f} a second"),
        ("model", f"{summary['rows']:,} rows, {mib(summary['model_bytes'])}, "
                  f"{summary['model_bytes'] / memory['budget_bytes']:.1f} x the memory budget"),
        ("memory", f"peak {mib(memory['peak_bytes'])} of a budget of {mib(memory['budget_bytes'])}"),
        ("cache", f"{100 * cache['hits'] / max(accesses, 1):.1f} % of {accesses:,} row accesses found in memory, "
                  f"{cache['evictions']:,} rows evicted"),
        ("SSD", f"{mib(ssd['read_bytes'])} read, {mib(ssd['write_bytes'])} written, "
                f"{mib(ssd['disk_bytes'])} held now"),
        ("longest stage", f"'{longest}', busy {stages[longest]['busy_seconds']:.1f} s of {summary['seconds']:.1f} s"),
        ("AUC", f"{evaluated['auc']:.4f} on examples it has not seen; the oracle that drew the labels: "
                f"{oracle['auc']:.4f}"),
        ("log loss", f"{evaluated['logloss']:.4f}; the oracle's: {oracle['logloss']:.4f}"),
        ("the run", f"{shorten(str(run_folder))} (job.yaml, metrics.jsonl, summary.json, checkpoints)"),
        ("time", f"{seconds:.0f} s for this step"),
    ]
    print()
    for name, text in lines:
        print(f"  {name + ':':15} {text}")
    print(f"""
  What to try next:
    build/bin/terrace predict {shorten(str(run_folder))} --data runs/demo/validation.tsv --output runs/demo/predictions.txt
    build/bin/terrace inspect {shorten(str(run_folder))} --digest
    build/bin/terrace train runs/demo/demo.yaml --overwrite --set memory.budget=4GiB    # the same digest
    build/bin/terrace train examples/criteo.yaml --set data.train=[your/log.tsv]""")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--budget", default="448MiB")
    parser.add_argument("--quota", default="20GiB")
    arguments = parser.parse_args()
    started = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    train, validation = FOLDER / "train.tsv.zst", FOLDER / "validation.tsv"
    generate(arguments.rows, 0, train)
    oracle = generate(min(50_000, arguments.rows // 10), arguments.rows, validation)

    folder, job = FOLDER / "run", FOLDER / "demo.yaml"
    job.write_text(JOB.format(seed=SEED, run=folder, train=train, validation=validation, dim=arguments.dim,
                              budget=arguments.budget, quota=arguments.quota))
    run("train", job, "--overwrite")
    evaluated = json.loads(run("evaluate", folder, "--data", validation, "--json"))
    summary = json.loads((folder / "summary.json").read_text())
    report(summary, oracle, evaluated, folder, time.monotonic() - started)


if __name__ == "__main__":
    main()
