"""scripts/setup and setup-peers in a checkout of their own: nothing is downloaded, and no package is installed."""
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOLS = ("bash", "dirname", "sed", "awk", "grep", "mktemp", "rm", "cat", "id", "tail")


def empty_wheel(folder, name):
    """A package of that name, for pip without an index."""
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def checkout(workspace):
    """Its folder, and the environment in which its scripts find every Debian package installed."""
    shutil.copytree(ROOT / "scripts", workspace / "scripts")
    commands, wheels, torch = workspace / "commands", workspace / "wheels", workspace / "torch/include/ATen"
    for folder in (commands, wheels, torch):
        folder.mkdir(parents=True)
    (torch / "ATen.h").touch()
    for name in ("numpy", "pytest", "pyyaml"):
        empty_wheel(wheels, name)
    for tool in TOOLS:
        (commands / tool).symlink_to(shutil.which(tool))
    query = commands / "dpkg-query"
    query.write_text(f"#!/bin/sh\nawk '!/^#/ {{print \"ii \", $2}}' {workspace}/scripts/packages\n")
    query.chmod(0o755)
    environment = {"PATH": str(commands), "TERRACE_TORCH_DIR": str(workspace / "torch"), "PIP_NO_INDEX": "1",
                   "PIP_FIND_LINKS": str(wheels), "HOME": str(workspace), "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    return workspace, environment


def setup(checkout, script="setup"):
    folder, environment = checkout
    return subprocess.run([str(folder / "scripts" / script)], env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=300)


def give_python(checkout):
    (checkout[0] / "commands/python3").symlink_to(pathlib.Path(sys.executable).resolve())


def begin_environment(folder):
    """As `python -m venv` leaves it when it is interrupted before pip is there."""
    subprocess.run([pathlib.Path(sys.executable).resolve(), "-m", "venv", "--without-pip", folder], check=True)


def test_an_environment_that_was_begun_is_finished(checkout):
    give_python(checkout)
    begin_environment(checkout[0] / ".venv")
    done = setup(checkout)
    assert done.returncode == 0 and "Python environment: installed" in done.stdout, done.stdout + done.stderr
    again = setup(checkout)
    assert again.returncode == 0 and "Python environment: .venv is ready" in again.stdout, again.stdout + again.stderr


def test_that_of_the_peers_too(checkout):
    give_python(checkout)
    begin_environment(checkout[0] / ".venv-peers")
    done = setup(checkout, "setup-peers")
    # There is no torch without an index: pip says so, not Python that there is no pip.
    assert done.returncode == 1 and "could not install" in done.stderr and "No module named pip" not in done.stderr, done.stderr
    subprocess.run([checkout[0] / ".venv-peers/bin/python", "-m", "pip", "--version"], check=True, stdout=subprocess.DEVNULL)


def test_without_a_python_it_says_what_to_install(checkout):
    done = setup(checkout)
    assert done.returncode == 1 and done.stderr == (
        "setup: no Python >= 3.10 with the venv module. Run: apt-get install --yes python3 python3-venv\n"), done.stderr
