"""Which moment is the fullest: the loss, a backward pass, the optimizer's step, or the capture of CUDA graphs."""

import numpy as np
import pytest

from superpod.planner.memory import model_states
from tests.planner.memory.test_memory_terms import LAYER, SEQ, TOKEN, held, of, peak, shape


def owners(u):
    moment = peak.peak_moment(u)
    return {name: np.broadcast_to(size, u.c.rank.shape).ravel().tolist() for name, size in moment.owners.items()}, (
        np.broadcast_to(moment.set_aside, u.c.rank.shape).ravel().tolist()
    )


def test_the_optimizers_step_has_no_activations():
    """A wide model, half a sequence and unsharded two-byte gradients: 4 bytes a parameter are more than the rest."""
    u = of(shape(ffn=700), cp=2, sharding="none", options={"grads": "bf16"})
    at, set_aside = owners(u)
    assert (at["activations"], at["logits"], set_aside) == ([0], [0], [0])
    assert at["transient"] == [4 * held(u).dense.item()]


def test_the_capture_of_cuda_graphs_has_what_they_keep():
    """40 heads: a graph keeps 40 + 2 x 360 + 240 + 160 bytes a token and its backward pass 720; the MLP keeps 82."""
    u = of(shape(heads=40, kv_heads=40), pp=2, gbs=2, options={"cuda_graphs": True})
    at, set_aside = owners(u)
    assert at["activations"][0] == 2 * 1160 * SEQ
    assert at["transient"][0] == 720 * SEQ
    assert at["logits"] == [0, 0]
    assert set_aside[0] == (2 * 82 + 34 + TOKEN) * SEQ  # what the schedule needs instead comes from elsewhere
    bare = of(shape(heads=40, kv_heads=40), pp=2, gbs=2)
    assert at["buffers"][0] - owners(bare)[0]["buffers"][0] == 2 * 4 * TOKEN * SEQ  # inputs and outputs stay


@pytest.mark.parametrize(("vocab", "logits"), [(128, 1280), (640, 6400)])
def test_the_last_stage_peaks_at_its_loss(vocab, logits):
    at, _ = owners(of(shape(vocab=vocab), pp=2, gbs=2))
    assert at["logits"] == [0, logits * SEQ]
    assert at["activations"] == [2 * LAYER * SEQ, LAYER * SEQ]


def test_a_wide_layers_backward_pass_is_more_than_a_small_loss():
    """Gate and up of 2 x 2 x 700 bytes against 1,280 of logits and 60 of the ends."""
    at, _ = owners(of(shape(ffn=700)))
    assert at["logits"] == [0]
    assert at["transient"] == [(2800 + TOKEN) * SEQ]


def test_states_are_beside_whatever_is_fullest():
    u = of()
    at, _ = owners(u)
    for name, size in model_states.by_owner(u, held(u)).items():
        assert at[name] == [np.ravel(size).item()]
