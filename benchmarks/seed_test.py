"""Each run of a benchmark has keys of its own, and its seed, which it prints, brings them back."""
import pathlib
import re
import subprocess

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "build/benchmarks"


def run(name, folder, *arguments):
    program = BENCHMARKS / name
    if not program.exists():
        pytest.skip("built without benchmarks")
    command = [program, "--tiny", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


def traces(output):
    """What eviction_bench says of its logs."""
    return [line for line in output.splitlines() if "distinct rows" in line and "criteo" not in line]


@pytest.mark.parametrize("name", ["data_bench", "eviction_bench", "hot_files_bench", "io_bench", "key_index_bench",
                                  "model_line_products_bench", "row_cache_bench", "scale_bench", "store_bench",
                                  "store_index_bench", "table_sparse_update_bench"])
def test_the_seed_is_printed_and_taken(name, tmp_path):
    first = run(name, tmp_path).splitlines()[0]
    assert re.fullmatch(r"--seed \d+", first)
    assert run(name, tmp_path, *first.split()).splitlines()[0] == first


def test_another_seed_is_another_log(tmp_path):
    outputs = [traces(run("eviction_bench", tmp_path, "--seed", seed)) for seed in (7, 8, 7)]
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[2]
    assert all(a != b for a, b in zip(outputs[0], outputs[1]))
    counts = [run("hot_files_bench", tmp_path, "--seed", seed).splitlines()[1:] for seed in (7, 8, 7)]
    assert counts[0] == counts[2] != counts[1]
