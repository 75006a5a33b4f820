"""What a fine-tuning run is set up with: sizes, data, which loss counts and which checkpoint is kept."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.weights.finetuning import data_and_weights as setup
from superpod.weights.finetuning import steps_and_checkpoints


class Config(SimpleNamespace):
    """As nemo_run's: a class and its arguments."""

    def __init__(self, cls, **arguments):
        super().__init__(cls=cls, **arguments)


@pytest.fixture(autouse=True)
def nemo(monkeypatch):
    """NeMo's classes by name alone: this is about the numbers that they are given."""
    classes = {
        "nemo_run": {"Config": Config},
        "nemo": {},
        "nemo.lightning": {"RestoreConfig": "RestoreConfig"},
        "nemo.collections.common.tokenizers.huggingface.auto_tokenizer": {"AutoTokenizer": "AutoTokenizer"},
        "nemo.collections.llm.gpt.data.fine_tuning": {"FineTuningDataModule": "FineTuningDataModule"},
        "nemo.collections.llm.gpt.data.packed_sequence": {"PackedSequenceSpecs": "PackedSequenceSpecs"},
        "lightning.pytorch.callbacks": {"EarlyStopping": "EarlyStopping"},
    }
    for name, members in classes.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["nemo"])["lightning"] = sys.modules["nemo.lightning"]


def recipe(*, cp=1, tp=1, callbacks=(), graphs=False, steps=100, every=30) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(seq_length=2048, micro_batch_size=2, global_batch_size=128),
        model=SimpleNamespace(config=SimpleNamespace(enable_cuda_graph=graphs, cuda_graph_scope=None)),
        trainer=SimpleNamespace(
            strategy=SimpleNamespace(
                context_parallel_size=cp, tensor_model_parallel_size=tp, ddp=SimpleNamespace(average_in_collective=True)
            ),
            callbacks=list(callbacks), max_steps=steps, val_check_interval=every, check_val_every_n_epoch=1,
        ),
        resume=SimpleNamespace(restore_config=None),
        log=SimpleNamespace(ckpt=SimpleNamespace()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cp", "tp", "packed", "sizes"),
    [
        (1, 1, True, (2048, 4096, 64, 1, 16)),
        (1, 1, False, (2048, 2048, 128, 1, 16)),
        (None, None, True, (2048, 4096, 64, 1, 16)),
        (2, 1, True, (2048, 4096, 64, 4, 16)),  # a piece from the front and one from the back for each rank
        (4, 8, True, (2048, 4096, 64, 8, 64)),  # 2 x cp x tp = 64
        (1, 3, True, (2048, 4096, 64, 1, 48)),
        (3, 1, False, (2048, 2048, 128, 6, 48)),
    ],
)
def test_sizes_follow_from_micro_batch_and_layout(cp, tp, packed, sizes):
    assert setup.compute_sizes(recipe(cp=cp, tp=tp), packed) == setup.PackingSizes(*sizes)


def test_the_weights_are_those_of_the_base(tmp_path):
    partial = recipe()
    setup.set_initial_weights(partial, tmp_path)
    assert vars(partial.resume.restore_config) == {"cls": "RestoreConfig", "path": str(tmp_path)}


def given(partial, folder, *, validation=130, packed=True):
    setup.set_data(
        partial, folder, setup.PackingSizes(2048, 4096, 64, 4, 32), folder / "tok", validation, packed=packed
    )
    return partial.data


def test_training_reads_the_packed_files_one_sequence_at_a_time(tmp_path):
    partial = recipe()
    data = given(partial, tmp_path)
    assert (data.cls, data.dataset_root) == ("FineTuningDataModule", str(tmp_path))
    assert (data.seq_length, data.micro_batch_size, data.global_batch_size) == (4096, 1, 64)
    assert vars(data.tokenizer) == {
        "cls": "AutoTokenizer", "pretrained_model_name": str(tmp_path / "tok"), "use_fast": True,
    }  # fmt: skip
    specs = data.packed_sequence_specs
    assert (specs.cls, specs.packed_sequence_size) == ("PackedSequenceSpecs", 4096)
    assert specs.packed_train_data_path == str(tmp_path / "training.npy")
    assert specs.packed_val_data_path == str(tmp_path / "validation.npy")
    assert specs.packed_metadata_path == str(tmp_path / "packed.json")
    assert data.dataset_kwargs == {"pad_seq_length_to_mult": 32}
    assert partial.model.config.seq_length == 4096


