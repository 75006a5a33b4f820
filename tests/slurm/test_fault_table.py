"""The table of faults: a new line replaces the line of the same case and no other."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.slurm.testbed.fault_table import DOCS, Line, lines, with_line
from tests.slurm.testbed.test_faults import NAMED


def attempt(state: str, message: str = "", **resume: object) -> Any:
    path = Path("/runs/r/attempts/001")
    return SimpleNamespace(result={"state": state, "message": message}, resume=resume, path=path)


def fake_run(*attempts: Any, lost: list[int]) -> Any:
    return SimpleNamespace(run=SimpleNamespace(attempts=list(attempts)), lost=lambda: lost)


def test_line_describes_each_attempt():
    killed = attempt("failed", "rank 1 on node2 was ended by signal 9 (Killed; a) [rank_killed]; resumes from step 20")
    later = attempt("done", step=20, set_aside=[{"step": 30}])
    line = Line.from_run("a", "NeMo", fake_run(killed, later, lost=[4]))
    did = "Failed: rank 1 on node2 was ended by signal 9 (Killed); step 30 set aside; resumes from step 20"
    assert str(line) == f"| a | NeMo | {did} | 2 | 4 |"
    assert Line.from_run("c", "toy", fake_run(killed, lost=[])).did == "went on, in the same job"


def test_line_of_a_stopped_run_has_the_reason():
    stopped = attempt("failed", "/runs/r cannot be resumed: a|b")
    line = Line.from_run("d", "toy", fake_run(attempt("stalled"), stopped, lost=[]))
    assert str(line) == "| d | toy | Stalled. Failed: RUN cannot be resumed: a/b; no job follows | 2 | 0 |"


def test_new_line_replaces_the_line_of_its_case():
    text = "before\n<!-- faults -->\n<!-- end faults -->\nafter\n"
    for fault, training, attempts in (("x", "NeMo", 1), ("y", "toy", 2), ("x", "toy", 3), ("x", "NeMo", 4)):
        text = with_line(text, Line(fault, training, "went on", attempts, 0))
    assert text.startswith("before\n<!-- faults -->\n| fault |")
    assert text.endswith("<!-- end faults -->\nafter\n")
    assert list(lines(text)) == [("x", "toy"), ("x", "NeMo"), ("y", "toy")]
    assert lines(text)["x", "NeMo"] == "| x | NeMo | went on | 4 | 0 |"


def test_documentation_has_the_table():
    """Every case that the testbed's tests name is in it, and each of its lines is one that `Line` may have written."""
    rows = lines(DOCS.read_text())
    toy, nemo = ({fault for fault, training in rows if training == name} for name in ("toy", "NeMo"))
    sources = [ast.parse(path.read_text()) for path in (DOCS.parents[1] / "tests/slurm/testbed").glob("test_*.py")]
    calls = [node for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ended = [call.args[1] for call in calls if ast.unparse(call.func) == "training.ends_well"]
    cases = {fault.value for fault in ended if isinstance(fault, ast.Constant)}
    assert len(cases) >= 12
    assert toy >= cases | NAMED
    assert nemo == toy
    assert len(rows) == len(toy) + len(nemo)
    for (fault, training), row in rows.items():
        _, _, _, did, attempts, repeated, _ = (cell.strip() for cell in row.split("|"))
        assert str(Line(fault, training, did, int(attempts), int(repeated))) == row
        assert (did == "went on, in the same job") == (int(attempts) == 1), row
        assert did.startswith(("went on", "Failed", "Stalled", "Requeued")), row
