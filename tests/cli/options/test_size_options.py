import pytest

from superpod.cli.options import size_options
from superpod.errors import UserError


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "M", "1e99"])
def test_an_enormous_batch_size_is_refused_in_a_short_line(text):
    with pytest.raises(UserError, match=r"--batch-tokens must be .*'[19]") as refused:
        size_options.parse_batch_tokens(text)
    assert len(str(refused.value)) < 140
