"""Helpers of the tests of planning verbs."""

SMALL = ("llama3_8b", "--gpu", "h100", "--gpus", "16", "--gbs", "64")


def printed(recipes_cli, *words, code=0, **how):
    """Run a command, check its exit code and that there is no traceback, and return its stdout."""
    done = recipes_cli(*words, **how)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout
