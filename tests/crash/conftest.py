"""What the crash tests share."""
import pytest

import harness


@pytest.fixture(scope="module")
def expected(terrace, job, tmp_path_factory):
    """The result of the module's job, trained undisturbed."""
    run = harness.Run(terrace, tmp_path_factory.mktemp("expected"), job)
    run.train().expect(0)
    return run.result()
