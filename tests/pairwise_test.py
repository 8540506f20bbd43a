import itertools

import pairwise

AXES = {"a": (0, 1, 2, 4), "b": ("x", "y"), "c": (None, 1, 2), "d": (True, False)}


def test_every_pair_occurs():
    for seed in range(5):
        rows = pairwise.pairwise(AXES, seed)
        for a, b in itertools.combinations(AXES, 2):
            assert {(r[a], r[b]) for r in rows} == set(itertools.product(AXES[a], AXES[b]))
        assert 12 <= len(rows) < 24


def test_same_seed_same_rows():
    assert pairwise.pairwise(AXES, 3) == pairwise.pairwise(AXES, 3)


def test_product():
    rows = list(pairwise.product(AXES, ("a", "c"), 1))
    assert {(r["a"], r["c"]) for r in rows} == set(itertools.product(AXES["a"], AXES["c"]))
    assert len(rows) == 12 and all(set(r) == set(AXES) for r in rows)
