"""The small jobs of the whole-system tests."""
import random

import pairwise

MIB = 1 << 20

# Rows that do not fit: 26 slots of mostly distinct keys, wide rows, two epochs, so that what the first
# epoch evicted is read again in the second. Seconds to run, yet more than 100 MiB of rows.
EVICTING_ROWS = 12_000
EVICTING_LOG = dict(seed=3, cardinality=40_000, zipf=0.6)
SMALL_BUDGET = "128MiB"
LARGE_BUDGET = "2GiB"


def evicting(train, validation_files=(), **more):
    """A job whose model is larger than the memory of SMALL_BUDGET."""
    job = {
        "seed": 11,
        "data": {"format": "criteo", "train": [str(p) for p in train],
                 "validation": [str(p) for p in validation_files], "epochs": 2},
        "table": {"dim": 64, "optimizer": {"type": "adagrad", "learning_rate": 0.05}},
        "network": {"type": "dnn", "hidden": [32, 16]},
        "training": {"batch": 2048, "minibatch": 256, "threads": 2},
        "memory": {"budget": SMALL_BUDGET},
        "ssd": {"quota": "8GiB"},
        "checkpoint": {"every_batches": 2, "keep": 2},
        "metrics": {"every_examples": 1024},
    }
    job.update(more)
    return job


def interrupted(train, validation_files=(), **more):
    """A smaller one that is at each moment in the midst of something: it evicts, checkpoints and compacts all the time."""
    job = evicting(train, validation_files)
    job["memory"]["budget"] = "100MiB"
    job["training"]["batch"] = 512
    job["metrics"]["every_examples"] = 512
    job["ssd"].update({"file_size": "1MiB", "shards": 2, "stale_share": 0.1})
    job.update(more)
    return job


INTERRUPTED_ROWS = 4000  # Of EVICTING_LOG.

# Settings of the tiers; all come to the same bits.
TIERS = {
    # By group each part of a flush would read every file whole.
    ("table.index", "ssd.read"): (("key", "planned"), ("key", "whole_file"), ("group", "planned")),
    "cache.policy": ("s3_fifo", "lru_lfu", "pass_lfu"),
    "ssd.compaction": ("gain", "stale_share", "model_size"),
    "table.expected_keys": (10_000, 70_000),
    "binding": ("auto", "off"),
}


def tiers(index, seed, count=None):
    """Settings with that index: those of rows in which every pair of values occurs, or so many that the seed draws."""
    (pair, *_) = TIERS
    rows = [row for row in pairwise.pairwise(TIERS, seed) if row[pair][0] == index]
    for row in rows if count is None else random.Random(seed).sample(rows, count):
        yield {**dict(zip(pair, row[pair])), **{name: value for name, value in row.items() if name != pair}}


def tiny(train, validation_files=(), **more):
    """A job that is done in well under a second of training."""
    job = evicting(train, validation_files)
    job["table"]["dim"] = 8
    job["data"]["epochs"] = 1
    job["training"] = {"batch": 512, "minibatch": 128, "threads": 2}
    job["network"]["hidden"] = [16]
    job.update(more)
    return job
