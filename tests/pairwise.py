"""Combinations of settings: few that hold every pair of values, or all."""
import itertools
import random


def pairwise(axes, seed):
    """Rows (dicts) in which every pair of values of any two axes occurs; a function of the seed."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    rows = []
    while missing:
        best, best_gain = None, -1
        for _ in range(60):
            a, x, b, y = rng.choice(sorted(missing, key=repr))
            row = {name: rng.choice(axes[name]) for name in names}
            row[a], row[b] = x, y
            gain = len(covered(row, names) & missing)
            if gain > best_gain:
                best, best_gain = row, gain
        missing -= covered(best, names)
        rows.append(best)
    return rows


def covered(row, names):
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}


def product(axes, chosen, seed):
    """Every combination of the chosen axes; the others are drawn."""
    rng = random.Random(seed)
    for values in itertools.product(*(axes[name] for name in chosen)):
        row = {name: rng.choice(axes[name]) for name in axes}
        row.update(zip(chosen, values))
        yield row
