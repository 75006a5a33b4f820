"""Older and newer spellings of rotary embeddings in a config.json mean the same."""

import pytest

from superpod.weights.families.hf_keys import Refused, normal

LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"rope_theta": 1.0}, {"rope_theta": 1.0}),
        ({"rope_parameters": None}, {"rope_parameters": None}),
        ({"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0, "rope_scaling": None}),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 6.0, "rope_type": "linear", "factor": 8.0},
                                 "sliding_attention": {"rope_theta": 4.0}}},
            {"rope_theta": 6.0, "rope_local_base_freq": 4.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            {"rope_scaling": None},
        ),
        (  # the older spelling of the same, and a type that scales nothing
            {"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_parameters": LINEAR},
            {"rope_scaling": LINEAR},
        ),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 5.0}},
         {"rope_theta": 5.0, "rope_scaling": None}),
    ],
)  # fmt: skip
def test_newer_keys_become_older_ones(given, becomes):
    new = normal(given)
    assert {key: value for key, value in new.items() if key != "rope_parameters" or value is None} == becomes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rope_theta": 4.0, "rope_parameters": {"rope_theta": 5.0}}, r"rope_theta is 4\.0, and .* says 5\.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
         "rope_scaling is"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "windowed layers of type 'yarn'"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(given, says):
    with pytest.raises(Refused, match=says):
        normal(given)
