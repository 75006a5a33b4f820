"""The ``outcome`` of a case as a fixture."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.launchers.rehearsal.jobs import Server


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function from a job to its outcome. All collected tests' jobs are sent at once, so that the cores stay busy."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    jobs = [each.params["outcome"] for each in parameters if each and "outcome" in each.params]
    servers = {order: Server(order, tmp_path_factory.mktemp(order)) for order in sorted({job.order for job in jobs})}
    for job in jobs:
        servers[job.order].send(job)
    yield lambda job: servers[job.order].outcome(job)
    for server in servers.values():
        server.close()


@pytest.fixture
def outcome(request: pytest.FixtureRequest, outcomes: Any) -> dict[str, Any]:
    """The outcome of the job that this test is parametrised with."""
    return outcomes(request.param)
