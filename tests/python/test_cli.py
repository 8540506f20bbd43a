"""The command line itself: exit codes, overrides, inspection, the hidden flags of tests, signals."""
import fcntl
import gzip
import json
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time

import pytest
import yaml

import harness
import jobs


@pytest.fixture(scope="module")
def log(logs):
    return logs.criteo(2000, seed=8, cardinality=1000, zipf=1.05)


@pytest.fixture(scope="module")
def finished(terrace, log, tmp_path_factory):
    run = harness.Run(terrace, tmp_path_factory.mktemp("inspected"),
                      jobs.tiny([log], network={"type": "dnn", "hidden": [16], "wide": True}))
    run.train().expect(0)
    return run


def run_binary(terrace, *arguments):
    return subprocess.run([str(terrace.binary), *map(str, arguments)], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)


def test_help_hides_the_flags_of_tests(terrace):
    for command in ("train", "evaluate", "predict", "inspect", "generate"):
        text = terrace.text(command, "--help")
        assert f"Example: terrace {command} " in text
        assert "--test-" not in text


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("train", "--help"), ("train", "--help-job")])
def test_a_result_that_nobody_gets_is_a_failure(terrace, arguments):
    with open("/dev/full", "w") as full:
        outcome = subprocess.run([terrace.binary, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert outcome.returncode == 1 and "cannot be written to standard output" in outcome.stderr


def test_help_of_the_job_file(terrace):
    text = terrace.text("train", "--help-job")
    for key in ("training.batch", "table.optimizer.learning_rate.warmup_steps", "slots.NAME.pooling"):
        assert f"\n{key}\n" in text


@pytest.mark.parametrize("arguments", [
    (), ("nonsense",), ("train",), ("train", "none.yaml"), ("train", "a.yaml", "--resume", "--overwrite"),
    ("train", "a.yaml", "--accept", "luck"), ("train", "a.yaml", "--log-level", "loud"), ("evaluate",),
    ("evaluate", "run"), ("predict", "run", "--data", "x"), ("inspect",), ("inspect", "none"),
    ("inspect", "none", "--initial"), ("evaluate", "none", "--data", "x"), ("generate", "--rows", "ten", "--output", "x"),
    ("generate", "--rows", "1"), ("train", "a.yaml", "--test-faults", "nonsense:"),
    ("train", "a.yaml", "--test-kill-at", "x:0"),
])
def test_wrong_arguments_end_with_2(terrace, workspace, arguments):
    result = subprocess.run([str(terrace.binary), *arguments], cwd=workspace, capture_output=True, text=True,
                            stdin=subprocess.DEVNULL, timeout=harness.PATIENCE_SECONDS)
    assert result.returncode == 2, result.stderr
    assert result.stderr.strip() or result.stdout.strip()
    assert list(workspace.iterdir()) == []


def test_all_that_is_wrong_is_told_at_once(terrace, workspace):
    job = workspace / "job.yaml"
    job.write_text("seed: x\ntraning: {}\n")
    result = run_binary(terrace, "train", job, "--set", "memory.budget=1")
    assert result.returncode == 2
    assert f"{job}:1: seed: expected a whole number, got 'x'" in result.stderr
    assert f"{job}:2: unknown key 'traning'; did you mean 'training'?" in result.stderr
    assert "--set memory.budget: memory.budget is 1" in result.stderr
    assert "output is missing" in result.stderr


@pytest.mark.parametrize("word, nearest", [("trian", "train"), ("evalute", "evaluate"), ("generat", "generate")])
def test_the_nearest_command_is_named(terrace, word, nearest):
    result = run_binary(terrace, word, "x.yaml")
    assert result.returncode == 2
    assert f"'{word}' is no command; did you mean '{nearest}'?" in result.stderr, result.stderr


@pytest.mark.parametrize("arguments, wrong, nearest", [
    (("train", "a.yaml", "--resum"), "--resum", "--resume"), (("train", "a.yaml", "--overwite", "--set", "a=1"), "--overwite", "--overwrite"),
    (("predict", "run", "--data", "x", "--ouput", "y"), "--ouput", "--output"), (("inspect", "run", "--verfy"), "--verfy", "--verify"),
    (("generate", "--row=10", "--output", "x"), "--row", "--rows"), (("evaluate", "run", "--data", "x", "--test-fault", "x"), "--test-fault", None),
])
def test_the_nearest_option_is_named(terrace, arguments, wrong, nearest):
    result = run_binary(terrace, *arguments)
    assert result.returncode == 2
    assert f"'{wrong}' is no option of {arguments[0]}" in result.stderr, result.stderr
    assert (f"did you mean '{nearest}'?" in result.stderr) if nearest else "--test-faults" not in result.stderr, result.stderr


def test_data_that_go_or_cannot_be_read_later_are_a_failure(terrace, finished, log, workspace):
    """As they are of train: the arguments were right."""
    data = workspace / "data.tsv"
    data.write_bytes(log.read_bytes())
    run = harness.Run(terrace, workspace, jobs.tiny([data]))
    for fault, words in (("open:2+:missing", "No such file"), ("open:2+:error", "Input/output"), ("read:2+:error", "Input/output")):
        faults = ("--test-faults", f"{fault}:data.tsv")
        for command in (("evaluate", finished.path, "--data", data), ("predict", finished.path, "--data", data, "--output", workspace / "p"),
                        ("train", run.job_path)):
            failed = run_binary(terrace, *command, *faults)
            assert failed.returncode == 1 and words in failed.stderr and "data.tsv" in failed.stderr, (command, failed.stderr)
    assert sorted(path.name for path in workspace.iterdir()) == ["data.tsv", "run.yaml"]


def test_evaluate_takes_as_many_bad_lines_as_it_is_told(terrace, finished, log, workspace):
    lines = log.read_text().splitlines(True)
    data = workspace / "data.tsv"
    data.write_text("".join(lines[:600] + ["no example\n"] * 300 + lines[600:]))

    def evaluate(*arguments, code=0):
        result = run_binary(terrace, "evaluate", finished.path, "--data", data, "--json", *arguments)
        assert result.returncode == code, result.stderr
        return result.stderr if code else json.loads(result.stdout)
    refused = evaluate(code=2)
    assert "lines are bad, more than data.max_bad_fraction (0.010000)" in refused, refused
    assert "--max-bad-fraction lets this command take more" in refused, refused
    assert "lines are bad" in evaluate("--max-bad-fraction", "0.1", code=2)
    found = evaluate("--max-bad-fraction", "0.4")
    assert found["bad_lines"] == 300
    expected = json.loads(terrace.text("evaluate", finished.path, "--data", log, "--json"))
    assert {**found, "bad_lines": 0} == expected
    for wrong in ("1.1", "-0.1", "nan", "much", "0.1x"):
        assert f"--max-bad-fraction '{wrong}' is no number from 0 to 1" in evaluate(f"--max-bad-fraction={wrong}", code=2)


def test_an_option_without_its_value_takes_no_other_argument(terrace, finished, log, workspace):
    """What a shell makes of --output=$UNSET, and of --output $UNSET."""
    for command, option in ((("predict", finished.path, "--data", log), "--output="), (("generate", "--rows", 10), "--output="),
                            (("evaluate", finished.path), "--data="), (("evaluate", finished.path, "--data", log), "--memory="),
                            (("train", finished.job_path, "--overwrite"), "--set="), (("inspect", finished.path), "--key=")):
        for given, *others in ((option, "--quiet"), (option,), (option.rstrip("="), "--quiet")):
            arguments = (*command, given, *others)
            refused = subprocess.run([str(terrace.binary), *map(str, arguments)], cwd=workspace, stdin=subprocess.DEVNULL,
                                     capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)
            assert refused.returncode == 2 and f"'{given}' has no value (terrace {command[0]} --help)" in refused.stderr, refused
            assert list(workspace.iterdir()) == []
    for command in (("train", finished.job_path, "--overwrite="), ("inspect", finished.path, "--repair", "--yes="),
                    ("predict", "--data", log, "--", finished.path, "--output=", "--quiet"),
                    ("evaluate", finished.path, "--data", log, "--memory", "")):
        refused = run_binary(terrace, *command)
        assert refused.returncode == 2 and "has no value" in refused.stderr, refused
    # One that looks like it, but is a value.
    named = workspace / "--memory="
    terrace.text("generate", "--rows", 10, "--output", named)
    assert named.exists()


def test_brackets_of_a_glob_arrive(terrace, finished, log, workspace):
    """Arguments are texts, not lists of them."""
    lines = log.read_text().splitlines(True)
    for name, count in (("1", 100), ("2", 200), ("a", 400), ("b,c", 700), ("{}", 300)):
        (workspace / name).write_text("".join(lines[:count]))

    def examples(*data):
        scored = subprocess.run([str(terrace.binary), "evaluate", str(finished.path.resolve()), "--json", *data], cwd=workspace,
                                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)
        assert scored.returncode == 0, scored.stderr
        return json.loads(scored.stdout)["examples"]
    assert examples("--data", "[0-9]") == examples("--data=[12]") == examples("--data", "[0-9]", "--quiet") == 300
    assert examples("--data", "[0-9]", "a") == examples("--data", "1", "--data", "2", "a") == 700
    assert examples("--data", "b,c") == 700 and examples("--data", "{}") == 300
    assert examples("--data", "[12]", "[a]") == 700
    for command in (("train", finished.job_path, "--set", "{}"), ("inspect", finished.path, "--key", "{}")):
        assert run_binary(terrace, *command).returncode == 2


def test_missing_and_empty_data(terrace, finished, workspace):
    (workspace / "empty.tsv").touch()
    for data, words in (("gone.csv", "no such file; correct the path\n"), ("gone*", "correct the glob\n"),
                        ("empty.tsv", "no example in it; give files")):
        for command in (("evaluate",), ("predict", "--output", workspace / "p.txt")):
            result = run_binary(terrace, *command, finished.path, "--data", workspace / data)
            assert result.returncode == 2 and words in result.stderr, result.stderr
    run = harness.Run(terrace, workspace, jobs.tiny([workspace / "gone.csv"]))
    outcome = run.train().expect(2)
    assert f"data.train: {workspace}/gone.csv: no such file" in outcome.output, outcome.output


@pytest.mark.parametrize("columns, width", [(40, 40), (0, 80), (400, 400)])
def test_progress_fits_the_terminal(terrace, workspace, log, columns, width):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([str(terrace.binary), "train", str(run.job_path)], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # The other end is closed.
            break
    os.close(ours)
    assert process.wait(harness.PATIENCE_SECONDS) == 0
    lines = [line for line in re.split(r"[\r\n]", shown.decode().replace("\x1b[K", "")) if " examples | " in line]
    assert lines and all(len(line) < width for line in lines), lines
    # The shortest numbers, as of a slow machine, leave no room for it in 40 columns.
    assert any("hits" in line for line in lines) == (columns != 40)


def test_progress_at_the_end_of_a_window(terrace, workspace, log):
    """Each mini-batch ends one; the line is of it, not of the empty one that follows."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"metrics.every_examples": 128})
    lines = [line for line in run.train().expect(0).output.splitlines() if " examples | " in line]
    assert lines and all(re.search(r"AUC 0\.\d+ \| log loss 0\.\d+ ", line) for line in lines), lines


def test_a_job_file_that_cannot_be_read(terrace, workspace, log):
    """What the disk fails at is a failure; what is not there, or no job, is an argument that is wrong."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    for fault in ("open:1:error:run.yaml", "read:1:error:run.yaml", "read:1:short_read:run.yaml"):
        assert "reading the job file" in run.train("--test-faults", fault).expect(1).output
    assert "is a folder" in terrace("train", workspace, log=workspace / "log").expect(2).output
    run.job_path.write_text("seed: [\n")
    run.train().expect(2)
    run.job_path.unlink()
    assert "reading the job file" in run.train().expect(2).output
    assert not run.path.exists()


def test_a_job_file_of_others(terrace):
    """As one that is not there, whoever runs the tests."""
    as_user = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        job = pathlib.Path(folder) / "job.yaml"
        job.write_text("output: run\n")
        job.chmod(0)

        def run(*arguments):
            return subprocess.run([str(terrace.binary), *map(str, arguments)], cwd=folder, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS, **as_user)
        try:
            usable = run("--version").returncode == 0
        except PermissionError:
            usable = False
        if not usable:
            pytest.skip("another user may not run the program")
        for name, words in ((job, "Permission denied"), (job.with_name("none.yaml"), "No such file")):
            refused = run("train", name)
            assert refused.returncode == 2 and "reading the job file" in refused.stderr and words in refused.stderr, refused


def test_a_job_may_come_from_a_pipe(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    text = run.job_path.read_text()
    command = [str(terrace.binary), "train", "/dev/stdin", "--quiet"]
    trained = subprocess.run(command, input=text, capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)
    assert trained.returncode == 0, trained.stderr
    assert run.summary()["finished"]
    endless = run_binary(terrace, "train", "/dev/zero")
    assert endless.returncode == 2 and "'/dev/zero' gives more than 64.00 MiB" in endless.stderr, endless.stderr
    large = workspace / "large.yaml"
    with open(large, "wb") as file:
        file.truncate((64 << 20) + 1)
    refused = run_binary(terrace, "train", large)
    assert refused.returncode == 2 and "a job has at most 64.00 MiB" in refused.stderr, refused.stderr


def test_a_stop_while_a_job_comes_from_a_pipe(terrace, workspace, log):
    """Nobody closes it. The run that is there stays."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    text, digest = run.job_path.read_text(), run.digest()
    pipe = workspace / "pipe"
    os.mkfifo(pipe)
    for number in (signal.SIGINT, signal.SIGTERM):
        process = terrace.start("train", pipe, "--overwrite", log=workspace / "log")
        with open(process.open_when_it_reads(pipe), "w") as writer:
            writer.write(text)
            writer.flush()
            process.signal(number)
            assert "nothing was changed" in process.wait().expect(130).output
    assert run.digest() == digest


def test_output_that_is_a_file_or_not_writable(terrace, workspace, log):
    (workspace / "file").write_text("mine")
    job = jobs.tiny([log])
    run = harness.Run(terrace, workspace, job, output=str(workspace / "file"))
    outcome = run.train().expect(2)
    assert "is a file" in outcome.output
    run = harness.Run(terrace, workspace, job, output=str(workspace / "file" / "below"))
    outcome = run.train().expect(2)
    assert str(workspace / "file") in outcome.output
    assert (workspace / "file").read_text() == "mine"


def test_results_go_to_standard_output_alone(terrace, finished, log):
    result = run_binary(terrace, "evaluate", finished.path, "--data", log, "--json", "--quiet")
    assert result.returncode == 0 and result.stderr == ""
    assert json.loads(result.stdout)["examples"] == 2000
    result = run_binary(terrace, "inspect", finished.path, "--digest", "--json")
    assert json.loads(result.stdout) == {"format_version": 1, "digest": finished.digest()}


def key_of(log, slot):
    """A key of the first line's column, as the reader makes it; slots of Criteo's categories begin at 14."""
    column = log.read_text().splitlines()[0].split("\t")[14 + slot]
    return (14 + slot) << 48 | int(column, 16)


def test_inspect_a_row(terrace, finished, log):
    key = key_of(log, 0)
    category = log.read_text().splitlines()[0].split("\t")[14]
    for text in (str(key), hex(key), f"C1={category}", f"C1={category.upper()}"):
        report = json.loads(terrace.text("inspect", finished.path, "--key", text, "--json"))
        (row,) = report["rows"]
        assert row["table"] == "default" and row["key"] == key
        fields = row["fields"]
        assert len(fields["embedding.weight"]) == 8 and len(fields["embedding.accumulator"]) == 8
        assert isinstance(fields["wide.weight"], float)
        assert fields["show"] >= 1 and fields["last_seen"] >= 128
    text = terrace.text("inspect", finished.path, "--key", key)
    assert f"table default key {key}" in text and "embedding.weight" in text
    initial = json.loads(terrace.text("inspect", finished.path, "--key", key, "--initial", "--json"))["rows"][0]["fields"]
    assert initial["show"] == 0 and initial["wide.weight"] == 0
    assert all(-0.01 <= w < 0.01 for w in initial["embedding.weight"])
    assert initial["embedding.weight"] != fields["embedding.weight"]
    absent = run_binary(terrace, "inspect", finished.path, "--key", "12345")
    assert absent.returncode == 0 and "no table has key 12345" in absent.stdout
    for wrong in ("1x", "C0=1", "C27=1", "C=1", "D1=1", "C1"):
        assert run_binary(terrace, "inspect", finished.path, "--key", wrong).returncode == 2


def test_inspect_knows_the_slots_of_the_run(terrace, workspace):
    """A generated log may have more categories than Criteo's, or fewer."""
    for slots in (4, 40):
        job = jobs.tiny([], data={"format": "synthetic", "rows": 256, "cardinality": 100, "slots": slots})
        run = harness.Run(terrace, workspace, job, f"run{slots}")
        run.train().expect(0)
        for slot in (1, slots):
            text = terrace.text("inspect", run.path, "--key", f"C{slot}=2bc7", "--initial", "--json")
            assert [row["key"] for row in json.loads(text)["rows"]] == [13 + slot << 48 | 0x2bc7]
        for wrong in (f"C{slots + 1}=1", "C0=1", "C01=1", "I1=1"):
            refused = run_binary(terrace, "inspect", run.path, "--key", wrong)
            assert refused.returncode == 2 and f"--key '{wrong}' is no key" in refused.stderr, refused.stderr


def test_inspect_the_network(terrace, finished):
    dense = json.loads(terrace.text("inspect", finished.path, "--dense", "--json"))["dense"]
    initial = json.loads(terrace.text("inspect", finished.path, "--dense", "--initial", "--json"))["dense"]
    assert dense["steps"] == finished.summary()["steps"] and initial["steps"] == 0
    assert [p["name"] for p in dense["parameters"]] == [p["name"] for p in initial["parameters"]]
    for parameter, start in zip(dense["parameters"], initial["parameters"]):
        size = 1
        for extent in parameter["shape"]:
            size *= extent
        assert len(parameter["value"]) == size
        # Every number is a float of 32 bits.
        assert all(struct.unpack("f", struct.pack("f", v))[0] == v for v in parameter["value"])
        assert parameter["value"] != start["value"]


def test_inspect_needs_no_log(terrace, finished, log, workspace):
    """Logs move; and paths of a job are relative to where it was started."""
    moved = workspace / "moved.tsv"
    moved.write_bytes(log.read_bytes())
    run = harness.Run(terrace, workspace, {**finished.job, "data": {"format": "criteo", "train": [str(moved)]}})
    run.train().expect(0)
    moved.unlink()
    for arguments in (("--dense", "--json"), ("--dense", "--initial"), ("--key", key_of(log, 0), "--initial"), ("--digest",), ()):
        assert terrace.text("inspect", run.path, *arguments), arguments


@pytest.mark.parametrize("lost", ["dense/dense-", "/manifest-", "/rows-"])
def test_a_missing_file_of_a_run_is_damage(terrace, finished, log, workspace, lost):
    """Not an argument that is wrong: exit status 1, and the advice of a damaged run."""
    harness.copy_run(finished.path, workspace / "run")
    gone = [path for path in (workspace / "run").rglob("*") if lost in str(path) and path.is_file()]
    assert gone
    for path in gone:
        path.unlink()
    commands = [("evaluate", "--data", log), ("predict", "--data", log, "--output", workspace / "p"), ("inspect", "--digest")]
    for command, *arguments in commands:
        failed = run_binary(terrace, command, workspace / "run", *arguments)
        assert failed.returncode == 1 and "--repair" in failed.stderr, (command, failed.stderr)


def test_damage_is_the_runs_where_a_file_of_the_run_is_named(terrace, workspace, log):
    """Not by the letters of its folder in the name of a log."""
    job = {**jobs.tiny(["train.gz"]), "output": "tr"}
    job["ssd"]["paths"] = ["disk"]
    (workspace / "job.yaml").write_text(yaml.safe_dump(job))

    def run(*arguments):
        return subprocess.run([str(terrace.binary), *map(str, arguments)], cwd=workspace, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)

    packed = gzip.compress(log.read_bytes(), 1)
    (workspace / "train.gz").write_bytes(packed[:-100])
    stopped = run("train", "job.yaml")
    assert stopped.returncode == 1 and "train.gz: byte " in stopped.stderr and "--verify" not in stopped.stderr, stopped.stderr
    (workspace / "train.gz").write_bytes(packed)
    assert run("train", "job.yaml", "--overwrite").returncode == 0
    for folder, pattern in (("tr", "dense/dense-*"), ("disk", "tr-*/default/shard-0/rows-*")):
        contents = {path: path.read_bytes() for path in (workspace / folder).glob(pattern)}
        assert contents
        for path, content in contents.items():
            path.write_bytes(content[:len(content) // 2])
        failed = run("evaluate", "tr", "--data", log)
        assert failed.returncode == 1 and "terrace inspect tr --verify" in failed.stderr, failed.stderr
        for path, content in contents.items():
            path.write_bytes(content)


def test_inspect_overview(terrace, finished):
    overview = json.loads(terrace.text("inspect", finished.path, "--json"))
    assert overview["format_version"] == 1 and overview["finished"] and overview["examples"] == 2000
    assert overview["settings"]["seed"] == "11"
    (table,) = overview["tables"]
    assert table["rows"] == finished.summary()["rows"]
    text = terrace.text("inspect", finished.path)
    assert "finished at checkpoint" in text and "table default" in text


def test_generate_prints_the_oracle(terrace, workspace):
    out = workspace / "log.tsv.gz"
    report = json.loads(terrace.text("generate", "--rows", 5000, "--output", out, "--json"))
    assert report["rows"] == 5000 and 0.7 < report["oracle"]["auc"] < 0.85
    assert abs(report["oracle"]["calibration"] - 1) < 0.1
    wrong = run_binary(terrace, "generate", "--rows", 10, "--output", workspace / "x.tsv", "--zipf", 9)
    assert wrong.returncode == 2 and "zipf" in wrong.stderr and not (workspace / "x.tsv").exists()


def test_quiet(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    for arguments in (("train", run.job_path), ("generate", "--rows", 100, "--output", workspace / "x.tsv"),
                      ("predict", run.path, "--data", log, "--output", workspace / "p.txt")):
        result = run_binary(terrace, *arguments, "--quiet")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert run.summary()["finished"]
    for arguments in (("evaluate", run.path, "--data", log), ("inspect", run.path),
                      ("generate", "--rows", 100, "--output", workspace / "y.tsv", "--json")):
        result = run_binary(terrace, *arguments, "--quiet")
        assert result.returncode == 0 and result.stdout and result.stderr == ""


@pytest.mark.parametrize("option, value", [
    ("--rows", "-1"), ("--rows", "0"), ("--rows", "1.5"), ("--rows", "1e30"), ("--seed", "-1"), ("--first-row", "-7"),
    ("--cardinality", "-1"), ("--slots", "-2"), ("--slots", "4294967297"),
])
def test_generate_takes_whole_numbers(terrace, workspace, option, value):
    rows = () if option == "--rows" else ("--rows", 10)
    refused = run_binary(terrace, "generate", "--output", workspace / "x.tsv", *rows, option, value)
    assert refused.returncode == 2 and option in refused.stderr and value in refused.stderr, refused.stderr
    assert list(workspace.iterdir()) == []


def test_numbers_as_in_job_files(terrace, workspace):
    terrace.text("generate", "--output", workspace / "x.tsv", "--rows", "1e2", "--cardinality", "1_000")
    assert len((workspace / "x.tsv").read_text().splitlines()) == 100
    job = workspace / "job.yaml"
    job.write_text(f"output: {workspace}/run\ndata: {{format: synthetic, rows: 10}}\n")
    refused = run_binary(terrace, "train", job, "--set", "data.rows=-1")
    assert refused.returncode == 2 and "data.rows: expected a whole number, got '-1'" in refused.stderr, refused.stderr
    refused = run_binary(terrace, "inspect", workspace, "--repair", "--back-to", "-1")
    assert refused.returncode == 2 and "--back-to" in refused.stderr, refused.stderr


def test_predict_spares_its_input(terrace, finished, log, workspace):
    data, other = workspace / "data.tsv", workspace / "other.tsv"
    data.write_bytes(log.read_bytes())
    other.write_bytes(log.read_bytes())
    hard, symbolic = workspace / "hard.tsv", workspace / "symbolic.tsv"
    os.link(data, hard)
    symbolic.symlink_to(data)
    (workspace / "x").mkdir()
    for output in (data, f"{workspace}/x/../data.tsv", hard, symbolic):
        refused = run_binary(terrace, "predict", finished.path, "--data", other, data, "--output", output)
        assert refused.returncode == 2 and "would replace the input" in refused.stderr, refused.stderr
    # What the output is called until it is whole.
    partial = workspace / "out.txt.partial"
    partial.write_bytes(log.read_bytes())
    refused = run_binary(terrace, "predict", finished.path, "--data", partial, "--output", workspace / "out.txt")
    assert refused.returncode == 2, refused.stderr
    assert all(path.read_bytes() == log.read_bytes() for path in (data, other, hard, symbolic, partial))


def test_outputs_that_must_not_be_replaced(terrace, finished, log, workspace):
    """Whoever is root could replace a device; a link is followed."""
    (workspace / "folder").mkdir()
    os.mkfifo(workspace / "pipe")
    (workspace / "broken").symlink_to(workspace / "none")
    (workspace / "link").symlink_to(workspace / "behind")
    (workspace / "behind").write_text("old")
    for command in (("generate", "--rows", 100), ("predict", finished.path, "--data", log)):
        for name, words in (("folder", "is a folder"), ("pipe", "is a device or a pipe"), ("broken", "leads to no file"),
                            ("missing/out.txt", "missing/' is not there")):
            before = sorted(workspace.iterdir())
            refused = run_binary(terrace, *command, "--output", workspace / name)
            assert refused.returncode == 2 and words in refused.stderr, refused.stderr
            assert sorted(workspace.iterdir()) == before
        refused = run_binary(terrace, *command, "--output", "")
        assert refused.returncode == 2 and "'--output' has no value" in refused.stderr, refused.stderr
        assert run_binary(terrace, *command, "--output", workspace / "link").returncode == 0
        assert (workspace / "link").is_symlink() and len((workspace / "behind").read_text().splitlines()) >= 100
        assert not (workspace / "behind.partial").exists()


def test_outputs_within_a_run_are_refused(terrace, log, workspace):
    """Predictions in the place of a checkpoint would cost the run."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"ssd.paths": [str(workspace / "disk")]})
    run.train().expect(0)
    (rows,) = (workspace / "disk").iterdir()
    other = harness.Run(terrace, workspace, jobs.tiny([log]), name="other")
    other.train().expect(0)
    (workspace / "link").symlink_to(run.path / "checkpoints")
    (workspace / "file").symlink_to(run.path / "summary.json")
    (workspace / "x").mkdir()
    inside = [run.path / "checkpoints" / run.checkpoints()[-1], run.path / "metrics.jsonl", run.path / "LOCK", run.path / "RUN",
              run.path / "dense" / "new.txt", workspace / "link" / run.checkpoints()[-1], workspace / "file",
              f"{workspace}/x/../run/metrics.jsonl"]
    manifest = next(path for path in rows.rglob("manifest-*"))

    def state():
        return {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    before = state()
    for command in (("generate", "--rows", 100), ("predict", run.path, "--data", log)):
        for output, named in [(output, run.path) for output in inside] + [(manifest, run.path), (rows / "new", run.path),
                                                                          (other.path / "job.yaml", other.path)]:
            refused = run_binary(terrace, *command, "--output", output)
            assert refused.returncode == 2, (output, refused.stderr)
            assert f"the run '{named}'" in refused.stderr and "name a file outside" in refused.stderr, refused.stderr
    refused = subprocess.run([str(terrace.binary), "predict", ".", "--data", str(log), "--output", "metrics.jsonl"],
                             cwd=run.path, capture_output=True, text=True, timeout=harness.PATIENCE_SECONDS)
    assert refused.returncode == 2 and f"the run '{run.path}'" in refused.stderr, refused.stderr
    assert state() == before
    # Beside a run, and in a folder that holds another's file of that name.
    (workspace / "x" / "RUN").write_text("mine")
    for output in (workspace / "disk" / "p.txt", workspace / "run.txt", workspace / "x" / "p.txt"):
        assert run_binary(terrace, "predict", run.path, "--data", log, "--output", output).returncode == 0


def test_an_interrupted_prediction_leaves_nothing(terrace, finished, log, workspace):
    data, output = workspace / "data.tsv", workspace / "out.txt"
    data.write_text(log.read_text() * 500)
    process = terrace.start("predict", finished.path, "--data", data, "--output", output, log=workspace / "log")
    while process.poll() is None and not (workspace / "out.txt.partial").exists():
        time.sleep(0.001)
    process.signal(signal.SIGINT)
    outcome = process.wait().expect(130)
    assert "nothing was written" in outcome.output, outcome.output
    assert sorted(p.name for p in workspace.iterdir()) == ["data.tsv", "log"]


def test_names_that_no_checkpoint_could_say(terrace, log, workspace):
    """Told before anything is trained, or made."""
    cafe = os.fsdecode(b"caf\xe9")
    (workspace / "logs").mkdir()
    (workspace / "logs" / f"{cafe}.tsv").write_bytes(log.read_bytes())
    (workspace / cafe).mkdir()
    run = harness.Run(terrace, workspace, jobs.tiny([workspace / "logs" / "*.tsv"]))
    elsewhere = harness.Run(terrace, workspace, jobs.tiny([log]), name="other")
    before = sorted(workspace.rglob("*"))

    def train(of, flags, where):
        return subprocess.run([str(terrace.binary), "train", str(of.job_path), *flags], cwd=where, capture_output=True,
                              timeout=harness.PATIENCE_SECONDS)
    for of, flags, where in ((run, (), workspace), (elsewhere, ("--set", f"output={workspace / cafe / 'run'}"), workspace),
                             (elsewhere, ("--set", "ssd.paths=[disk]"), workspace / cafe)):
        refused = train(of, flags, where)
        said = refused.stderr.decode(errors="replace")
        assert refused.returncode == 2 and "caf\ufffd" in said and "is no UTF-8 text" in said, said
        assert sorted(workspace.rglob("*")) == before
    # Where nothing has to be said of it, it may be called anything.
    assert train(elsewhere, (), workspace / cafe).returncode == 0


def test_one_output_has_one_writer(terrace, finished, log, workspace):
    data, output = workspace / "data.tsv", workspace / "out.txt"
    data.write_text(log.read_text() * 500)
    process = terrace.start("predict", finished.path, "--data", data, "--output", output, log=workspace / "log")
    partial = workspace / "out.txt.partial"
    while process.poll() is None and not (partial.exists() and partial.stat().st_size > 0):
        time.sleep(0.001)
    process.signal(signal.SIGSTOP)
    for command in (("generate", "--rows", 100), ("predict", finished.path, "--data", log)):
        refused = run_binary(terrace, *command, "--output", output)
        assert refused.returncode != 0 and "is being written by another process" in refused.stderr, refused.stderr
        assert not output.exists() and partial.exists()
    process.signal(signal.SIGCONT)
    process.wait().expect(0)
    assert len(output.read_text().splitlines()) == len(data.read_text().splitlines())
    # A process that was killed holds nothing.
    partial.write_text("left")
    assert run_binary(terrace, "generate", "--rows", 100, "--output", output).returncode == 0


def test_writers_of_one_output_that_start_together(terrace, workspace):
    output = workspace / "out.txt"
    for _ in range(40):
        writers = {rows: subprocess.Popen([str(terrace.binary), "generate", "--rows", str(rows), "--output", str(output)],
                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for rows in (1, 9000, 2)}
        said = {rows: writer.communicate(timeout=harness.PATIENCE_SECONDS)[1] for rows, writer in writers.items()}
        wrote = {rows for rows, writer in writers.items() if writer.returncode == 0}
        assert len(output.read_text().splitlines()) in wrote, said
        for rows in writers.keys() - wrote:
            assert "is being written by another process" in said[rows], said
        assert [path.name for path in workspace.iterdir()] == ["out.txt"]


def test_data_of_other_slots(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([]),
                      data={"format": "synthetic", "rows": 512, "slots": 10})
    run.train().expect(0)
    refused = run_binary(terrace, "evaluate", run.path, "--data", log)
    assert refused.returncode == 2 and "other slots or dense features than these files have" in refused.stderr, refused.stderr


def test_memory_of_evaluate_and_predict(terrace, workspace, log):
    """What training reads ahead is a share of its budget; whoever scores may say that he has more memory."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"data.read_ahead": "2GiB"})
    run.train().expect(0)
    scored = [run_binary(terrace, "evaluate", run.path, "--data", log, "--json", *memory)
              for memory in ((), ("--memory", "300MiB"))]
    for result in scored:
        assert result.returncode == 0, result.stderr
    assert scored[0].stdout == scored[1].stdout
    assert run_binary(terrace, "inspect", run.path, "--dense").returncode == 0
    for command in (("evaluate",), ("predict", "--output", workspace / "p.txt")):
        for memory, words in (("20MiB", "--memory lets this command use more"), ("0", "needs at least"), ("much", "--memory 'much' is no size")):
            result = run_binary(terrace, *command, run.path, "--data", log, "--memory", memory)
            assert result.returncode == 2 and words in result.stderr, result.stderr
    assert not (workspace / "p.txt").exists()


def test_a_network_beyond_the_budget_takes_no_memory(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    outcome = run.train("--set", "network.hidden=[65536, 65536]").expect(2)
    assert "network.hidden: 4," in outcome.output and "more than the memory.budget" in outcome.output, outcome.output
    outcome = run.train("--set", "training.batch=1048576", "--set", "training.minibatch=1048576", "--set", "table.dim=64").expect(2)
    assert "training.minibatch: " in outcome.output and "memory.budget has no room" in outcome.output, outcome.output


def test_validation_data_is_frozen_at_the_start(terrace, workspace, log):
    text = log.read_text().splitlines(keepends=True)
    (workspace / "v1.tsv").write_text("".join(text[:200]))
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={
        "format": "criteo", "train": [str(log)], "validation": [f"{workspace}/v*.tsv"], "epochs": 1000}))

    def validated():
        return [line["validation"]["examples"] for line in run.metrics() if line["kind"] == "validation"]

    process = run.start()
    while process.poll() is None and not validated():
        time.sleep(0.005)
    (workspace / "v2.tsv").write_text("".join(text[200:300]))
    with open(workspace / "v1.tsv", "a") as file:
        file.write("".join(text[300:400]))
    before = len(validated())
    while process.poll() is None and len(validated()) < before + 3:
        time.sleep(0.005)
    process.signal(signal.SIGINT)
    process.wait().expect(130)
    assert len(validated()) >= before + 3 and set(validated()) == {200}, validated()


def test_all_limits_and_inputs_are_told_at_once(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    outcome = run.train("--set", "memory.budget=24MiB", "--set", "ssd.quota=10MiB").expect(2)
    assert "memory.budget of 24.00 MiB is too small" in outcome.output, outcome.output
    assert "ssd.quota of 10.00 MiB is too small" in outcome.output, outcome.output
    outcome = run.train("--set", "data.train=gone.tsv", "--set", "data.validation=lost.tsv").expect(2)
    assert "data.train: gone.tsv: no such file" in outcome.output, outcome.output
    assert "data.validation: lost.tsv: no such file" in outcome.output, outcome.output
    # Limits do not wait for the files.
    wrong = ("--set", "data.train=gone.tsv", "--set", "memory.budget=20MiB", "--set", "ssd.quota=10MiB")
    for flags in (wrong, (*wrong, "--resume")):
        outcome = run.train(*flags).expect(2)
        assert "data.train: gone.tsv: no such file" in outcome.output, outcome.output
        assert "memory.budget of 20.00 MiB is too small" in outcome.output, outcome.output
    assert ("ssd.quota of 10.00 MiB is too small" in outcome.output) == ("--resume" not in flags)
    least = [int(re.search(r"needs at least (\d+) MiB", run.train(*flags).expect(2).output).group(1))
             for flags in (wrong, wrong[2:])]
    assert abs(least[0] - least[1]) <= 1, "what is told without the files is what they need"
    assert not run.path.exists()


def test_kill_at_and_record(terrace, workspace, log):
    points = workspace / "points"
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train("--test-record-sync-points", points).expect(0)
    names = points.read_text().split()
    for name in ("checkpoint.before_dense", "checkpoint.before_publish", "checkpoint.after_publish",
                 "run.create.after_marker"):
        assert name in names
    digest = run.digest()
    run.train("--overwrite", "--test-kill-at", "checkpoint.before_publish:2").expect(-signal.SIGKILL)
    assert len(run.checkpoints()) == 1
    run.train("--resume").expect(0)
    assert run.digest() == digest


def test_faults(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    outcome = run.train("--test-faults", "write:1:enospc:checkpoint-").expect(1)
    assert "checkpoint-" in outcome.output
    run.train("--resume").expect(0)


def test_a_quota_beyond_the_disk_is_told(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    outcome = run.train("--set", "ssd.quota=1000TiB").expect(0)
    assert re.search(r"warning: ssd\.quota is 1000\.00 TiB, .* [\d.]+ [KMGT]iB is free on the disk of "
                     + f"'{run.path}", outcome.output), outcome.output
    # Two folders on one disk: its space counts once.
    run = harness.Run(terrace, workspace, jobs.tiny([log]), name="paths",
                      **{"ssd.paths": [str(workspace / "a"), str(workspace / "b")], "ssd.shards": 2})
    outcome = run.train("--set", "ssd.quota=1000TiB").expect(0)
    assert f" is free on the disk of '{workspace}/a/paths-" in outcome.output, outcome.output
    run = harness.Run(terrace, workspace, jobs.tiny([log]), name="small")
    assert "ssd.quota" not in run.train("--set", "ssd.quota=1GiB").expect(0).output


def test_a_full_disk(terrace, finished, workspace, log):
    out = workspace / "out"
    for command in (("generate", "--rows", 100), ("predict", finished.path, "--data", log)):
        result = run_binary(terrace, *command, "--output", out, "--test-faults", "write:1:enospc:out")
        assert result.returncode == 1 and "(free space there)" in result.stderr, result.stderr
        assert "checkpoint" not in result.stderr and "ssd.paths" not in result.stderr, result.stderr
        assert list(workspace.iterdir()) == []
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    outcome = run.train("--test-faults", "write:1+:enospc:shard-").expect(1)
    assert "The run has no checkpoint yet: free space" in outcome.output and "intact" not in outcome.output, outcome.output
    faults = ";".join(f"write:1+:enospc:checkpoint-0000000{number}" for number in (2, 3))  # It is tried twice.
    outcome = run.train("--resume", "--test-faults", faults).expect(1)
    assert "Checkpoint 1 is intact: free space" in outcome.output and "with --resume goes on" in outcome.output, outcome.output
    run.train("--resume").expect(0)


def test_a_job_that_has_become_shorter_ends_with_its_validation(terrace, workspace, log):
    job = jobs.tiny([log], [log], validation={"every_examples": 0}, checkpoint={"every_batches": 1, "keep": 2})
    whole = harness.Run(terrace, workspace, job, "whole", **{"training.max_examples": 1024})
    whole.train().expect(0)
    run = harness.Run(terrace, workspace, job)
    run.train("--test-kill-at", "train.after_minibatch:8").expect(-signal.SIGKILL)
    run.train("--resume", "--set", "training.max_examples=1024").expect(0)
    assert run.summary()["examples"] == 1024
    assert run.summary()["validation"] == whole.summary()["validation"] is not None
    run.train("--resume", "--set", "training.max_examples=1024").expect(0)
    assert [line["kind"] for line in run.metrics()].count("validation") == 1


def test_damaged_validation_data_cost_no_training(terrace, workspace, log):
    damaged = workspace / "damaged.tsv"
    damaged.write_text("\n".join(log.read_text().split("\n")[:50] + ["garbage"] * 400 + [""]))
    run = harness.Run(terrace, workspace, jobs.tiny([log], [damaged]))
    outcome = run.train().expect(1)
    assert "Checkpoint 2 is intact: once data.validation is mended, or names other files" in outcome.output, outcome.output
    run.train("--resume", "--set", f"data.validation={log}").expect(0)
    assert run.summary()["validation"]["examples"] > 0


def test_a_resume_without_its_checkpoints_is_refused(terrace, workspace, log):
    """Rather than to begin anew over all that is there."""
    run = harness.Run(terrace, workspace, jobs.tiny([log], checkpoint={"every_batches": 1, "keep": 2}), **{"training.batch": 128})
    run.train("--test-kill-at", "train.after_minibatch:13").expect(-signal.SIGKILL)
    digest = run.digest()
    (run.path / "checkpoints").rename(workspace / "elsewhere")
    for emptied in (False, True):
        if emptied:
            (run.path / "checkpoints").mkdir()
        outcome = run.train("--resume").expect(1)
        assert "has lost its checkpoints: dense state" in outcome.output and "Nothing was changed" in outcome.output, outcome.output
    (run.path / "checkpoints").rmdir()
    (workspace / "elsewhere").rename(run.path / "checkpoints")
    assert run.digest() == digest
    run.train("--resume").expect(0)
    shutil.rmtree(run.path / "checkpoints")
    assert "has lost its checkpoints: summary.json" in run.train("--resume").expect(1).output
    # Nor does anybody else say that it has none yet.
    for command in (["inspect", run.path, "--verify"], ["inspect", run.path], ["evaluate", run.path, "--data", log]):
        outcome = terrace(*command, log=workspace / "log").expect(1)
        assert "has lost its checkpoints: summary.json" in outcome.output, outcome.output


def test_a_resume_after_first_checkpoints_that_failed(terrace, workspace, log):
    """Begins anew, whatever they have left: no checkpoint is lost."""
    run = harness.Run(terrace, workspace, jobs.tiny([log], checkpoint={"every_batches": 1, "keep": 2}))
    whole = harness.Run(terrace, workspace, jobs.tiny([log]), "whole")
    whole.train().expect(0)
    run.train("--test-faults", "write:1:enospc:checkpoint-", "--test-kill-at", "checkpoint.before_publish:2").expect(-signal.SIGKILL)
    assert not run.checkpoints()
    run.train("--resume").expect(0)
    assert run.digest() == whole.digest()


def test_ssd_paths_in_the_runs_folder(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"ssd.paths": [str(workspace / "run" / "ssd")]})
    for flags in ((), ("--overwrite",)):
        run.train(*flags).expect(0)
        assert any((run.path / "ssd").rglob("rows-*"))


def test_ssd_paths_where_no_rows_can_lie(terrace, workspace, log):
    """Nothing is made or deleted then."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    run.train().expect(0)
    digest = run.digest()
    (workspace / "dangling").symlink_to(workspace / "nowhere")
    for path in (log, log / "below", "/proc/terrace", workspace / "dangling"):
        outcome = run.train("--overwrite", "--set", f"ssd.paths=[{workspace}/good, {path}]")
        assert outcome.code in (1, 2) and f"ssd.paths: rows can't lie in '{path}'" in outcome.output, outcome.output
        assert "nothing was changed" in outcome.output and run.digest() == digest
        new = harness.Run(terrace, workspace, jobs.tiny([log]), "new", **{"ssd.paths": [str(workspace / "good"), str(path)]})
        assert new.train().code == outcome.code
        assert not new.path.exists() and not (workspace / "good").exists()


def test_outputs_that_can_be_no_folder(terrace, workspace, log):
    (workspace / "dangling").symlink_to(workspace / "nowhere")
    for output in (log / "below", workspace / "dangling", workspace / "dangling" / "below"):
        outcome = harness.Run(terrace, workspace, jobs.tiny([log]), "other", output=str(output)).train().expect(2)
        assert "error: output: making folder" in outcome.output and "Not a directory" in outcome.output, outcome.output
    assert "holds no run" in terrace("inspect", log, log=workspace / "log").expect(2).output


def test_rows_of_integers_by_what_the_log_says(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"data.integers": "bucket"})
    run.train().expect(0)
    columns = log.read_text().split("\n")[0].split("\t")
    (column, value), *_ = [(number, text) for number, text in enumerate(columns[1:14], 1) if text]
    (row,) = json.loads(terrace.text("inspect", run.path, "--json", "--key", f"I{column}={value}"))["rows"]
    assert row["key"] >> 48 == column
    for wrong in (f"I{column}=x", f"I{column}=1.5", "I99=1"):
        assert "or I2=14" in terrace("inspect", run.path, "--key", wrong, log=workspace / "log").expect(2).output


def test_a_disk_that_is_not_mounted(terrace, workspace, log):
    disk = workspace / "disk"
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"ssd.paths": [str(disk)], "training.max_examples": 512})
    run.train().expect(0)
    disk.rename(workspace / "away")
    outcome = run.train("--resume", "--set", "training.max_examples=1024").expect(2)
    assert f"ssd.paths: the folder '{disk}/" in outcome.output and "mount that disk" in outcome.output, outcome.output
    assert not disk.exists()
    (workspace / "away").rename(disk)
    run.train("--resume", "--set", "training.max_examples=1024").expect(0)
    disk.rename(workspace / "away")
    outcome = run.train("--overwrite").expect(0)
    assert "is not there: rows that the run has on it" in outcome.output, outcome.output


def long_run(terrace, workspace, log):
    """A run that has begun to train and would go on for minutes, and its process."""
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 500}))
    process = run.start()
    run.wait_for_metrics(process, 2)
    return run, process


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)])
def test_signals_of_one_stop_are_one(terrace, workspace, log, signals):
    """A shell and its terminal send one each, and so do a process group and a wrapper."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run, process = long_run(terrace, workspace, log)
    finally:
        signal.signal(signal.SIGHUP, before)
    # All are waiting when it goes on: two that are alike would become one.
    for number in (signal.SIGSTOP, *signals, signal.SIGCONT):
        process.signal(number)
    outcome = process.wait().expect(130)
    assert "interrupted after a checkpoint" in outcome.output, outcome.output
    assert run.verify() and run.summary()["checkpoint"] >= 1


def test_a_second_signal_ends_at_once(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log], data={"format": "criteo", "train": [str(log)], "epochs": 500}))
    outcome = run.stop_twice(2).expect(1)
    assert "interrupted after a checkpoint" not in outcome.output, outcome.output
    assert "interrupted again: ended at once" in outcome.output, outcome.output
    assert run.verify()


def test_a_closed_terminal_is_a_stop_signal(terrace, workspace, log):
    # Whoever runs the tests under nohup wants them to survive, not the trainer.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        run, process = long_run(terrace, workspace, log)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.signal(signal.SIGHUP)
    process.wait().expect(130)
    assert run.checkpoints()
    process = run.start("--resume", "--set", f"training.max_examples={run.metrics()[-1]['examples'] + 5000}", prefix=["nohup"])
    run.wait_for_metrics(process, len(run.metrics()) + 1)
    process.signal(signal.SIGHUP)
    process.wait().expect(0)


def in_shell(terrace, script):
    return subprocess.run(["sh", "-c", f"T={terrace.binary}; {script}"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=harness.PATIENCE_SECONDS)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_files_do_not_take_the_place_of_closed_streams(terrace, workspace, log, closed):
    """What is said to people would be written into them."""
    run = harness.Run(terrace, workspace, jobs.tiny([log]), **{"ssd.backend": "threads"})
    done = in_shell(terrace, f"$T train {run.job_path} {closed}")
    # The result is said on the standard output.
    code = 1 if ">&- 2" in closed else 0
    assert done.returncode == code and run.summary()["finished"]
    run.metrics()
    run.verify()
    output = workspace / "generated.tsv"
    assert in_shell(terrace, f"$T generate --rows 2000 --output {output} {closed}").returncode == code
    reference = workspace / "reference.tsv"
    terrace("generate", "--rows", "2000", "--output", reference, log=workspace / "log").expect(0)
    assert output.read_bytes() == reference.read_bytes()


def test_predictions_are_durable_by_their_name(terrace, workspace, finished, log):
    folder = workspace / "out"
    folder.mkdir()
    result = run_binary(terrace, "predict", finished.path, "--data", log, "--output", folder / "predictions",
                        "--test-faults", f"sync_directory:1:sync_error:{folder}")
    assert result.returncode == 1 and str(folder) in result.stderr, result


def test_a_file_that_may_grow_no_further(terrace, workspace, finished, log):
    output = workspace / "predictions"
    done = in_shell(terrace, f"ulimit -f 8; $T predict {finished.path} --data {log} --output {output}")
    assert done.returncode == 1 and str(output) in done.stderr and "too large" in done.stderr.lower(), done
    assert not list(workspace.glob("predictions*"))


def test_rows_to_generate_are_limited(terrace, workspace):
    result = run_binary(terrace, "generate", "--rows", "10", "--first-row", str(2**64 - 5), "--output", workspace / "log.tsv")
    assert result.returncode == 2 and "--first-row" in result.stderr, result.stderr


def test_nobody_reads_what_a_run_says(terrace, workspace, log):
    run = harness.Run(terrace, workspace, jobs.tiny([log]))
    ours, theirs = os.pipe()
    os.close(ours)
    with open(workspace / "out", "w") as out:
        done = subprocess.run([str(terrace.binary), "train", str(run.job_path)], stdin=subprocess.DEVNULL, stdout=out,
                              stderr=theirs, timeout=harness.PATIENCE_SECONDS)
    os.close(theirs)
    assert done.returncode == 0 and run.summary()["finished"]


def test_a_second_trainer_is_refused(terrace, workspace, log):
    run, process = long_run(terrace, workspace, log)
    for flag in ("--resume", "--overwrite"):
        outcome = run.train(flag).expect(1)
        assert f"process {process.popen.pid} holds the run" in outcome.output
    # Readers work beside it.
    assert run.digest()
    process.signal(signal.SIGTERM)
    process.wait().expect(130)


def test_accept_threads(terrace, workspace, log):
    run, process = long_run(terrace, workspace, log)
    process.signal(signal.SIGTERM)
    process.wait().expect(130)
    change = ("--set", "training.threads=1")
    outcome = run.train("--resume", *change).expect(2)
    assert "training.threads: the run has '2', the job now '1'" in outcome.output
    process = run.start("--resume", "--accept", "threads", *change)
    lines = len(run.metrics())
    run.wait_for_metrics(process, lines + 2)
    process.signal(signal.SIGTERM)
    process.wait().expect(130)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(terrace, workspace, log):
    (workspace / "closed").mkdir(mode=0o500)
    run = harness.Run(terrace, workspace, jobs.tiny([log]), output=str(workspace / "closed" / "run"))
    outcome = run.train().expect(1)
    assert "ermission" in outcome.output and "closed" in outcome.output
