"""The proof of a conversion: what it compares, in which precision, and that it leaves the models as they were."""

from types import SimpleNamespace

import pytest

from superpod.errors import UserError
from superpod.weights.transfer import forward_check as check

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
VOCABULARY, HIDDEN = 8, 4


class Layer(torch.nn.Module):
    """Remembers the number format that it computed in."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("count", torch.tensor([3]))

    def forward(self, x):
        self.seen = (x.dtype, self.linear.weight.dtype, self.count.dtype, torch.is_grad_enabled(), self.training)
        return x + self.linear(x)


class Model(torch.nn.Module):
    """Stands for both sides: `decoder.layers` of Megatron, `model.layers` of transformers."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.to(dtype)

    @property
    def decoder(self):
        return self

    @property
    def model(self):
        return self

    def forward(self, tokens, positions=None, mask=None, use_cache=None):
        self.tokens, self.positions = tokens, positions
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if use_cache is None else SimpleNamespace(logits=logits)


CONFIG = SimpleNamespace(vocab_size=VOCABULARY, window_size=None)


@pytest.fixture(autouse=True)
def nothing_to_mend(monkeypatch):
    monkeypatch.setattr(check.nemo_fixes, "apply_fixes", lambda core: None)


def test_models_that_compute_the_same_agree():
    ours = check.run_megatron(Model(), CONFIG)
    outcome = check.require_equal_logits(Model(), Model(), ours, "x")
    assert (outcome.tokens, outcome.difference, outcome.tolerance) == (48, 0.0, 1e-4)
    assert ours.logits.shape == (48, VOCABULARY)
    assert ours.tokens.shape == (1, 48)


@pytest.mark.parametrize(("error", "allowed"), [(0.5e-4, True), (2e-4, False), (float("nan"), False)])
def test_the_difference_is_relative_to_the_largest_logit(error, allowed):
    theirs = Model()
    with torch.no_grad():
        theirs.head.weight.mul_(50)
    ours = check.run_megatron(theirs, CONFIG)
    scale = ours.logits.abs().max().item()
    assert scale > 10
    spoilt = ours.logits.clone()
    spoilt[5, 2] += error * scale
    spoilt = check.ForwardPass(ours.tokens, spoilt)
    if allowed:
        assert check.require_equal_logits(theirs, theirs, spoilt, "x").difference == pytest.approx(error, rel=0.1)
    else:
        with pytest.raises(UserError, match="x: NeMo and transformers compute different functions: on 48 tokens"):
            check.require_equal_logits(theirs, theirs, spoilt, "x")


def test_padding_rows_of_the_vocabulary_are_not_compared():
    ours = check.run_megatron(Model(), CONFIG)
    padded = torch.cat([ours.logits, torch.full((48, 4), 1e9)], 1)
    assert check.require_equal_logits(Model(), Model(), check.ForwardPass(ours.tokens, padded), "x").difference == 0


def test_both_compute_in_fp32_without_gradients_and_come_back_as_they_were():
    core = Model(torch.bfloat16).train()
    before = {name: tensor.clone() for name, tensor in core.state_dict().items()}
    ours = check.run_megatron(core, CONFIG)
    assert ours.logits.dtype == torch.float32
    for layer in core.layers:
        assert layer.seen == (torch.float32, torch.float32, torch.int64, False, False)
    assert core.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in core.state_dict().items())
    assert {tensor.dtype for tensor in core.parameters()} == {torch.bfloat16}
    exact = Model(torch.bfloat16).float()
    torch.testing.assert_close(exact(core.tokens)[0], ours.logits)
    assert core.positions.tolist() == [list(range(48))]
    core(core.tokens)  # nothing is left that would widen it
    assert core.layers[0].seen[0] == torch.bfloat16


