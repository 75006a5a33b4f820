import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from superpod.data.folder import DataFolder
from superpod.data.tokens.add import add
from superpod.data.tokens.indexed import read_lengths
from superpod.nemo2.data_module import data_module, mock_data_module

pytestmark = pytest.mark.nemo
SIZES = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 4}


def datasets(config: Any) -> tuple[Any, Any]:
    """Return NeMo's data module and its validation dataset, built by Megatron."""
    import fiddle

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fiddle.build(config)
        module.build(
            trainer_max_steps=20,
            trainer_val_check_interval=10,
            trainer_limit_val_batches=2,
            trainer_limit_test_batches=1,
        )
    return module, module._validation_ds


def test_nemo_trains_on_the_folder(built: Path, tmp_path: Path, nemo: None):
    own = shutil.copytree(built, tmp_path / "data")  # Megatron writes its sample indices into it
    folder = DataFolder.load(own)
    module, validation = datasets(data_module(folder, **SIZES))
    assert (module.tokenizer.vocab_size, module.tokenizer.eod) == (folder.vocab, 0)
    assert len(module._train_ds) >= 80
    assert module._train_ds[0]["tokens"].shape == (64,)
    assert int(module._train_ds[0]["tokens"].max()) < folder.vocab
    begin = folder.split_documents()["train"]
    assert validation.indices.tolist() == list(range(begin, begin + folder.split_documents()["validation"]))
    assert list(folder.index_cache_path.glob("*-GPTDataset-train-*"))
    assert sum(read_lengths(own / "text")) == folder.tokens


def test_a_weighted_blend(built: Path, corpus: Path, tmp_path: Path, nemo: None):
    import torch.distributed as dist

    tokens = (built / "text.bin").read_bytes()
    (tmp_path / "other.bin").write_bytes(tokens[2:] + tokens[:2])  # other tokens: those of 16 bits, turned by one
    shutil.copyfile(built / "text.idx", tmp_path / "other.idx")
    prefixes = [f"{built}/text", f"{tmp_path}/other"]
    folder = add(tmp_path / "b", prefixes, f"{built}/tokenizer", weights=[1, 3], split="80,10,10")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        module, _ = datasets(data_module(folder, **SIZES))
    finally:
        dist.destroy_process_group()
    assert module._train_ds.weights == [0.25, 0.75]
    assert [str(dataset.dataset.path_prefix) for dataset in module._train_ds.datasets] == prefixes


def test_mock_data_has_the_vocabulary(nemo: None):
    import fiddle

    module = fiddle.build(mock_data_module(500, **SIZES))
    module.setup()
    assert module.tokenizer.vocab_size == 500
    assert 400 < max(int(module._train_ds[number]["tokens"].max()) for number in range(20)) < 500


def test_validates_with_few_documents(folder: Path, nemo: None):
    """An epoch has fewer micro-batches than the validation interval, which Lightning would refuse."""
    from superpod.requests import resolve
    from superpod.requests.request import Request

    partial, _ = resolve.build_configuration(Request("tiny_llama3", data=folder))
    assert partial.trainer.check_val_every_n_epoch is None
    chosen, _ = resolve.build_configuration(Request("tiny_llama3", ("trainer.check_val_every_n_epoch=1",), folder))
    assert chosen.trainer.check_val_every_n_epoch == 1