def test_every_learnt_token_counts_alike(tmp_path):
    partial = recipe()
    given(partial, tmp_path)
    assert partial.model.config.calculate_per_token_loss is True
    assert partial.trainer.strategy.ddp.average_in_collective is False  # Megatron refuses both at once


@pytest.mark.parametrize(("validation", "batches"), [(128, 2), (129, 3), (1, 1)])
def test_a_validation_reads_all_of_its_sequences(tmp_path, validation, batches):
    partial = recipe()
    given(partial, tmp_path, validation=validation)
    assert partial.trainer.limit_val_batches == batches
    assert partial.trainer.limit_test_batches == 0


@pytest.mark.parametrize(
    ("overlap", "graphs", "packed", "overlapped", "padded", "cu"),
    [
        (True, False, True, True, True, False),
        (True, False, False, False, False, False),
        (False, True, True, False, True, True),
        (False, False, True, False, False, False),
    ],
)
def test_what_has_one_length_gets_one(tmp_path, overlap, graphs, packed, overlapped, padded, cu):
    callback = SimpleNamespace(tp_comm_overlap=overlap)
    partial = recipe(callbacks=[object(), callback], graphs=graphs)
    data = given(partial, tmp_path, packed=packed)
    assert callback.tp_comm_overlap is overlapped
    assert data.dataset_kwargs.get("pad_to_max_length", False) is padded
    assert getattr(data.packed_sequence_specs, "pad_cu_seqlens", False) is cu
    assert data.dataset_kwargs["pad_seq_length_to_mult"] == 32


@pytest.mark.parametrize(
    ("steps", "every", "asked", "becomes"),
    [
        (100, 30, None, (100, 25)),  # 25 is the largest divisor of 100 up to 30
        (100, 30, 60, (60, 30)),
        (100, 30, 7, (7, 7)),
        (100, 30, 31, (31, 1)),
    ],
)
def test_the_last_step_is_validated(steps, every, asked, becomes):
    partial = recipe(steps=steps, every=every)
    steps_and_checkpoints.set_steps(partial, asked)
    trainer = partial.trainer
    assert (trainer.max_steps, trainer.val_check_interval) == becomes
    assert trainer.check_val_every_n_epoch is None


def test_the_best_checkpoint_is_the_one_of_the_lowest_validation_loss():
    partial = recipe()
    steps_and_checkpoints.set_steps(partial, None)
    assert vars(partial.log.ckpt) == {
        "monitor": "val_loss",
        "mode": "min",
        "save_top_k": 1,
        "filename": "{step}-{val_loss:.4f}",
        "every_n_train_steps": None,  # after each validation
        "save_last": True,  # beside the best
    }


def test_early_stopping_waits_for_the_lowest_loss():
    before = object()
    partial = recipe(callbacks=[before], steps=100, every=20)
    steps_and_checkpoints.set_early_stopping(partial, 4, 0.01)
    [kept, stopping] = partial.trainer.callbacks
    assert kept is before
    assert vars(stopping) == {
        "cls": "EarlyStopping", "monitor": "val_loss", "mode": "min", "patience": 4, "min_delta": 0.01,
    }  # fmt: skip
    none = recipe(steps=100, every=20)
    steps_and_checkpoints.set_early_stopping(none, 0, 0.01)
    assert none.trainer.callbacks == []


def test_more_patience_than_validations_is_refused():
    with pytest.raises(UserError, match="100 steps have only 5 validations, one every 20") as refused:
        steps_and_checkpoints.set_early_stopping(recipe(steps=100, every=20), 5, 0.0)
    assert "such as 5" in refused.value.hint  # 100 / (4 x 5)
