"""Failing disks: a clear error, no wrong row, and the last checkpoint still resumes."""
import os
import subprocess

import pytest

import harness
import jobs


@pytest.fixture(scope="module")
def job(logs):
    train = logs.criteo(jobs.EVICTING_ROWS, **jobs.EVICTING_LOG)
    job = jobs.evicting([train])
    job["ssd"].update({"file_size": "1MiB", "shards": 2, "stale_share": 0.3})
    return job


@pytest.fixture(scope="module")
def expected(terrace, job, tmp_path_factory):
    run = harness.Run(terrace, tmp_path_factory.mktemp("expected"), job)
    run.train().expect(0)
    return run.result()


def test_a_full_disk(terrace, workspace, job, expected):
    """A real file system with no room left: the run stops, and goes on when there is room."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("can't make a mount namespace here")
    disk = workspace / "disk"
    disk.mkdir()
    run = harness.Run(terrace, disk, job)
    # The job file lies on the small disk too; it is written again once that is mounted.
    text = run.job_path.read_text()
    script = f"""
set -u
mount -t tmpfs -o size=4g tmpfs {disk} || exit 99
cat > {run.job_path} <<'JOB'
{text}
JOB
{terrace.binary} train {run.job_path} > {workspace}/first.log 2>&1 &
trainer=$!
until [ "$(ls {run.path}/checkpoints 2>/dev/null | wc -l)" -ge 2 ]; do
  kill -0 $trainer || break
  sleep 0.01
done
kill -9 $trainer
wait $trainer
echo "first $?"
mount -o remount,size=$(( $(df --output=used -B1 {disk} | tail -n 1) + 60000000 )) {disk}
{terrace.binary} train {run.job_path} --resume > {workspace}/full.log 2>&1
echo "full $?"
mount -o remount,size=4g {disk}
{terrace.binary} train {run.job_path} --resume > {workspace}/resumed.log 2>&1
echo "resumed $?"
echo "digest $({terrace.binary} inspect {run.path} --digest)"
"""
    result = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True,
                            stdin=subprocess.DEVNULL, timeout=harness.PATIENCE_SECONDS)
    said = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    full = (workspace / "full.log").read_text()
    assert said["first"] == "137", f"the first trainer ended by itself: {said}"
    assert said["full"] == "1", f"{said}\n{full}"
    assert "space" in full.lower() or "quota" in full.lower(), full
    assert str(disk) in full, f"the message names no file:\n{full}"
    assert said["resumed"] == "0", (workspace / "resumed.log").read_text()
    assert said["digest"] == expected["digest"]
