"""Parsing and checks of `--profile torch --profile-steps 10-12 --profile-ranks 0,8`."""

import json
import subprocess
import sys

import pytest

from superpod.errors import UserError
from superpod.requests.profile_request import ProfileRequest
from superpod.requests.request import Request


def test_request_round_trip():
    request = ProfileRequest.from_options("torch", " 10-12 ", "8,0,8")
    assert str(request) == "torch:10-12:0,8"
    assert ProfileRequest.parse(str(request)) == request
    assert ProfileRequest.from_options("nsys", "7", "0") == ProfileRequest("nsys", 7, 7, (0,))


@pytest.mark.parametrize(
    ("tool", "steps", "ranks", "words"),
    [
        ("torsh", "10-12", "0", "not a profiler"),
        ("", "10-12", "0", "not a profiler"),
        ("torch", "0-3", "0", "--profile-steps"),
        ("torch", "12-10", "0", "--profile-steps"),
        ("torch", "ten", "0", "--profile-steps"),
        ("torch", "1-101", "0", "101 steps"),
        ("torch", "10-12", "-1", "--profile-ranks"),
        ("torch", "10-12", "0;rm -rf /", "--profile-ranks"),
        ("torch", "10-12", ",".join(map(str, range(65))), "65 ranks"),
    ],
)
def test_invalid_profile_request_is_refused(tool, steps, ranks, words):
    with pytest.raises(UserError, match=words) as refused:
        ProfileRequest.from_options(tool, steps, ranks)
    assert refused.value.hint


def test_profile_request_is_stored():
    request = Request("tiny_llama3", profile="torch:10-12:0")
    assert request.facts()["profile"] == "torch:10-12:0"
    assert Request.from_facts("tiny_llama3", request.facts()) == request
    assert "profile" not in Request("tiny_llama3").facts()


def test_only_nsys_needs_a_variable():
    assert ProfileRequest.parse("torch:10-12:0").variables() == []
    (variable,) = ProfileRequest.parse("nsys:10-12:0,8").variables()
    assert (variable.name, variable.value) == ("SUPERPOD_NSYS_RANKS", "0,8")


CODE = """
import json
from superpod.errors import UserError
from superpod.requests.profile_request import ProfileRequest
from superpod.recipes import build
partial = build("tiny_llama3")
partial.trainer.max_steps = 20
before = len(partial.trainer.callbacks)
ProfileRequest.parse("torch:10-12:0").add_to(partial)
ProfileRequest.parse("nsys:5-5:0,1").add_to(partial)
answers = [{key: value for key, value in c.__arguments__.items()} for c in partial.trainer.callbacks[before:]]
for text in ("torch:19-21:0", "torch:10-12:2"):
    try:
        ProfileRequest.parse(text).add_to(partial)
    except UserError as refused:
        answers.append([str(refused), refused.hint])
print(json.dumps(answers))
"""


@pytest.mark.nemo
@pytest.mark.slow
def test_callbacks_of_the_profilers():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    torch_profiler, nsys, late, rank = json.loads(done.stdout.splitlines()[-1])
    assert torch_profiler == {"start_step": 9, "end_step": 12, "active_steps": 3}
    assert nsys == {"start_step": 4, "end_step": 5, "ranks": [0, 1]}
    assert "the run has only 20 steps" in late[0]
    assert late[1] == "use --profile-steps 18-20"
    assert "the run has 2 ranks, 0 to 1" in rank[0]
