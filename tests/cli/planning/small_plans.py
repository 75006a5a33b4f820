"""What the tests of the planning verbs share."""

SMALL = ("llama3_8b", "--gpu", "h100", "--gpus", "16", "--gbs", "64")


def printed(recipes_cli, *words, code=0, **how):
    """The standard output of a command that ends with `code` and without a traceback."""
    done = recipes_cli(*words, **how)
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout
