"""`recipes explain`."""

from tests.cli.planning.small_plans import printed


def test_the_shares_add_up_to_the_step(recipes_cli):
    text = printed(recipes_cli, "explain", "llama3_70b_pretrain_h100_bf16")
    shares = [float(line.split("%")[0]) for line in text.splitlines() if line.strip()[0].isdigit()]
    assert 95 < sum(shares) < 101
    assert "bound by" in text


def test_a_layout_that_does_not_fit_says_so_before_its_step_time(recipes_cli):
    text = printed(recipes_cli, "explain", "llama3_70b", "--gpu", "h100", "--gpus", "8")
    _, verdict, step = text.splitlines()[:3]
    assert verdict.startswith("does not fit: ")
    assert step.startswith("with enough memory: step ")