def test_only_one_layer_is_wide_at_a_time():
    core = Model(torch.bfloat16)
    widths = []
    core.layers[0].register_forward_hook(lambda *_: widths.append(core.layers[1].linear.weight.dtype))
    core.layers[1].register_forward_pre_hook(lambda *_: widths.append(core.layers[0].linear.weight.dtype))
    check.run_megatron(core, CONFIG)
    assert widths == [torch.bfloat16, torch.bfloat16]


def test_autocast_is_off():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = check.run_megatron(Model(), CONFIG)
    assert torch.equal(ours.logits, check.run_megatron(Model(), CONFIG).logits)


def test_megatrons_softmax_keeps_its_fp32_result_for_the_pass_only():
    core = Model()
    softmax = torch.nn.Identity()
    softmax.input_in_bf16, softmax.input_in_fp16, softmax.input_in_float16 = True, False, True
    core.softmax = softmax
    seen = []
    core.layers[0].register_forward_hook(lambda *_: seen.append((softmax.input_in_bf16, softmax.input_in_float16)))
    check.run_megatron(core, CONFIG)
    assert seen == [(False, False)]
    assert (softmax.input_in_bf16, softmax.input_in_fp16, softmax.input_in_float16) == (True, False, True)


@pytest.mark.parametrize(
    ("window", "parameters", "tokens"),
    [
        (None, 1, 48),
        (8, 1, 48),
        ([99, 0], 1, 123),
        (99, 1, 123),
        ((4095, 0), 1, 2112),
        ((4095, 0), 2_000_000_000, 2112),
        ((4095, 0), 2_000_000_001, 512),
    ],
)
def test_the_pass_is_longer_than_a_window(window, parameters, tokens):
    assert check._choose_token_count(SimpleNamespace(window_size=window), parameters) == tokens


def rotary(frequencies, **more):
    return SimpleNamespace(inv_freq=torch.tensor(frequencies), **more)


def sides(theirs, ours, **local):
    """A model of each side with rotary embeddings."""
    hf, megatron = Model(), Model()
    object.__setattr__(hf, "rotary_emb", theirs)
    object.__setattr__(megatron, "rotary_pos_emb", ours)
    for name, value in local.items():
        object.__setattr__(hf, name, value)
    return hf, megatron


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        (rotary([1.0, 0.1]), rotary([1.0, 0.1]), True),
        (rotary([1.0, 0.1]), rotary([1.0, 0.1000005]), True),
        (rotary([1.0, 0.1]), rotary([1.0, 0.100002]), False),
        (rotary([1.0, 0.1]), rotary([1.0, 0.1, 0.01]), False),
        (rotary([0.25, 0.025]), rotary([1.0, 0.1], seq_len_interpolation_factor=4.0), True),
        (rotary([1.0, 0.1]), rotary([1.0, 0.1], seq_len_interpolation_factor=4.0), False),
        (rotary([1.0, 0.1]), rotary([9.0], inv_freq_extra=1), True),  # yarn's are made anew in each pass
        (None, rotary([9.0]), True),
    ],
)
def test_rotary_frequencies_are_compared_beyond_the_pass(theirs, ours, same):
    hf, megatron = sides(theirs, ours)
    passed = check.run_megatron(megatron, CONFIG)
    if same:
        check.require_equal_logits(hf, megatron, passed, "x")
    else:
        with pytest.raises(UserError, match="x: NeMo's rotary frequencies differ"):
            check.require_equal_logits(hf, megatron, passed, "x")


def test_those_of_windowed_layers_too():
    ours = rotary([1.0], rope_local=rotary([0.5]))
    for local, same in ((rotary([0.5]), True), (rotary([0.6]), False)):
        hf, megatron = sides(rotary([1.0]), ours, rotary_emb_local=local)
        passed = check.run_megatron(megatron, CONFIG)
        if same:
            check.require_equal_logits(hf, megatron, passed, "x")
        else:
            with pytest.raises(UserError, match="local rotary frequencies differ"):
                check.require_equal_logits(hf, megatron, passed, "x")
