"""The shipped Criteo job on real clicks."""
import json
import pathlib
import statistics
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
POOL = ROOT.parent / "shared/data/criteo-kaggle-pool34k/pool.tsv.zst"
SEEDS = (1, 2, 3, 4, 5)
MIN_AUC = 0.762
MAX_LOGLOSS = 0.460


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """First 80 % to train, last 20 % to test."""
    if not POOL.exists():
        pytest.skip("the real log is not here: shared/data/criteo-kaggle-pool34k beside the checkout")
    folder = tmp_path_factory.mktemp("pool")
    lines = subprocess.run(["zstd", "-dc", str(POOL)], check=True, capture_output=True).stdout.splitlines(True)
    cut = len(lines) * 8 // 10
    train, test = folder / "train.tsv", folder / "test.tsv"
    train.write_bytes(b"".join(lines[:cut]))
    test.write_bytes(b"".join(lines[cut:]))
    assert len(lines) - cut == 6872
    return train, test


def test_shipped_job(terrace, split, workspace, capsys):
    train, test = split
    results = []
    for seed in SEEDS:
        run = workspace / f"run{seed}"
        terrace("train", ROOT / "examples/criteo.yaml", "--set", f"output={run}", "--set", f"data.train=[{train}]",
                "--set", f"seed={seed}", log=workspace / "log").expect(0)
        results.append(json.loads(terrace.text("evaluate", run, "--data", test, "--json")))
    auc = statistics.median(r["auc"] for r in results)
    logloss = statistics.median(r["logloss"] for r in results)
    with capsys.disabled():
        print(f"\nreal clicks, median of {len(SEEDS)} seeds: AUC {auc:.4f}, log loss {logloss:.4f}")
    assert all(r["examples"] == 6872 for r in results)
    assert auc >= MIN_AUC
    assert logloss <= MAX_LOGLOSS
