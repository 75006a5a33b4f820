"""The ``outcome`` of a case as a fixture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.jobs import OneByOne, Server


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function from a job to its outcome. All collected tests' jobs are sent at once, so that the cores stay busy."""
    jobs = _asked(request, "outcome")
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


def _asked(request: pytest.FixtureRequest, fixture: str) -> list[Any]:
    """What the collected tests of this folder are parametrised with."""
    mine = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    calls = [getattr(item, "callspec", None) for item in mine]
    return [call.params[fixture] for call in calls if call and fixture in call.params]


def _one_by_one(request: pytest.FixtureRequest, folder: Path, fixture: str, *command: str) -> Iterator[OneByOne]:
    script = OneByOne(folder, [*command, *_asked(request, fixture)])
    yield script
    script.end()


@pytest.fixture(scope="session")
def all_planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneByOne]:
    folder = tmp_path_factory.mktemp("planted")
    script = str(Path(__file__).with_name("planted.py"))
    yield from _one_by_one(request, folder, "planted", script, str(folder))


@pytest.fixture
def planted(request: pytest.FixtureRequest, all_planted: OneByOne) -> dict[str, Any]:
    """What a rehearsal says of the bug that this test is parametrised with."""
    return all_planted.wait_for(request.param)


@pytest.fixture(scope="session")
def all_shapes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneByOne]:
    folder = tmp_path_factory.mktemp("shapes")
    command = ("-m", "superpod.rehearsal.table", "--steps", "8", "--folder", str(folder))
    yield from _one_by_one(request, folder, "shape", *command)


@pytest.fixture
def shape(request: pytest.FixtureRequest, all_shapes: OneByOne) -> dict[str, Any]:
    """How the rehearsal went of a recipe of the shape that this test is parametrised with."""
    return all_shapes.wait_for(request.param)
