"""Runs the binary as a user does, and reads what a run leaves."""
import copy
import errno
import gzip
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import yaml

# Seconds after which a run of these small jobs hangs, on a machine that is busy with other things.
PATIENCE_SECONDS = 300


class Outcome:
    """One finished process."""

    def __init__(self, arguments, code, output, seconds):
        self.arguments, self.code, self.output, self.seconds = arguments, code, output, seconds

    def expect(self, code=0):
        assert self.code == code, (f"exit {self.code}, expected {code}: {' '.join(map(str, self.arguments))}\n"
                                   f"{self.output[-6000:]}")
        return self


class Process:
    """One running process; its output goes to a file, so that it never blocks on us. `stdout`: another place for its results."""

    def __init__(self, arguments, log, prefix=(), stdout=None):
        self.arguments = [*prefix, *map(str, arguments)]
        self.log = pathlib.Path(log)
        self.started = time.monotonic()
        with open(self.log, "wb") as output:
            self.popen = subprocess.Popen(self.arguments, stdin=subprocess.DEVNULL, stdout=output if stdout is None else stdout,
                                          stderr=output, start_new_session=True)
        self.outcome = None

    def poll(self):
        """The outcome, or None while it runs."""
        if self.outcome is None:
            pid, status = os.waitpid(self.popen.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.popen.returncode = code
                self.outcome = Outcome(self.arguments, code, self.log.read_text(errors="replace"),
                                       time.monotonic() - self.started)
        return self.outcome

    def wait(self, timeout=PATIENCE_SECONDS):
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                while self.poll() is None:
                    time.sleep(0.01)
                raise AssertionError(f"still running after {timeout} s: {' '.join(self.arguments)}\n"
                                     f"{self.outcome.output[-6000:]}")
            time.sleep(0.005)
        return self.outcome

    def signal(self, number):
        if self.poll() is None:
            os.kill(self.popen.pid, number)

    def open_when_it_reads(self, pipe):
        """A named pipe's other end, once the process has opened it."""
        while self.poll() is None:
            try:
                return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO
                time.sleep(0.005)
        raise AssertionError(f"ended without reading {pipe}:\n{self.outcome.output}")


class Terrace:
    def __init__(self, binary):
        self.binary = pathlib.Path(binary)
        self.count = 0

    def start(self, *arguments, log, prefix=(), stdout=None):
        return Process([self.binary, *arguments], log, prefix, stdout)

    def __call__(self, *arguments, log, prefix=(), timeout=PATIENCE_SECONDS):
        return self.start(*arguments, log=log, prefix=prefix).wait(timeout)

    def text(self, *arguments, code=0):
        """What a short command prints on standard output."""
        result = subprocess.run([str(self.binary), *map(str, arguments)], stdin=subprocess.DEVNULL,
                                capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert result.returncode == code, (f"exit {result.returncode}, expected {code}: terrace "
                                           f"{' '.join(map(str, arguments))}\n{result.stdout}\n{result.stderr}")
        return result.stdout


class Logs:
    """Click logs of the generator, cached by their settings."""

    def __init__(self, terrace, folder):
        self.terrace, self.folder, self.made = terrace, pathlib.Path(folder), {}

    def criteo(self, rows, suffix=".tsv", **settings):
        """A Criteo text file; settings are options of `terrace generate`."""
        identity = (rows, suffix, tuple(sorted(settings.items())))
        if identity not in self.made:
            if suffix == ".tsv":
                path = self.folder / f"log{len(self.made)}.tsv"
                options = [part for name, value in settings.items()
                           for part in (f"--{name.replace('_', '-')}", value)]
                self.terrace.text("generate", "--rows", rows, "--output", path, *options)
            else:
                path = compress(self.criteo(rows, **settings), suffix)
            self.made[identity] = path
        return self.made[identity]


def compress(path, suffix):
    """The file beside `path` with .gz or .zst at its end."""
    target = path.with_name(path.name + suffix.removeprefix(".tsv"))
    if target.suffix == ".gz":
        target.write_bytes(gzip.compress(path.read_bytes(), 1))
    else:
        subprocess.run(["zstd", "-q", "-f", "-1", str(path), "-o", str(target)], check=True)
    return target


def merge(base, changes):
    """A copy of a nested dict with values replaced by dotted path."""
    result = copy.deepcopy(base)
    for path, value in changes.items():
        inner = result
        *folders, name = path.split(".")
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return result


class Run:
    """One run folder and the commands over it. A run measures its disks only when the job says so: it takes longer than most
    jobs of the tests."""

    def __init__(self, terrace, folder, job, name="run", **changes):
        self.terrace, self.folder = terrace, pathlib.Path(folder)
        self.path = self.folder / name
        self.job_path = self.folder / f"{name}.yaml"
        self.job = merge(job, {"output": str(self.path), **changes})
        self.job.setdefault("ssd", {}).setdefault("merge_gap", "16KiB")
        self.job_path.write_text(yaml.safe_dump(self.job, sort_keys=False))
        self.processes = 0

    def start(self, *flags, prefix=(), stdout=None):
        self.processes += 1
        return self.terrace.start("train", self.job_path, *flags, prefix=prefix, stdout=stdout,
                                  log=self.folder / f"{self.path.name}.log{self.processes}")

    def train(self, *flags, prefix=(), timeout=PATIENCE_SECONDS):
        return self.start(*flags, prefix=prefix).wait(timeout)

    def least_budget(self, *flags, below="16MiB"):
        """In MiB: what the refusal of a budget below it says would do."""
        outcome = self.train(*flags, "--set", f"memory.budget={below}").expect(2)
        return math.ceil(float(re.search(r"needs at least ([\d.]+) ?MiB", outcome.output).group(1)))

    def resume_as_advised(self, outcome):
        """To the end. A run whose index outgrew the budget says which one would do: it is followed."""
        advised = 0
        while outcome.code == 1:
            advice = re.search(r"memory\.budget(?:=| must be at least )([\d.]+) ?MiB", outcome.output)
            assert advice and advised < 8, outcome.output[-4000:]
            advised += 1
            outcome = self.train("--resume", "--set", f"memory.budget={math.ceil(float(advice.group(1)))}MiB")
        outcome.expect(0)

    def digest(self):
        digest = self.terrace.text("inspect", self.path, "--digest").strip()
        assert digest and all(c in "0123456789abcdef" for c in digest), f"no hex line: '{digest}'"
        return digest

    def verify(self):
        return self.terrace.text("inspect", self.path, "--verify")

    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    def metrics(self):
        """The lines of metrics.jsonl. A running trainer may be in the midst of the last one."""
        try:
            text = (self.path / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def checkpoints(self):
        folder = self.path / "checkpoints"
        return sorted(p.name for p in folder.iterdir() if "tmp" not in p.name) if folder.is_dir() else []

    def result(self):
        """All that must be equal between two runs of one job: digest and metrics."""
        summary = self.summary()
        return {"digest": self.digest(), "progressive": summary["progressive"],
                "validation": summary.get("validation"), "examples": summary["examples"],
                "rows": summary["rows"],
                "metrics": [without_measurements(line) for line in self.metrics()]}

    def stop_twice(self, lines):
        """What came of a process that got a stop signal after so many lines of metrics, and another one more than a second
        after it had seen the first."""
        ours, theirs = full_pipe()
        process = self.start(stdout=theirs)
        self.wait_for_metrics(process, lines)
        summary = self.path / "summary.json"
        assert not summary.exists()
        process.signal(signal.SIGINT)
        # It goes no further than to its results, which nobody takes.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and not summary.exists():
            assert time.monotonic() < deadline, "the first signal was not seen"
            time.sleep(0.005)
        time.sleep(1.1)
        process.signal(signal.SIGTERM)
        outcome = process.wait()
        os.close(ours)
        os.close(theirs)
        return outcome

    def wait_for_metrics(self, process, lines):
        """Until metrics.jsonl has that many lines, or the process has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and len(self.metrics()) < lines:
            assert time.monotonic() < deadline, f"no {lines} lines of metrics in {self.path}"
            time.sleep(0.005)


class Interruptions:
    """Of the runs that a signal was to end on the way some may be faster than it. Where most are, nothing was tested."""

    def __init__(self):
        self.sent = self.ended = 0

    def add(self, outcome, expected):
        """A run that ended with `expected` was ended by the signal; one that was done ended with 0."""
        assert outcome.code in (expected, 0), f"exit {outcome.code}\n{outcome.output[-4000:]}"
        self.sent += 1
        self.ended += outcome.code == expected

    def check(self):
        print(f"{self.ended} of {self.sent} runs were ended by the signal")
        assert 2 * self.ended >= self.sent, f"{self.sent - self.ended} of {self.sent} runs were done before the signal came"


def full_pipe():
    """A pipe in which there is no room: whoever writes to it waits. Both of its ends."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    try:
        while os.write(theirs, bytes(4096)):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(theirs, True)
    return ours, theirs


def without_measurements(line):
    """A line of metrics.jsonl without what was measured: all else is a function of the job."""
    return {name: value for name, value in line.items() if name not in ("performance", "seconds")}


def assert_same(expected, actual, what):
    for name in expected:
        if name == "metrics":
            assert len(expected[name]) == len(actual[name]), f"{what}: lines of metrics.jsonl differ in number"
            for number, (a, b) in enumerate(zip(expected[name], actual[name]), 1):
                assert a == b, f"{what}: line {number} of metrics.jsonl differs"
        else:
            assert expected[name] == actual[name], f"{what}: {name} differs"


def remove(folder):
    shutil.rmtree(folder)


def copy_run(source, target):
    """A run folder as it lies on disk."""
    shutil.copytree(source, target, symlinks=True)
