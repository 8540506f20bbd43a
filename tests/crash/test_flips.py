"""A flipped bit in every byte of a small run: detected or harmless, never a wrong row (flip_sweep.cc)."""
import subprocess

import harness
import jobs

# Seconds for all eight bits of every byte.
FULL_PATIENCE_SECONDS = 3600


def test_every_byte(terrace, workspace, logs, sample_seed, full):
    """Of every file of a run that has all kinds of them; over both indexes at once."""
    log = logs.criteo(48, seed=8, cardinality=20, zipf=1.05)
    small = {"table.dim": 2, "table.admit_after": 2, "table.admit_filter": "4KiB", "table.expected_keys": 100,
             "network.hidden": [2], "training.batch": 16, "training.minibatch": 16, "ssd.merge_gap": "auto",
             "checkpoint.every_batches": 2, "metrics.every_examples": 64}
    sweep = terrace.binary.parent.parent / "tests" / "flip_sweep"
    print(f"--sample-seed {sample_seed}")
    processes = {}
    for index in ("key", "group"):
        run = harness.Run(terrace, workspace, jobs.tiny([log], [log]), index, **{**small, "table.index": index})
        run.train().expect(0)
        assert len(run.checkpoints()) == 2
        processes[index] = harness.Process([sweep, "--run", run.path, "--seed", sample_seed,
                                            "--bits", "all" if full else "one"], workspace / f"{index}.flips")
    for index, process in processes.items():
        outcome = process.wait(FULL_PATIENCE_SECONDS if full else harness.PATIENCE_SECONDS).expect(0)
        print(f"index {index}, {outcome.seconds:.0f} s\n{outcome.output}")
        swept = {line.split(":")[0] for line in outcome.output.splitlines()}
        there = {str(p.relative_to(workspace / index)) for p in (workspace / index).rglob("*") if p.is_file()}
        assert swept == there
        kinds = {name.split("-")[0] for name in there}
        assert {"RUN", "LOCK", "job.yaml", "metrics.jsonl", "summary.json", "checkpoints/checkpoint", "dense/dense",
                "admission/filter", "rows/default/shard"} <= kinds, kinds
        assert any("/rows-" in name for name in there) and any("/manifest-" in name for name in there)
