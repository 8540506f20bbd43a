"""The small jobs of the whole-system tests."""

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


def drawn(index, rng):
    """Settings of the tiers for a table with that index; all come to the same bits."""
    return {"table.index": index, "table.expected_keys": rng.choice((10_000, 70_000)),
            "cache.policy": rng.choice(("s3_fifo", "lru_lfu", "pass_lfu")),
            "ssd.compaction": rng.choice(("gain", "stale_share", "model_size")),
            # By group each part of a flush would read every file whole.
            "ssd.read": "planned" if index == "group" else rng.choice(("planned", "whole_file")),
            "binding": rng.choice(("auto", "off"))}


def tiny(train, validation_files=(), **more):
    """A job that is done in well under a second of training."""
    job = evicting(train, validation_files)
    job["table"]["dim"] = 8
    job["data"]["epochs"] = 1
    job["training"] = {"batch": 512, "minibatch": 128, "threads": 2}
    job["network"]["hidden"] = [16]
    job.update(more)
    return job
