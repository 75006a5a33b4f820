"""Access control of `recipes ui` by the headers of a request."""

import pytest

from superpod.pages.ui import access


def test_tokens_are_random_and_url_safe():
    tokens = {access.new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 32 and token.replace("-", "").replace("_", "").isalnum() for token in tokens)


@pytest.mark.parametrize("text", ["", "b", "tokem", "token ", "tökén", "\udcff", "TOKEN"])
def test_other_tokens_are_refused(text):
    assert not access.is_token(text, "token")
    assert access.is_token("token", "token")


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost:9000", "[::1]:8765", "LOCALHOST"])
def test_loopback_names_are_accepted_at_any_port(host):
    assert access.find_problem({"Host": host}) == ""


@pytest.mark.parametrize(
    "host",
    [
        "", "example.org", "example.org:80", "127.0.0.1.example.org", "localhost.example.org", "0.0.0.0:80",
        "127.0.0.2",
        "127.0.0.1@example.org", "example.org@127.0.0.1", "127.0.0.1/x", "[::1", "localhost,example.org", "127.0.0.1 x",
    ],
)  # fmt: skip
def test_other_host_names_are_refused(host):
    assert "only" in access.find_problem({"Host": host})


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ({"Origin": "http://127.0.0.1:80"}, True),
        ({"Origin": "http://127.0.0.1:81"}, False),
        ({"Origin": "https://127.0.0.1:80"}, False),
        ({"Origin": "http://example.org"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Dest": "empty"}, True),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Dest": "document"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, True),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}, False),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "empty"}, False),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Dest": "script"}, False),
    ],
    ids=str,
)
def test_requests_of_other_pages_are_refused(headers, good):
    assert (access.find_problem({"Host": "127.0.0.1:80", **headers}) == "") is good
