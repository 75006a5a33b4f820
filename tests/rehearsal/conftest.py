"""The ``outcome`` of a case as a fixture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.case_client import AnswerScript, CaseServer


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function from a request to its outcome. All tests' requests are sent at once, so that the cores stay busy."""
    requests = _parameters(request, "outcome")
    orders = sorted({case.order for case in requests})
    servers = {order: CaseServer(order, tmp_path_factory.mktemp(order)) for order in orders}
    for case in requests:
        servers[case.order].send(case)
    yield lambda case: servers[case.order].outcome(case)
    for server in servers.values():
        server.close()


@pytest.fixture
def outcome(request: pytest.FixtureRequest, outcomes: Any) -> dict[str, Any]:
    """The outcome of the request that this test is parametrised with."""
    return outcomes(request.param)


def _parameters(request: pytest.FixtureRequest, fixture: str) -> list[Any]:
    """The parameters of `fixture` in all collected tests of this folder and its subfolders."""
    tests = [item for item in request.session.items if Path(__file__).parent in item.path.parents]
    calls = [getattr(item, "callspec", None) for item in tests]
    return [call.params[fixture] for call in calls if call and fixture in call.params]


def _answer_script(request: pytest.FixtureRequest, folder: Path, fixture: str, *command: str) -> Iterator[AnswerScript]:
    script = AnswerScript(folder, [*command, *_parameters(request, fixture)])
    yield script
    script.end()


@pytest.fixture(scope="session")
def all_planted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerScript]:
    folder = tmp_path_factory.mktemp("planted")
    script = str(Path(__file__).with_name("planted_bugs.py"))
    yield from _answer_script(request, folder, "planted", script, str(folder))


@pytest.fixture
def planted(request: pytest.FixtureRequest, all_planted: AnswerScript) -> dict[str, Any]:
    """The failed checks of a rehearsal with the bug that this test is parametrised with."""
    return all_planted.wait_for(request.param)


@pytest.fixture(scope="session")
def all_shapes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerScript]:
    folder = tmp_path_factory.mktemp("shapes")
    command = ("-m", "superpod.rehearsal.feature_table", "--steps", "8", "--folder", str(folder))
    yield from _answer_script(request, folder, "shape", *command)


@pytest.fixture
def shape(request: pytest.FixtureRequest, all_shapes: AnswerScript) -> dict[str, Any]:
    """The result of rehearsing a recipe of the shape that this test is parametrised with."""
    return all_shapes.wait_for(request.param)
