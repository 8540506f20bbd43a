"""Options and fixtures of the tests that run the binary."""
import os
import pathlib
import random
import shutil

import pytest

import harness

# The products of the references are small: threads that wait for them would take the cores from the program under test.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ROOT = pathlib.Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    group = parser.getgroup("terrace")
    group.addoption("--full", action="store_true", help="the long versions: every combination, every kill moment")
    group.addoption("--binary", default=str(ROOT / "build/bin/terrace"), help="the program under test")
    group.addoption("--sample-seed", type=int, default=None,
                    help="seed of sampled combinations and kill moments (default: a new one, printed)")


@pytest.fixture(scope="session")
def terrace(request):
    binary = pathlib.Path(request.config.getoption("--binary"))
    if not binary.exists():
        pytest.fail(f"{binary} does not exist: run scripts/build first")
    return harness.Terrace(binary)


@pytest.fixture(scope="session")
def full(request):
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def sample_seed(request):
    seed = request.config.getoption("--sample-seed")
    if seed is None:
        seed = random.SystemRandom().randrange(10**6)
    return seed


def pytest_report_header(config):
    return f"terrace: {config.getoption('--binary')}"


@pytest.fixture(scope="session")
def logs(terrace, tmp_path_factory):
    """Generated logs by what asks for them; each is made once."""
    return harness.Logs(terrace, tmp_path_factory.mktemp("logs"))


@pytest.fixture
def workspace(tmp_path):
    """A folder that a passed test leaves empty: runs are large."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)
