"""The evaluation of a fine-tuning run: which tokens of a packed file it counts, and what it says of their losses."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from superpod.weights.serving import evaluate

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
END = 4


def sequence(*samples):
    """A packed sequence of samples, each (ids, which of them are learnt)."""
    ids = [i for part, _ in samples for i in part]
    # As Megatron reads it: the mask of a position is that of the prediction made there.
    mask = [m for _, learnt in samples for m in [*learnt[1:], 0]]
    starts = np.cumsum([0, *[len(part) for part, _ in samples]])[:-1].tolist()
    return {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}


FIRST = ([0, 1, 2, 0], [0, 0, 1, 1])
SECOND = ([3, END], [0, 1])
FILLING = ([4, 4, 4], [0, 0, 0])


@pytest.fixture
def packed(tmp_path):
    rows = np.empty(3, dtype=object)
    rows[:] = [sequence(FIRST, SECOND), sequence(FILLING), sequence(SECOND, FILLING)]
    np.save(tmp_path / "packed.npy", rows, allow_pickle=True)
    return tmp_path / "packed.npy"


class Model(torch.nn.Module):
    """Says that the next number follows, by a factor e^2."""

    device = torch.device("cpu")

    def __init__(self, parameters=10):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.parameters_said, self.asked = parameters, []

    def num_parameters(self):
        return self.parameters_said

    def forward(self, ids):
        logits = torch.zeros(*ids.shape, 5)
        return SimpleNamespace(logits=logits.scatter_(-1, ((ids + 1) % 5)[..., None], 2.0))

    def generate(self, prompt, **options):
        self.asked.append((prompt.tolist(), options["max_new_tokens"], options["do_sample"], options["eos_token_id"]))
        assert options["attention_mask"].tolist() == torch.ones_like(prompt).tolist()
        return torch.cat([prompt, torch.tensor([[2, END]])], 1)


TOKENIZER = SimpleNamespace(
    eos_token_id=END,
    decode=lambda ids, skip_special_tokens: "".join(str(int(i)) for i in ids if i != END or not skip_special_tokens),
)
LIKELY, UNLIKELY = math.log(math.exp(2) + 4) - 2, math.log(math.exp(2) + 4)


@pytest.fixture
def model(monkeypatch):
    made = Model()
    monkeypatch.setattr(evaluate, "_load_model", lambda folder: (made, TOKENIZER))
    return made


def test_samples_are_cut_apart_and_those_that_teach_nothing_left_out(packed):
    listed = [(batch, list(s.ids), list(s.loss_mask)) for batch, s in evaluate.iterate_samples(packed, 2)]
    assert listed == [(0, [0, 1, 2, 0], [0, 1, 1]), (0, [3, 4], [1]), (1, [3, 4], [1])]


def test_the_loss_is_the_mean_over_learnt_tokens(packed, model):
    out = evaluate.evaluate_model(packed.parent, packed, 2)
    # 1 -> 2 likely, 2 -> 0 not, 3 -> 4 likely; in the second batch 3 -> 4
    assert out.loss == pytest.approx((3 * LIKELY + UNLIKELY) / 4, rel=1e-5)
    assert out.least == pytest.approx(LIKELY, rel=1e-5)
    assert out.most == pytest.approx((2 * LIKELY + UNLIKELY) / 3, rel=1e-5)
    assert (out.tokens, out.samples, out.dtype, out.answers) == (4, 3, "float32", [])


def test_answers_begin_where_the_learnt_tokens_do(packed, model):
    [first, second] = evaluate.evaluate_model(packed.parent, packed, 2, answers=2).answers
    assert first == evaluate.Answer("01", "2", "20")
    assert second == evaluate.Answer("3", "2", "")
    assert model.asked == [([[0, 1]], 10, False, END), ([[3]], 9, False, END)]


def test_a_long_answer_is_cut(packed, model, monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_NEW_TOKENS", 9)
    evaluate.evaluate_model(packed.parent, packed, 2, answers=1)
    assert model.asked[0][1] == 9


@pytest.mark.parametrize(("parameters", "count"), [(2_000_000_000, 2), (2_000_000_001, 0)])
def test_large_models_answer_nothing_on_cpus(packed, model, parameters, count):
    model.parameters_said = parameters
    assert len(evaluate.evaluate_model(packed.parent, packed, 2, answers=2).answers) == count


def test_a_file_without_anything_to_learn_is_refused(tmp_path, model):
    rows = np.empty(1, dtype=object)
    rows[:] = [sequence(FILLING)]
    np.save(tmp_path / "packed.npy", rows, allow_pickle=True)
    with pytest.raises(ValueError, match="no token in the loss"):
        evaluate.evaluate_model(tmp_path, tmp_path / "packed.npy", 1)


def test_the_command_writes_json(packed, model):
    evaluate.main(str(packed.parent), str(packed), str(packed.parent / "out.json"), "2", "1")
    out = json.loads((packed.parent / "out.json").read_text())
    assert (out["tokens"], out["answers"][0]["expected"]) == (4, "20")


@pytest.mark.parametrize(("free", "dtype"), [(1000, "auto"), (4000, torch.float32)])
def test_a_model_is_widened_only_where_it_fits(tmp_path, monkeypatch, free, dtype):
    import psutil
    import transformers

    (tmp_path / "model.safetensors").write_bytes(bytes(1000))  # twice that in 32 bits, and 60 % of what is free
    asked = {}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **options: asked.update(t=options))
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **options: asked.update(options) or Model()
    )
    model, _ = evaluate._load_model(tmp_path)
    assert (asked["torch_dtype"], asked["trust_remote_code"], asked["local_files_only"]) == (dtype, False, True)
    assert (asked["t"]["trust_remote_code"], asked["t"]["local_files_only"]) == (False, True)
    assert not model.training
