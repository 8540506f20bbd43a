"""Keys that the index of a store cannot tell apart: whole columns of a log are made of them, and
the result is what everything in memory gives."""
import random

import numpy

import harness
import jobs

FIRST_CATEGORY_SLOT = 14  # C14's, the 14th of 39 columns: see docs/data.md.
COLUMNS = range(18, 26)  # Of the 26 categories: those of the log that have many values.
PREFIXES = 12
INDEX_BITS = 36  # Of the mixed key, from the top, that an entry of the index knows.


def unmix(hashed):
    """The key whose mixed hash it is, the inverse of SplitMix64's finish (terrace/base/ids.h)."""
    def unshift(value, shift):
        result = value
        for _ in range(64 // shift):
            result = value ^ (result >> numpy.uint64(shift))
        return result
    with numpy.errstate(over="ignore"):
        value = unshift(hashed, 31) * numpy.uint64(0x319642B2D24D8EC3)
        value = unshift(value, 27) * numpy.uint64(0x96DE1B173F119089)
        return unshift(value, 30) - numpy.uint64(0x9E3779B97F4A7C15)


def alike_categories(rng, enough):
    """slot -> categories, at least so many, whose keys share the bits of one of few prefixes."""
    wanted = [FIRST_CATEGORY_SLOT + column for column in COLUMNS]
    found = {slot: [] for slot in wanted}
    for _ in range(PREFIXES):
        prefix = numpy.uint64(rng.getrandbits(INDEX_BITS)) << numpy.uint64(64 - INDEX_BITS)
        # In parts: the memory of this process counts as its children's, which other tests limit.
        for first in range(0, 1 << 23, 1 << 18):
            keys = unmix(prefix | numpy.arange(first, first + (1 << 18), dtype=numpy.uint64))
            slots = keys >> numpy.uint64(48)
            for slot in wanted:
                found[slot].extend((keys[slots == slot] & numpy.uint64((1 << 48) - 1)).tolist())
    assert all(len(categories) >= enough for categories in found.values())
    return found


def test_alike_keys(terrace, workspace, logs, sample_seed):
    rng = random.Random(sample_seed)
    print(f"--sample-seed {sample_seed}")
    categories = alike_categories(rng, enough=500)
    log = workspace / "alike.tsv"
    with open(logs.criteo(4000, **jobs.EVICTING_LOG)) as source, open(log, "w") as target:
        for line in source:
            fields = line.rstrip("\n").split("\t")
            for column in COLUMNS:
                fields[14 + column] = f"{rng.choice(categories[FIRST_CATEGORY_SLOT + column]):012x}"
            target.write("\t".join(fields) + "\n")
    job = jobs.evicting([log])
    reference = harness.Run(terrace, workspace, job, name="reference",
                            **{"memory.budget": jobs.LARGE_BUDGET, "pipeline.depth": 0})
    reference.train().expect(0)
    for shards in (1, 4):
        run = harness.Run(terrace, workspace, job, name=f"run{shards}",
                          **{"training.batch": 512, "ssd.shards": shards})
        run.train().expect(0)
        mistaken = sum(line["performance"]["ssd"]["mistaken_reads"] for line in run.metrics()
                       if line["kind"] == "interval")
        print(f"{shards} shards: {mistaken} mistaken reads")
        assert mistaken > 0, "no two keys were alike: the log is not what the test is for"
        assert run.summary()["ssd"]["read_bytes"] > 0
        harness.assert_same(reference.result(), run.result(), f"with {shards} shards")
        run.verify()
