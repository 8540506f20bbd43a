"""On a generated log whose keys are all frequent, training comes close to what any model can reach."""
import json

import harness

ROWS, TEST_ROWS, LOG_SEED, CARDINALITY = 2_000_000, 100_000, 5, 5


def test_near_the_oracle(terrace, workspace):
    oracle = json.loads(terrace.text("generate", "--rows", TEST_ROWS, "--first-row", ROWS, "--seed", LOG_SEED,
                                     "--cardinality", CARDINALITY, "--output", workspace / "test.tsv", "--json"))["oracle"]
    run = harness.Run(terrace, workspace, {
        "data": {"format": "synthetic", "rows": ROWS, "validation_rows": TEST_ROWS, "cardinality": CARDINALITY,
                 "log_seed": LOG_SEED},
        "table": {"dim": 16},
        "network": {"hidden": [64, 32], "optimizer": {"type": "adam", "learning_rate": {
            "base": 0.003, "decay": "linear", "decay_steps": ROWS // 512}}},
        "memory": {"budget": "448MiB"},
    })
    run.train().expect(0)
    trained = run.summary()["validation"]
    evaluated = json.loads(terrace.text("evaluate", run.path, "--data", workspace / "test.tsv", "--json"))
    print(f"AUC {trained['auc']:.4f}, the oracle's {oracle['auc']:.4f}")
    assert oracle["auc"] - 0.01 <= trained["auc"] <= oracle["auc"]
    assert trained["logloss"] >= oracle["logloss"]
    assert evaluated["auc"] == trained["auc"], "text and generated examples are the same log"


def test_text_and_generated_examples_are_one_log(terrace, workspace):
    log = workspace / "log.tsv"
    terrace.text("generate", "--rows", 5000, "--seed", 3, "--output", log)
    digests = []
    for name, data in (("text", {"format": "criteo", "train": [str(log)]}),
                       ("generated", {"format": "synthetic", "rows": 5000, "log_seed": 3})):
        run = harness.Run(terrace, workspace, {"data": data, "network": {"hidden": [16]}, "memory": {"budget": "448MiB"}},
                          name=name)
        run.train().expect(0)
        digests.append(run.digest())
    assert digests[0] == digests[1]
